"""What autograd calls: when a gradient reaches a unit's output, and at a backward's end."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from megatron.core.distributed.fsdp.graphs import GraphToken
from megatron.core.distributed.fsdp.unit import FsdpUnit

if TYPE_CHECKING:
    from megatron.core.distributed.fsdp.context import FsdpContext


class BackwardEnd:
    """What autograd calls at a backward's end. It dies with the backward, also with one that failed."""

    def __init__(self, context: FsdpContext) -> None:
        self._context = weakref.ref(context)

    def __call__(self) -> None:
        context = self._context()
        if context is not None:
            context.end_backward()


class OutputHook:
    """Begins a unit's backward when the gradient of one of its outputs arrives."""

    __slots__ = ("context", "token", "unit")

    def __init__(self, context: FsdpContext, unit: FsdpUnit, token: GraphToken) -> None:
        self.context, self.unit, self.token = context, unit, token

    def __call__(self, grad: torch.Tensor) -> None:
        token = self.token
        if token.is_done and token.generation != self.context.graphs.generation:
            raise RuntimeError(
                f"backward runs a second time through a graph of {self.unit.name} that was made before weights moved to "
                "their planned addresses; keep graphs only within a step, or run forward again"
            )
        token.is_done = True
        self.context.begin_unit_backward(self.unit)
