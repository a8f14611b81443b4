"""Recomputation and evaluation of layers that multiply in FP8. Importing this file without transformer-engine raises ImportError.

What is recomputed in backward must be what forward computed: in FP8, though backward runs outside of the context of
quantisation, and with the same scales, though those of delayed scaling have moved since. And it must leave no trace: largest
absolute values that were noted in forward must not be noted again, and histories must not advance.

transformer-engine's own ``checkpoint`` keeps scales in queues, one for each module, which a forward without a backward
puts out of step, and its histories advance, and are reduced over ranks, once more for each part that is recomputed. So
scales are kept here beside what is recomputed, for ``torch.utils.checkpoint`` without reentrance.

An evaluation leaves no trace either: transformer-engine's modules note its largest absolute values, which the next training
step would take for its own, so that losses of training would depend on when the model is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron.core.extensions.transformer_engine_layers import FP8GlobalStateManager
from megatron.core.extensions.transformer_engine_recipes import autocast, no_autocast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def recomputation(modules: Iterable[nn.Module]) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for a forward that begins now and for its recomputations: a ``context_fn`` of torch.utils.checkpoint.

    Args:
        modules: all modules that run in it, those within others included.
    """
    if not FP8GlobalStateManager.is_fp8_enabled():
        return nullcontext(), nullcontext()
    used = _UsedScales(modules)
    return used, _Repetition(used, FP8GlobalStateManager.get_fp8_recipe(), FP8GlobalStateManager.get_fp8_group())


@contextmanager
def without_trace(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Return a context whose forwards are as if they had not run for the scales of later steps: histories stay as they are.

    Args:
        modules: all modules that run in it, those within others included.
    """
    modules = list(modules)
    noted = [state.amax_history[0] for state in _scalings(modules)]
    before = torch.cat(noted) if noted else None
    try:
        yield
    finally:
        for state in _scalings(modules):  # the first forward makes histories, which are empty then
            state.amax_history[0].zero_()
        _write(noted, before)


def _scalings(modules: Iterable[nn.Module]) -> list[Any]:
    states = (getattr(module, "fp8_meta", {}).get("scaling_fwd") for module in modules)
    return [state for state in states if hasattr(state, "amax_history")]


class _UsedScales(AbstractContextManager[None]):
    """The context of a forward, which notes the scales of delayed scaling that it uses; there are none with other recipes."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._scalings: list[Any] = []
        self._scales: torch.Tensor | None = None

    def __exit__(self, *_: object) -> None:
        # The first forward makes them, and none moves them before its end.
        self._scalings = _scalings(self._modules)
        self._scales = torch.cat([state.scale for state in self._scalings]) if self._scalings else None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Put the scales back for a while; afterwards scales and largest absolute values are what they were before."""
        scales = [state.scale for state in self._scalings]
        own = scales + [state.amax_history[0] for state in self._scalings]
        before = torch.cat(own) if own else None
        _write(scales, self._scales)
        try:
            yield
        finally:
            _write(own, before)


class _Repetition(AbstractContextManager[None]):
    """The context of the recomputations; a graph that is kept may need several."""

    def __init__(self, used: _UsedScales, recipe: Any, group: ProcessGroup | None) -> None:
        self._used, self._recipe, self._group = used, recipe, group
        self._running: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._running.append(self._run())
        self._running[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._running.pop().__exit__(*error)

    @contextmanager
    def _run(self) -> Iterator[None]:
        # Histories advance at the end of the outermost context alone, and not at that of one that is off.
        with self._used.again(), no_autocast(), autocast(self._recipe, self._group):
            yield


@torch.no_grad()
def _write(targets: list[torch.Tensor], values: torch.Tensor | None) -> None:
    if values is not None:
        torch._foreach_copy_(targets, list(values.split([target.numel() for target in targets])))
