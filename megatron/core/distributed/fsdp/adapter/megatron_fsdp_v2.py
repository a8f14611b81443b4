"""Functions of Megatron-FSDP's version 2 whose arguments or rules differ from this library's."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.adapter.fully_sharded_data_parallel import FullyShardedDataParallel
from megatron.core.distributed.fsdp.adapter.megatron_fsdp import adapt_optimizer
from megatron.core.distributed.fsdp.api.fully_shard import ModuleT
from megatron.core.distributed.fsdp.api.module import FsdpModule, scope_of_construction
from megatron.core.distributed.fsdp.api.module import microbatch as own_microbatch
from megatron.core.distributed.fsdp.api.optimizer import OptimizerT, contexts_of_groups, groups_of
from megatron.core.distributed.fsdp.checkpoint import load_checkpoint as own_load_checkpoint
from megatron.core.distributed.fsdp.checkpoint import save_checkpoint as own_save_checkpoint
from megatron.core.distributed.fsdp.checkpoint.optimizer import make_initial_state
from megatron.core.distributed.fsdp.compat.context import MegatronContext
from megatron.core.distributed.fsdp.compat.module import MegatronFsdpPolicy
from megatron.core.distributed.fsdp.compat.parameter_group import MegatronParameterGroup
from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.config.placement import Placements
from megatron.core.distributed.fsdp.fsdp2.fully_shard import fully_shard as own_fully_shard
from megatron.core.distributed.fsdp.fsdp2.fully_shard import fully_shard_context as own_fully_shard_context
from megatron.core.distributed.fsdp.runtime.context import FsdpContext


@contextmanager
def fully_shard_context(
    device: torch.device | str | None = None,
    *,
    use_symmetric_memory: bool = False,
    unify_communication_stream: bool = False,
) -> Iterator[MegatronContext]:
    """Share one context between the units of this scope: ``fully_shard_context`` of this library, with Megatron-FSDP's rules.

    Raises:
        RuntimeError: scopes are nested, or a unit runs forward before the scope ends.

    Ranks: all that shard the units, with the same arguments; does not communicate.
    """
    if scope_of_construction.get() is not None:
        raise RuntimeError(
            "fully_shard_context does not support nesting, got a scope within another one: a unit belongs to one context; leave the "
            "outer scope first"
        )
    with own_fully_shard_context(
        device, use_symmetric_memory=use_symmetric_memory, unify_communication_stream=unify_communication_stream
    ) as context:
        assert isinstance(context, MegatronContext), "named by the surface"
        with context.under_construction():
            yield context


def fully_shard(
    module: ModuleT,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    grad_divisor: float = 1,
    **further: Any,
) -> ModuleT:
    """Shard a module with this library's ``fully_shard``, in a ``fully_shard_context``, as Megatron-FSDP requires.

    Args:
        mixed_precision_policy: None for ``main_grads_dtype`` or ``grad_comm_dtype`` means the parameter's dtype, for
            ``main_params_dtype`` fp32. ``grad_comm_dtype`` is in effect (Megatron-FSDP's version 2 does not read it).
        further: other arguments of this library's function.

    Raises:
        RuntimeError: the call is outside such a scope; later, ``load_state_dict(assign=True)`` is called.
        ValueError: a child module belongs to another context.

    Ranks: all of the mesh, in the same order; blocks.
    """
    _check_scope(module)
    if further.get("mp_policy") is None and isinstance(mixed_precision_policy, MixedPrecisionPolicy | None):
        mixed_precision_policy = MegatronFsdpPolicy.of(mixed_precision_policy, version=2)
    sharded = own_fully_shard(module, mesh, placements, mixed_precision_policy, grad_divisor, **further)
    for member in [sharded] if isinstance(sharded, nn.Module) else sharded:
        member.register_load_state_dict_pre_hook(_refuse_assign)
    return sharded


def _refuse_assign(_module: nn.Module, _state: Any, _prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    if metadata.get("assign_to_params_buffers", False):
        raise RuntimeError(
            "load_state_dict(assign=True) must come before fully_shard, got it for a module of Megatron-FSDP's version 2, whose parameters "
            "are views of flat buffers; leave assign out, which copies"
        )


def _check_scope(module: nn.Module | Sequence[nn.Module]) -> None:
    context = scope_of_construction.get()
    if context is None:
        raise RuntimeError(
            "fully_shard must run inside fully_shard_context, got a call outside of one: units of Megatron-FSDP's version 2 get their "
            "context from it; write `with fully_shard_context(device):`, or use megatron.core.distributed.fsdp.fully_shard, which does "
            "not need it"
        )
    for member in [module] if isinstance(module, nn.Module) else module:
        for name, inner in member.named_modules():
            if inner is not member and isinstance(inner, FsdpModule) and inner._fsdp_unit.context is not context:
                raise ValueError(
                    f"modules in a {type(member).__name__} must be sharded in one scope, got {name}, which belongs to another "
                    "fully_shard_context; shard both in the same scope"
                )


def microbatch(
    *args: Any,
    context: FsdpContext | nn.Module | None = None,
    module: FsdpContext | nn.Module | None = None,
    is_last: bool | None = None,
    is_first: bool | None = None,
) -> AbstractContextManager[None]:
    """Mark forward and backward in this scope as one microbatch of a step: ``microbatch`` of this library.

    Megatron-FSDP has released ``microbatch(context, is_last)`` and ``microbatch(module, is_first)``. Both work. A positional second
    argument means ``is_last`` after a context and ``is_first`` after a module.

    Args:
        context, module: the context of the ``fully_shard_context``, or a module that is sharded or has sharded children.
        is_last: whether gradients are reduced for the optimizer; None: yes.
        is_first: whether the optimizer may have written main weights; None: yes, unless unreduced gradients are pending.

    Raises:
        TypeError: not exactly one context or module, or the second argument is given twice.

    Ranks: all, with the same arguments; does not communicate.
    """
    given = [one for one in (*args[:1], context, module) if one is not None]
    if len(given) != 1 or not isinstance(given[0], FsdpContext | nn.Module) or len(args) > 2:
        raise TypeError(f"microbatch needs one context or module, and is_last or is_first, got {args} and {given}")
    for second in args[1:]:
        is_named = is_last if isinstance(given[0], FsdpContext) else is_first
        if is_named is not None or not isinstance(second, bool):
            raise TypeError(
                f"microbatch needs True or False as its second argument, once, got {second!r} and {is_named!r}"
            )
        if isinstance(given[0], FsdpContext):
            is_last = second
        else:
            is_first = second
    if isinstance(given[0], FsdpContext):
        assert isinstance(given[0], MegatronContext), "named by the surface"
        given[0].ensure_finalized()
    return own_microbatch(given[0], is_last is not False, is_first=is_first)


def fully_shard_optimizer(optimizer: OptimizerT, *, precision_aware: bool = False) -> OptimizerT:
    """Make the optimizer refuse steps with unreduced gradients and update the model weights after each step.

    Args:
        precision_aware: the optimizer takes gradients in another dtype than the main weights; they are not cast.
    """
    adapt_optimizer(optimizer, precision_aware=precision_aware)
    if not getattr(optimizer, "checks_its_steps", False) and not optimizer.__dict__.get(_SYNCS):
        optimizer.__dict__[_SYNCS] = True
        optimizer.register_step_post_hook(_sync_weights)
    return optimizer


_SYNCS = "_fsdp_syncs_after_steps"


def _sync_weights(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    groups = groups_of(optimizer)
    for group in groups:
        # The next forward runs collectives and computes FP8 scales.
        if isinstance(group, MegatronParameterGroup) and group.weights.codec.casts and not group.weights.syncs_jointly:
            group.sync_model_weight_from_main_weight()
    for context in contexts_of_groups(groups):
        context.weights_changed()


def save_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, checkpoint_dir: str | os.PathLike[str]
) -> None:
    """Save model and optimizer to a folder by the names that Megatron-FSDP's ``load_checkpoint`` reads.

    A wrapped model (``MegatronFSDP``) is saved by the names of the unwrapped model, which ``load_checkpoint`` expects.

    The folder is a DCP checkpoint of ``{"model": ..., "optimizer": ...}``; this library's ``load_checkpoint`` also reads it. Optimizers
    that only this library has (``FlatAdamW``, ``FlatMuon``) are saved in the format of its own ``save_checkpoint``.

    Ranks: all; blocks.
    """
    if optimizer is not None and getattr(optimizer, "checks_its_steps", False):
        own_save_checkpoint(model, optimizer, checkpoint_dir)
        return
    if isinstance(model, FullyShardedDataParallel):
        model = model.module
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        make_initial_state(optimizer)
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=checkpoint_dir)


def load_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    checkpoint_dir: str | os.PathLike[str],
    *,
    sync_model_weights: bool = True,
    load_optimizer: bool = True,
) -> None:
    """Load what ``save_checkpoint`` saved: that of this library.

    Args:
        load_optimizer: False does not load the optimizer.
        sync_model_weights: accepted; the next forward sees the loaded weights either way.

    Ranks: all; blocks.
    """
    own_load_checkpoint(model, optimizer, checkpoint_dir, load_optimizer=load_optimizer)
