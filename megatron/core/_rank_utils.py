"""This process's rank, also before process groups exist."""

from __future__ import annotations

import os

import torch.distributed as dist


def safe_get_rank() -> int:
    """Return the rank: that of torch.distributed, or what the launcher (torchrun, Slurm) says, or 0."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


def safe_get_world_size() -> int:
    """Return the number of ranks: that of torch.distributed, or what the launcher (torchrun, Slurm) says, or 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)
