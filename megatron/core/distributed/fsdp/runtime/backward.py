"""Which gradients a backward still owes, in the one order in which all ranks reduce them, and which weights it holds."""

from __future__ import annotations

import threading

from megatron.core.distributed.fsdp.layout.plan import NO_UNITS
from megatron.core.distributed.fsdp.runtime import nvtx
from megatron.core.distributed.fsdp.runtime.grad_reducer import GradReducer
from megatron.core.distributed.fsdp.runtime.prefetch_scheduler import PrefetchScheduler
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit, Phase
from megatron.core.distributed.fsdp.runtime.unit_registry import UnitRegistry
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder


class Backward:
    """The backward that is under way, unit by unit; between backwards it owes and holds nothing.

    A unit is *open* while gradients of its own parameters are owed or not reduced yet. It *claims* weights from the
    moment that its backward, or a recomputation in it, begins. See [Note: one order of reductions] in DESIGN.md.

    Attributes:
        is_last: of a step's microbatches: gradients are reduced over all ranks.
        makes_graph: the backward is recorded (``create_graph``), and a later one will read the weights again.

    Ranks: units begin in the same order on all ranks; everything here follows from that order alone.
    """

    def __init__(
        self, registry: UnitRegistry, scheduler: PrefetchScheduler, unsharder: Unsharder, grad_reducer: GradReducer
    ) -> None:
        self.registry, self.scheduler, self.unsharder, self.grad_reducer = registry, scheduler, unsharder, grad_reducer
        self.is_last = True
        self.makes_graph = False
        self._open: list[FsdpUnit] = []  # in the order of their begin
        self._claiming: list[FsdpUnit] = []
        self._recomputed: list[FsdpUnit] = []  # of these, the ones that recompute and whose gradients have not come
        self._delayed: list[FsdpUnit] = []  # of these, the ones that are resharded when the second next unit begins
        self._kept: list[FsdpUnit] = []  # of backwards that were recorded; unsharded until one is not
        self._thread = 0  # identifier of the thread that runs the backward
        self._staying = NO_UNITS  # at its end, the units that the plan goes on with

    @property
    def is_at_rest(self) -> bool:
        """True if nothing is owed or held."""
        return not (self._claiming or self._open)

    def open(self) -> None:
        """Record that this thread runs the backward."""
        self._thread = threading.get_ident()

    def recompute(self, unit: FsdpUnit) -> None:
        """Unshard the unit for the forward that backward repeats, and for its backward."""
        if unit.phase is not Phase.BACKWARD:
            self._recomputed.append(unit)
        self._claim(unit)

    def begin(self, unit: FsdpUnit) -> None:
        """Reduce the units that are done, and unshard this one for its backward. Ranks: all.

        Units that ran later in forward are done with theirs, so their gradients are on their way to their owners, with
        zeros for what is missing. Not when they are complete: a parameter that gets no gradient on this rank may get
        one on another, and ranks must issue gathers and reductions in one order. Units whose gradients come from
        elsewhere too wait for backward's end.
        """
        for later in list(self._open):
            if later.order > unit.last_inside and not later.waits_for_end:
                self._reduce(later)
        self.owe(unit)
        for group in unit.borrowed_groups:
            if group.trainable and self.registry.holds(group):
                self.owe(self.registry.owner(group))
        self._claim(unit)

    def finish(self, unit: FsdpUnit) -> None:
        """Reduce a unit that is done, before which no unit is that would do so when it begins. Ranks: all."""
        if unit.is_open and not unit.waits_for_end:
            self._reduce(unit)

    def owe(self, unit: FsdpUnit) -> None:
        """Note that this backward owes the gradients of the unit's own parameters."""
        if unit.is_open or not unit.trained_groups:
            return
        unit.is_open = True
        self._open.append(unit)
        if unit in self._recomputed:
            self._recomputed.remove(unit)

    def end(self, staying: frozenset[int]) -> None:
        """Launch the reductions that are left, and reshard all units. Ranks: all.

        Args:
            staying: units that the plan goes on with, which keep their weights.
        """
        self._staying = staying
        for unit in list(self._recomputed):
            self.owe(unit)  # no gradient came, here
        self._delayed.clear()
        self._recomputed.clear()
        for unit in list(self._claiming):
            self._close(unit)  # first, since reductions need memory
        # First the unit that another rank has finished, where its input's gradient came.
        for unit in sorted(self._open, key=lambda unit: (unit.waits_for_end, -unit.order)):
            self._reduce(unit)
        if self.is_last:
            self.reduce_partial()
        if not self.makes_graph:
            self.release_kept()
        self._staying = NO_UNITS

    def reduce_partial(self) -> None:
        """Launch the reductions of gradients that microbatches left unreduced. Ranks: all."""
        for group in self.registry.groups:
            if group.trainable and group.grads.has_partial:
                self.grad_reducer.reduce_rest(group)

    def abandon(self) -> None:
        """Forget what is owed and held; the caller drops gradients and reshards weights."""
        for _ in self._claiming if threading.get_ident() == self._thread else ():
            nvtx.end()  # an NVTX range can only be closed by the thread that opened it
        for units in (self._open, self._claiming, self._delayed, self._recomputed, self._kept):
            units.clear()

    def show_sharded(self) -> None:
        """Put the sharded parameters back into the modules of a backward that failed; the next pass does the rest."""
        self._show_sharded(self._claiming)

    def show_kept(self) -> None:
        """Put the sharded parameters back into modules whose weights a backward with ``create_graph`` keeps gathered."""
        if self._kept:
            self._show_sharded(self._kept)

    def _show_sharded(self, units: list[FsdpUnit]) -> None:
        for unit in units:
            for group in unit.groups:
                self.unsharder.show_sharded(group)

    def _claim(self, unit: FsdpUnit) -> None:
        """Unshard the unit and hold its weights for a recomputation or for its gradients."""
        if unit.phase is Phase.BACKWARD:
            for group in unit.groups:
                if not group.weights.is_unsharded:  # another unit needed its addresses meanwhile
                    self.unsharder.unshard(group, forward=False)
            return
        unit.phase = Phase.BACKWARD
        nvtx.begin(unit.backward_range)
        if len(self._delayed) >= 2:
            self._reshard_delayed()
        if unit.delays_reshard:
            self._delayed.append(unit)
        self._claiming.append(unit)
        for group in unit.groups:
            group.weights.num_backwards += 1
        if self.unsharder.held:
            self.unsharder.end_hold(unit.groups)
        self.scheduler.begin(unit, backward=True)

    def _reshard_delayed(self) -> None:
        """Reshard the weights that get no gradient here, of all units but the last one.

        Such weights (frozen, or tied and owned by another unit) have no event that says when backward is done with
        them. Autograd runs what was recorded later first, so once the second next unit has begun, all that could
        read them has run; the version fence would catch an exception to that.
        """
        while len(self._delayed) >= 2:
            unit = self._delayed.pop(0)
            if not unit.is_open:
                self._close(unit)

    def _reduce(self, unit: FsdpUnit) -> None:
        """Launch the reductions of the unit's gradients. Ranks: all."""
        unit.is_open = False
        self._open.remove(unit)
        if unit not in self._delayed:
            self._close(unit)  # first, since the reduction may need memory
        for group in unit.trained_groups:
            self.grad_reducer.reduce(group, is_last=self.is_last)

    def _close(self, unit: FsdpUnit) -> None:
        """Let go of the weights that the unit's backward held."""
        if unit.phase is not Phase.BACKWARD:
            return
        unit.phase = Phase.RESTING
        nvtx.end()  # closes the most recent range: NVTX ranges nest, but backwards of units can overlap
        self._claiming.remove(unit)
        if self.makes_graph:
            self._kept.append(unit)
            self._show_sharded([unit])
            return
        self._let_go(unit)

    def release_kept(self) -> None:
        """Let go of the weights that recorded backwards held for a later one."""
        while self._kept:
            self._let_go(self._kept.pop())

    def _let_go(self, unit: FsdpUnit) -> None:
        for group in unit.groups:
            group.weights.num_backwards -= 1
            if group.weights.stays_unsharded or unit.index in self._staying:  # kept: until the end of the last backward
                self.unsharder.keep_unsharded(group)
            else:
                self.unsharder.reshard(group)
