"""Starts the ranks: device, process group, and what a rank says when another is missing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import RankGrid


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """How ranks find and reach each other."""

    backend: str | None = None
    """``nccl`` trains on CUDA devices, ``gloo`` on CPUs; None: nccl where there are CUDA devices."""

    timeout_minutes: int = 10
    """Until a rank that does not come is an error on all others."""

    create_all_gather_group: bool = False
    """Weights are gathered on a communicator of their own, beside reductions; off, they take turns."""

    def __post_init__(self) -> None:
        if self.backend not in (None, "nccl", "gloo"):
            raise ValueError(f"the backend must be nccl or gloo, got {self.backend}")
        if self.timeout_minutes < 1:
            raise ValueError(f"--distributed-timeout-minutes must be at least 1, got {self.timeout_minutes}")


def world_size_of_environment() -> int:
    """Ranks that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_of_environment() -> int:
    """This rank among those that torchrun started; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def initialize_distributed(config: DistributedConfig) -> torch.device:
    """The default process group spans all ranks; returns this rank's device, which is current.

    A group that exists already is used. Without torchrun's environment there is one rank.

    Raises:
        RuntimeError: CUDA was asked for and is missing, there are fewer devices than local ranks, or ranks do not come.

    Ranks: all; blocks until all have come.
    """
    backend = config.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    device = _device(backend)
    if dist.is_initialized():
        return device
    timeout = timedelta(minutes=config.timeout_minutes)
    device_id = device if device.type == "cuda" else None
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        store = HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout, device_id=device_id)
        return device
    try:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    except (dist.DistStoreError, dist.DistNetworkError, ValueError) as error:
        raise RuntimeError(
            f"rank {rank_of_environment()} must meet {world_size_of_environment()} ranks at MASTER_ADDR:MASTER_PORT "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} within {config.timeout_minutes} minutes, "
            f"got: {error}; look for ranks that did not start, and start all of them with torchrun"
        ) from error
    return device


def process_groups(config: DistributedConfig, grid: RankGrid) -> ProcessGroupCollection:
    """The groups of every split of the run; where ``config`` says so, weights are gathered through groups of their own.

    Raises:
        ValueError: the grid is of another number of ranks than there are.

    Ranks: all; blocks until the ranks of its groups have come.
    """
    return build_process_groups(
        grid,
        timeout=timedelta(minutes=config.timeout_minutes),
        create_all_gather_group=config.create_all_gather_group,
    )


def _device(backend: str) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if not torch.cuda.is_available():
        raise RuntimeError(
            "--distributed-backend nccl needs CUDA devices, got none; use --distributed-backend gloo on CPUs"
        )
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(
            f"each local rank needs its own CUDA device, got local rank {local_rank} and {torch.cuda.device_count()} "
            "devices; start fewer ranks with --nproc-per-node"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def set_deterministic() -> None:
    """torch uses only kernels whose result does not depend on scheduling, or raises where it has none."""
    # cuBLAS reads it when its first handle is made: without a fixed workspace its sums depend on streams.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
