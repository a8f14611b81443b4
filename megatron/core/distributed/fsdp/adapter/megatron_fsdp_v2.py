"""Megatron-FSDP's version 2: its functions whose arguments have other names there."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

import torch
from torch import nn

from megatron.core.distributed.fsdp.api.fully_shard import microbatch as own_microbatch
from megatron.core.distributed.fsdp.checkpoint import load_checkpoint as own_load_checkpoint
from megatron.core.distributed.fsdp.checkpoint import save_checkpoint as own_save_checkpoint
from megatron.core.distributed.fsdp.runtime.context import FsdpContext


def microbatch(context: FsdpContext | nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Mark forward and backward in this scope as one microbatch of a step: ``microbatch`` of this library.

    Args:
        context: of the ``fully_shard_context`` in which the modules were sharded.
        is_last: whether gradients are reduced for the optimizer.

    Ranks: all, with the same arguments; does not communicate.
    """
    return own_microbatch(context, is_last)


def save_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, checkpoint_dir: str | os.PathLike[str]
) -> None:
    """Save model and optimizer to a folder: ``save_checkpoint`` of this library, in its format. Ranks: all; blocks."""
    own_save_checkpoint(model, optimizer, checkpoint_dir)


def load_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    checkpoint_dir: str | os.PathLike[str],
    *,
    sync_model_weights: bool = True,
) -> None:
    """Load what ``save_checkpoint`` saved: that of this library.

    Args:
        sync_model_weights: accepted; the next forward sees the loaded weights either way.

    Ranks: all; blocks.
    """
    own_load_checkpoint(model, optimizer, checkpoint_dir)
