"""Megatron-FSDP's version 2: its functions whose arguments have other names there."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.api.fully_shard import fully_shard as own_fully_shard
from megatron.core.distributed.fsdp.api.fully_shard import microbatch as own_microbatch
from megatron.core.distributed.fsdp.checkpoint import load_checkpoint as own_load_checkpoint
from megatron.core.distributed.fsdp.checkpoint import save_checkpoint as own_save_checkpoint
from megatron.core.distributed.fsdp.config.mixed_precision import MegatronFsdpPolicy, MixedPrecisionPolicy
from megatron.core.distributed.fsdp.config.placement import Placements
from megatron.core.distributed.fsdp.runtime.context import FsdpContext


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    grad_divisor: float = 1,
    **further: Any,
) -> nn.Module:
    """Shard a module's parameters: ``fully_shard`` of this library, with the dtypes that Megatron-FSDP has by default.

    Args:
        mixed_precision_policy: None for ``main_grads_dtype`` or ``grad_comm_dtype`` means the parameter's dtype, for
            ``main_params_dtype`` fp32. ``grad_comm_dtype`` is in effect (Megatron-FSDP's version 2 does not read it).
        further: other arguments of this library's function.

    Ranks: all of the mesh, in the same order; blocks.
    """
    if further.get("mp_policy") is None and isinstance(mixed_precision_policy, MixedPrecisionPolicy | None):
        mixed_precision_policy = MegatronFsdpPolicy.of(mixed_precision_policy, version=2)
    return own_fully_shard(module, mesh, placements, mixed_precision_policy, grad_divisor, **further)


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
