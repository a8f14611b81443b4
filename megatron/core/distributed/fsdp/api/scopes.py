"""Scopes: one context for several roots, and the microbatches of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import torch
from torch import nn

from megatron.core.distributed.fsdp.api.module import Surface, find_context, topmost_fsdp_modules
from megatron.core.distributed.fsdp.config.engine_options import EngineOptions
from megatron.core.distributed.fsdp.runtime.context import FsdpContext

_shared_context: ContextVar[FsdpContext | None] = ContextVar("fully_shard_context", default=None)


@contextmanager
def fully_shard_context(
    device: torch.device | str | None = None, options: EngineOptions | None = None, *, surface: Surface | None = None
) -> Iterator[FsdpContext]:
    """Make the units that ``fully_shard`` makes in this scope share one context, also if they have no common root.

    Args:
        device: the units' device; None: the current CUDA device, or the CPU where there is none.
        options: the settings of the context.
        surface: names its class.

    Yields:
        The context, which ``microbatch`` takes too.

    Ranks: all that shard the units, with the same arguments; does not communicate.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    surface = surface or Surface()
    context = surface.context_class(
        torch.device(device), options, is_shared=True, observer_class=surface.observer_class
    )
    token = _shared_context.set(context)
    try:
        yield context
    finally:
        _shared_context.reset(token)


@contextmanager
def microbatch(
    module: nn.Module | FsdpContext, is_last: bool = True, *, is_first: bool | None = None
) -> Iterator[None]:
    """Mark forward and backward in this scope as one microbatch of a step.

    Outside of any scope every forward counts as a first and every backward as a last microbatch: right, but slower when
    gradients accumulate. Scopes nest; leaving one restores the former settings, also after an exception.

    Args:
        module: a sharded module, a module that holds some, or the context of a ``fully_shard_context``.
        is_first: True for a step's first microbatch. The optimizer may have written main weights, so the first unshard
            of each group updates the model weights from them; unreduced gradients of earlier microbatches are dropped. False
            for the others, whose weights are those of the first one. None: it is the first one unless unreduced
            gradients wait; right in any case, but where none wait (sharded gradients) each microbatch casts the weights again.
        is_last: True to reduce gradients for the optimizer. False leaves them where ``Placements.gradient`` says:
            unreduced (``Partial``), or reduced over the axes where it is ``Shard(0)``. While unreduced gradients wait,
            ``param.grad`` has no values: it can be cleared, which gives them up, and all else is a RuntimeError.

    Raises:
        ValueError: there is no sharded module in ``module``.

    Ranks: all, with the same arguments; does not communicate.
    Source: ours; FSDP2's ``set_requires_gradient_sync`` and ``set_is_last_backward`` in one scope.
    """
    with ExitStack() as scopes:
        for context in contexts_of(module):
            scopes.enter_context(context.microbatch(is_first=is_first, is_last=is_last))
        yield


def contexts_of(module: nn.Module | FsdpContext) -> list[FsdpContext]:
    """Return the contexts of the topmost sharded modules in a module, each once.

    Raises:
        ValueError: there is no sharded module in it.
    """
    if isinstance(module, FsdpContext):
        return [module]
    contexts = list(dict.fromkeys(find_context(unit) for unit in topmost_fsdp_modules(module)))
    if not contexts:
        raise ValueError(
            f"{type(module).__name__} must hold sharded modules, got none; call fully_shard on its layers first"
        )
    return contexts


def scope_of_construction() -> FsdpContext | None:
    """Return the context of the ``fully_shard_context`` around this call; None outside of any."""
    return _shared_context.get()
