"""One line in the log of a run instead of one for each rank."""

from __future__ import annotations

import logging

import torch.distributed as dist


def warn_on_rank_0(logger: logging.Logger, message: str, *arguments: object) -> None:
    """Log a warning that every rank would log alike."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(message, *arguments)
