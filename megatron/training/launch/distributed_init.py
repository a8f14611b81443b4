"""Initialisation of torch.distributed, of this rank's device and of the process groups."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore

from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import RankGrid


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Settings of the communication between ranks."""

    backend: str | None = None
    """``nccl`` trains on CUDA devices, ``gloo`` on CPUs; None: nccl if there are CUDA devices."""

    timeout_minutes: int = 10
    """Time after which a missing rank is an error on all others."""

    create_all_gather_group: bool = False
    """Gather weights on a separate communicator, so that gathers overlap reductions; off, they take turns on one."""

    def __post_init__(self) -> None:
        if self.backend not in (None, "nccl", "gloo"):
            raise ValueError(f"the backend must be nccl or gloo, got {self.backend}")
        if self.timeout_minutes < 1:
            raise ValueError(f"--distributed-timeout-minutes must be at least 1, got {self.timeout_minutes}")


def world_size_of_environment() -> int:
    """Return the number of ranks that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank_of_environment() -> int:
    """Return this rank's index among those that torchrun started; 0 without it."""
    return int(os.environ.get("RANK", "0"))


def initialize_distributed(config: DistributedConfig) -> torch.device:
    """Initialise the default process group and return this rank's device, which is made current.

    An existing default process group is used. Without torchrun's environment there is one rank.

    Raises:
        RuntimeError: CUDA is requested and missing, there are fewer devices than local ranks, or ranks are missing.

    Ranks: all; blocks until all have joined.
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
            f"rank {rank_of_environment()} must reach {world_size_of_environment()} ranks at MASTER_ADDR:MASTER_PORT "
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} within {config.timeout_minutes} minutes, "
            f"got: {error}; look for ranks that did not start, and start all of them with torchrun"
        ) from error
    return device


def process_groups(config: DistributedConfig, grid: RankGrid) -> ProcessGroupCollection:
    """Build the process groups of the run, with separate ones for all-gathers of weights if ``config`` says so.

    Raises:
        ValueError: the grid has another number of ranks than the run.

    Ranks: all; blocks until the ranks of its groups have joined.
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
    """Make torch use only deterministic kernels; it raises where there is none."""
    # cuBLAS reads this when it makes its first handle: without a fixed workspace its sums depend on streams.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
