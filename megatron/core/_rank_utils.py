"""This process's rank, also before process groups exist, and logs of one rank."""

from __future__ import annotations

import logging
import os
from typing import Any

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


def log_single_rank(logger: logging.Logger, level: int, msg: object, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Log on one rank; arguments but ``rank`` are those of ``logger.log``."""
    if logger.isEnabledFor(level) and safe_get_rank() == rank:
        logger.log(level, msg, *args, **kwargs)
