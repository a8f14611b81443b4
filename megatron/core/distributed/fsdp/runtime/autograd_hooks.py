"""What autograd calls in a backward: where a unit's begins, and where all of it ends."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from megatron.core.distributed.fsdp.runtime.graphs import Anchor, Graph, Graphs
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit


class Called(Protocol):
    """What the hooks ask and tell: the ``FsdpContext``, which imports this file."""

    graphs: Graphs
    retains_graph: bool
    num_entered: int

    def begin_unit_backward(self, unit: FsdpUnit) -> None:
        """Begin the backward of a unit."""

    def end_unit_backward(self, unit: FsdpUnit) -> None:
        """End the backward of a unit."""

    def end_backward(self) -> None:
        """End a backward."""


class BackwardEnd:
    """A callback at a backward's end. It lives as long as the backward, also one that failed."""

    def __init__(self, context: Called) -> None:
        self._context = weakref.ref(context)

    def __call__(self) -> None:
        context = self._context()
        if context is not None:
            context.end_backward()


class InputHook:
    """Ends the backward of a unit, the first within the outermost, when the gradient of one of its inputs is there.

    No unit is before it whose beginning would tell. Autograd runs what was recorded later first: the unit's own gradients are there,
    of this forward and of all later ones.
    """

    __slots__ = ("context", "unit")

    def __init__(self, context: Called, unit: FsdpUnit) -> None:
        self.context, self.unit = context, unit

    def __call__(self, grad: torch.Tensor) -> None:
        self.context.end_unit_backward(self.unit)


class OutputHook:
    """Begins a unit's backward when the gradient of one of its outputs arrives."""

    __slots__ = ("anchor", "context", "graph", "place", "retained_at", "unit")
    retained_at: int | None  # the unit's write_count when a backward that keeps the graph came here

    def __init__(self, context: Called, unit: FsdpUnit, graph: Graph, anchor: Anchor | None) -> None:
        self.context, self.unit, self.graph, self.anchor, self.retained_at = context, unit, graph, anchor, None
        self.place = unit.order, context.num_entered

    def __call__(self, grad: torch.Tensor) -> None:
        if self.retained_at is not None or self.graph.generation != self.context.graphs.generation:
            self._check_again()
        self.graph.is_done = not torch.is_grad_enabled()  # what is recorded of this backward waits for one of its own
        self.unit.order, self.unit.last_inside = self.place  # forwards of other graphs may have come since
        self.context.begin_unit_backward(self.unit)
        if self.context.retains_graph or self.retained_at is not None:
            self._retain(self.context.retains_graph)

    def _retain(self, keeps: bool) -> None:
        self.graph.is_retained = keeps
        self.retained_at = self.unit.write_count if keeps else None

    def _check_again(self) -> None:
        if self.graph.generation != self.context.graphs.generation:
            raise RuntimeError(
                f"backward must run through a graph of {self.unit.name} before its weights are written, or move because a plan is "
                f"adopted or left, got {'one that was kept' if self.graph.is_done else 'one'} from an earlier step; go through it "
                "within its own step, or run forward again"
            )
        if self.graph.is_done and self.retained_at not in (None, self.unit.write_count):
            raise RuntimeError(
                f"backward runs a second time through a graph of {self.unit.name}, whose weights were written meanwhile, so that "
                "gradients would be those of no weights at all; go through it again before the optimizer's step, or run "
                "forward again"
            )
