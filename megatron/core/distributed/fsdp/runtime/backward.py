"""What autograd calls in a backward, and which gradients and weights that backward still needs, in the one order of all ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

from megatron.core.distributed.fsdp.buffers.gradients import GradState
from megatron.core.distributed.fsdp.layout.plan import NO_UNITS
from megatron.core.distributed.fsdp.runtime import nvtx
from megatron.core.distributed.fsdp.runtime.planner import Planner
from megatron.core.distributed.fsdp.runtime.step_state import Anchor, Graph
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit


class OutputHook:
    """Begins a unit's backward when the gradient of one of its outputs arrives.

    Args:
        context: the ``FsdpContext``, which imports this file.
        anchor: kept as long as the graph of the outputs lives.
        order: place of the forward that made the outputs.
    """

    __slots__ = ("anchor", "context", "graph", "place", "retained_at", "unit")
    retained_at: int | None  # the unit's write_count when a backward that keeps the graph came here

    def __init__(
        self,
        context: Any,
        unit: FsdpUnit,
        outputs: Iterable[torch.Tensor],
        graph: Graph,
        anchor: Anchor | None,
        order: int,
    ) -> None:
        self.context, self.unit, self.graph, self.anchor, self.retained_at = context, unit, graph, anchor, None
        self.place = order, context.state.num_entered
        # The hook of an output runs before autograd computes anything that reads the unit's weights.
        for output in outputs:
            output.register_hook(self)

    def __call__(self, grad: torch.Tensor) -> None:
        state = self.context.state
        if self.retained_at is not None or self.graph.generation != state.graphs.generation:
            self._check_again()
        # First: what follows asks whether a graph waits. See [Note: the generation of a graph].
        self.graph.come_back()
        self.unit.come_back(*self.place)
        self.context.begin_unit_backward(self.unit)
        if state.retains_graph or self.retained_at is not None:
            self.graph.retain(state.retains_graph)
            self.retained_at = self.unit.write_count if state.retains_graph else None

    def _check_again(self) -> None:
        if self.graph.generation != self.context.state.graphs.generation:
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


class Backward:
    """The backward that is under way, unit by unit; between backwards it has no units.

    A unit is *open* while gradients of its own parameters are expected or not reduced yet. It *uses* weights from the
    moment that its backward, or a recomputation in it, begins. See [Note: one order of reductions].

    Ranks: units begin in the same order on all ranks; everything here follows from that order alone.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner, self.registry, self.state = planner, planner.registry, planner.state
        self.unsharder, self.grad_reducer = planner.unsharder, planner.grad_reducer
        self._open: dict[FsdpUnit, None] = {}  # in the order of their begin
        self._using: dict[FsdpUnit, None] = {}
        # Of these, the ones that recompute and whose gradients have not come.
        self._recomputed: dict[FsdpUnit, None] = {}
        # Of these, the ones that are resharded when the second next unit begins.
        self._delayed: dict[FsdpUnit, None] = {}
        self._kept: list[FsdpUnit] = []  # of backwards that were recorded; unsharded until one is not
        self._thread = 0  # identifier of the thread that runs the backward

    def uses(self, unit: FsdpUnit) -> bool:
        """Return whether the unit's backward, or a recomputation in it, has begun and not ended."""
        return unit in self._using

    def open(self) -> None:
        """Record that this thread runs the backward."""
        self._thread = threading.get_ident()

    def recompute(self, unit: FsdpUnit) -> None:
        """Unshard the unit for the forward that backward repeats, and for its backward."""
        if unit not in self._using:
            self._recomputed[unit] = None
        self._use(unit)

    def begin(self, unit: FsdpUnit) -> None:
        """Reduce the units that are done, and unshard this one for its backward. Ranks: all.

        Units that ran later in forward are done with theirs, so their gradients are on their way to their owners, with
        zeros for what is missing. Not when they are complete: a parameter that gets no gradient on this rank may get
        one on another, and ranks must issue gathers and reductions in one order. Units whose gradients come from
        elsewhere too wait for backward's end.
        """
        # By the order of forwards, which is the same on all ranks; the order in which gradients arrive is not.
        for later in list(self._open):
            if later.order > unit.last_inside and not later.waits_for_end:
                self._reduce(later)
        self.expect(unit)
        # Tied weights get gradients here, also where no output of their owner is in the graph.
        for group in unit.borrowed_groups:
            if group.trainable and self.registry.holds(group):
                self.expect(self.registry.owner(group))
        self._use(unit)

    def finish(self, unit: FsdpUnit) -> None:
        """Reduce the first inner unit now: no earlier unit's backward will trigger its reduction. Ranks: all."""
        # Another graph that waits may bring more gradients.
        is_whole = self.state.is_in_backward and not self.state.graphs.may_be_open
        if is_whole and unit in self._open and not unit.waits_for_end:
            self._reduce(unit)

    def expect(self, unit: FsdpUnit) -> None:
        """Reduce the gradients of the unit's own parameters before this backward ends."""
        if unit in self._open or not unit.trained_groups:
            return
        for group in unit.trained_groups:
            group.grads.expect()
        self._open[unit] = None
        self._recomputed.pop(unit, None)

    def end(self, staying: frozenset[int]) -> None:
        """Launch the reductions that are left, and reshard all units. Ranks: all.

        Args:
            staying: units that the plan goes on with, which keep their weights.
        """
        # No gradient came here, but may have on other ranks: those reduce these units, so this rank sends zeros.
        for unit in list(self._recomputed):
            self.expect(unit)
        self._delayed.clear()
        self._recomputed.clear()
        for unit in list(self._using):
            self._close(unit, staying)  # first, since reductions need memory
        # First the unit that another rank has finished, where its input's gradient came.
        for unit in sorted(self._open, key=lambda unit: (unit.waits_for_end, -unit.order)):
            self._reduce(unit)
        if self.state.is_last:
            self.reduce_partial()
        # This backward did not record, so nothing refers to what earlier ones kept. See [Note: backward of a backward].
        if not self.state.makes_graph:
            self.release_kept(staying)

    def reduce_partial(self) -> None:
        """Launch the reductions of gradients that microbatches left unreduced. Ranks: all."""
        for group in self.registry.groups:
            # The state answers without a call for groups without sums: [Note: the host's budget].
            if group.trainable and group.grads.state is GradState.PENDING and group.grads.refresh_pending():
                self.grad_reducer.reduce_rest(group)

    def abandon(self) -> None:
        """Forget all units; the caller drops gradients and reshards weights."""
        for _ in self._using if threading.get_ident() == self._thread else ():
            nvtx.end()  # an NVTX range can only be closed by the thread that opened it
        for units in (self._open, self._using, self._delayed, self._recomputed):
            units.clear()
        self._kept.clear()

    def show_sharded(self) -> None:
        """Put the sharded parameters back into modules whose weights a backward left gathered: it failed, or was recorded."""
        for unit in (*self._using, *self._kept):
            for group in unit.groups:
                self.unsharder.show_sharded(group)

    def _use(self, unit: FsdpUnit) -> None:
        """Unshard the unit, and keep its weights for a recomputation or for its gradients."""
        if unit in self._using:
            for group in unit.groups:
                if not group.weights.is_unsharded:  # another unit needed its addresses meanwhile
                    self.unsharder.unshard(group, forward=False)
            return
        nvtx.begin(unit.backward_range)
        if len(self._delayed) >= 2:
            self._reshard_delayed()
        if unit.delays_reshard:
            self._delayed[unit] = None
        self._using[unit] = None
        for group in unit.groups:
            group.weights.holders.enter_backward()
        # The pass takes over what the user unsharded, and reshards it at its end. See [Note: weights that the user unsharded].
        if self.unsharder.held:
            self.unsharder.end_hold(unit.groups)
        self.planner.use(unit, backward=True)

    def _reshard_delayed(self) -> None:
        """Reshard the weights that get no gradient here, of all units but the last one.

        Such weights (frozen, or tied and owned by another unit) have no event that says when backward is done with
        them. Autograd runs what was recorded later first, so once the second next unit has begun, all that could
        read them has run; the version fence would catch an exception to that.
        """
        for unit in list(self._delayed)[:-1]:
            del self._delayed[unit]
            if unit not in self._open:
                self._close(unit)

    def _reduce(self, unit: FsdpUnit) -> None:
        """Launch the reductions of the unit's gradients. Ranks: all."""
        del self._open[unit]
        if unit not in self._delayed:
            self._close(unit)  # first, since the reduction may need memory
        for group in unit.trained_groups:
            self.grad_reducer.reduce(group, is_last=self.state.is_last)

    def _close(self, unit: FsdpUnit, staying: frozenset[int] = NO_UNITS) -> None:
        """Release the weights that the unit's backward used."""
        if unit not in self._using:
            return
        del self._using[unit]
        nvtx.end()  # closes the most recent range: NVTX ranges nest, but backwards of units can overlap
        if self.state.makes_graph:
            # A later backward begins with operations that read these weights. See [Note: backward of a backward].
            self._kept.append(unit)
            for group in unit.groups:
                self.unsharder.show_sharded(group)
            return
        self._release(unit, staying)

    def release_kept(self, staying: frozenset[int] = NO_UNITS) -> None:
        """Release the weights that recorded backwards kept for a later one."""
        while self._kept:
            self._release(self._kept.pop(), staying)

    def _release(self, unit: FsdpUnit, staying: frozenset[int]) -> None:
        for group in unit.groups:
            if not group.weights.holders.leave_backward():
                continue
            if group.weights.holders.by_plan or unit.index in staying:  # kept: until the end of the last backward
                group.param_slots.to_sharded()
            else:
                self.unsharder.reshard(group)
