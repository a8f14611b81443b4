"""Log lines that are written once for a run instead of once for each rank."""

from __future__ import annotations

import logging

import torch.distributed as dist


def warn_on_rank_0(logger: logging.Logger, message: str, *arguments: object) -> None:
    """Log a warning on rank 0 alone; all ranks would log the same."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(message, *arguments)
