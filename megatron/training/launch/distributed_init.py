"""Initialisation of torch.distributed, of this rank's device and of the process groups."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.core.nccl_settings import NcclSettings
from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import RankGrid
from megatron.training.launch.rendezvous import Rendezvous, meet


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Settings of the communication between ranks."""

    backend: str | None = None
    """``nccl`` trains on CUDA devices, ``gloo`` on CPUs; None: nccl if there are CUDA devices."""

    timeout_minutes: int = 10
    """Time after which a missing rank is an error on all others."""

    create_all_gather_group: bool = False
    """Gather weights on a separate communicator, so that gathers overlap reductions; off, they take turns on one."""

    use_sharp: bool = False
    """Use SHARP switches for the reductions of one process group."""

    sharp_enabled_group: str | None = None
    """The process group for SHARP: ``dp`` (default) or ``dp_replica``."""

    nccl_communicator_config_path: str | None = None
    """A YAML file with NCCL communicator options by process group."""

    @property
    def timeout(self) -> timedelta:
        return timedelta(minutes=self.timeout_minutes)

    def __post_init__(self) -> None:
        if self.backend not in (None, "nccl", "gloo"):
            raise ValueError(f"the backend must be nccl or gloo, got {self.backend}")
        if self.timeout_minutes < 1:
            raise ValueError(f"--distributed-timeout-minutes must be at least 1, got {self.timeout_minutes}")


def initialize_distributed(config: DistributedConfig, rendezvous: Rendezvous | None = None) -> torch.device:
    """Initialise the default process group and return this rank's device, which is made current.

    An existing default process group is used. Without torchrun's environment there is one rank.

    Args:
        rendezvous: the ranks, if they have met already.

    Raises:
        RuntimeError: CUDA is requested and missing, there are fewer devices than local ranks, or ranks are missing.

    Ranks: all; blocks until all have joined.
    """
    backend = _backend(config)
    device = local_device(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return device
    met = rendezvous or meet(config.timeout)
    # PyTorch would use the same keys again after a restart; those of the rendezvous belong to this start alone.
    dist.init_process_group(
        backend,
        store=met.store,
        rank=met.rank,
        world_size=met.world_size,
        timeout=config.timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return device


def process_groups(config: DistributedConfig, grid: RankGrid) -> ProcessGroupCollection:
    """Build the process groups of the run, with separate ones for all-gathers of weights if ``config`` says so.

    Raises:
        ValueError: the grid's number of ranks is not the run's; an NCCL communicator option is unknown.

    Ranks: all; blocks until the ranks of its groups have joined.
    """
    return build_process_groups(
        grid,
        timeout=config.timeout,
        create_all_gather_group=config.create_all_gather_group,
        nccl=NcclSettings.of(
            use_sharp=config.use_sharp,
            sharp_enabled_group=config.sharp_enabled_group,
            config_path=config.nccl_communicator_config_path,
        ),
    )


def _backend(config: DistributedConfig) -> str:
    return config.backend or ("nccl" if torch.cuda.is_available() else "gloo")


def local_device(config: DistributedConfig) -> torch.device:
    """Return the device of this rank; nothing is allocated on it.

    Raises:
        RuntimeError: CUDA is requested and missing, or there are fewer devices than local ranks.
    """
    if _backend(config) == "gloo":
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
    return torch.device("cuda", local_rank)


def set_deterministic() -> None:
    """Make torch use only deterministic kernels; it raises where there is none."""
    # cuBLAS reads this when it makes its first handle: without a fixed workspace its sums depend on streams.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
