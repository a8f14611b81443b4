"""What a backward owes, gradients that all ranks reduce in one order, and what it holds meanwhile: weights."""

from __future__ import annotations

from megatron.core.distributed.fsdp.layout.plan import NO_UNITS
from megatron.core.distributed.fsdp.runtime import nvtx
from megatron.core.distributed.fsdp.runtime.grad_reducer import GradReducer
from megatron.core.distributed.fsdp.runtime.prefetch_scheduler import PrefetchScheduler
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit, Phase
from megatron.core.distributed.fsdp.runtime.unit_registry import UnitRegistry
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder


class Backward:
    """The backward that is under way, unit by unit; at rest it owes and holds nothing.

    A unit is *open* while gradients of its own parameters are owed or not reduced yet. It *claims* weights from the
    moment that its backward, or a recomputation in it, begins. See [Note: one order of reductions] in DESIGN.md.

    Attributes:
        is_last: of a step's microbatches: gradients are reduced over all ranks.

    Ranks: units begin in the same order on all ranks; everything here follows from that order alone.
    """

    def __init__(
        self, registry: UnitRegistry, scheduler: PrefetchScheduler, unsharder: Unsharder, grad_reducer: GradReducer
    ) -> None:
        self.registry, self.scheduler, self.unsharder, self.grad_reducer = registry, scheduler, unsharder, grad_reducer
        self.is_last = True
        self._open: list[FsdpUnit] = []  # in the order of their begin
        self._claiming: list[FsdpUnit] = []
        self._recomputed: list[FsdpUnit] = []  # of these, the ones that recompute and whose gradients have not come
        self._delayed: list[FsdpUnit] = []  # of these, the ones that hold weights until the second next unit begins
        self._staying = NO_UNITS  # at its end, the units that the plan goes on with

    @property
    def is_at_rest(self) -> bool:
        """True if nothing is owed or held."""
        return not (self._claiming or self._open)

    def recompute(self, unit: FsdpUnit) -> None:
        """Afterwards the unit's weights are whole for the forward that backward repeats, and for its backward."""
        if unit.phase is not Phase.BACKWARD:
            self._recomputed.append(unit)
        self._claim(unit)

    def begin(self, unit: FsdpUnit) -> None:
        """Afterwards the unit's weights are whole for its backward. Ranks: all.

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

    def owe(self, unit: FsdpUnit) -> None:
        """Afterwards this backward owes the gradients of the unit's own parameters."""
        if unit.is_open or not unit.trainable_groups:
            return
        unit.is_open = True
        for group in unit.trainable_groups:
            group.is_owed = True
        self._open.append(unit)
        if unit in self._recomputed:
            self._recomputed.remove(unit)

    def end(self, staying: frozenset[int]) -> None:
        """Afterwards every gradient of this backward is on its way to its owner, and no weights are held. Ranks: all.

        Args:
            staying: units that the plan goes on with, which keep their weights.
        """
        self._staying = staying
        for unit in list(self._recomputed):
            self.owe(unit)  # no gradient came, here
        for unit in sorted(self._open, key=lambda unit: -unit.order):
            self._reduce(unit)
        if self.is_last:
            self.reduce_partial()
        self._delayed.clear()
        self._recomputed.clear()
        for unit in list(self._claiming):
            self._close(unit)
        self._staying = NO_UNITS

    def reduce_partial(self) -> None:
        """Afterwards gradients that microbatches left unreduced are on their way to their owners. Ranks: all."""
        for group in self.registry.groups:
            if group.trainable and group.has_partial:
                self.grad_reducer.reduce_rest(group)

    def abandon(self) -> None:
        """Afterwards nothing is owed or held; the caller sees to gradients and weights."""
        for unit in self._claiming:
            nvtx.end(unit.mark)
        for units in (self._open, self._claiming, self._delayed, self._recomputed):
            units.clear()

    def _claim(self, unit: FsdpUnit) -> None:
        """Afterwards backward holds the unit's weights, for its recomputation or for its gradients."""
        if unit.phase is Phase.BACKWARD:
            for group in unit.groups:
                if not group.is_gathered:  # another unit needed its addresses meanwhile
                    self.unsharder.unshard(group, forward=False)
            return
        unit.phase = Phase.BACKWARD
        unit.mark = nvtx.begin(unit.backward_range)
        self._reshard_delayed()
        if unit.delays_reshard:
            self._delayed.append(unit)
        self._claiming.append(unit)
        for group in unit.groups:
            group.num_claims += 1
        self.scheduler.begin(unit, backward=True)

    def _reshard_delayed(self) -> None:
        """Afterwards weights that get no gradient here are released for all units but the last one.

        Such weights (frozen, or tied and owned by another unit) have no event that says when backward is done with
        them. Autograd runs what was recorded later first, so once the second next unit has begun, all that could
        read them has run; the version fence would catch an exception to that.
        """
        while len(self._delayed) >= 2:
            unit = self._delayed.pop(0)
            if not unit.is_open:
                self._close(unit)

    def _reduce(self, unit: FsdpUnit) -> None:
        """Afterwards the unit's gradients are on their way to their owners. Ranks: all."""
        unit.is_open = False
        self._open.remove(unit)
        for group in unit.trainable_groups:
            group.is_owed = False
            self.grad_reducer.reduce(group, is_last=self.is_last)
        if unit not in self._delayed:
            self._close(unit)

    def _close(self, unit: FsdpUnit) -> None:
        """Afterwards the unit's backward no longer holds any weights."""
        if unit.phase is not Phase.BACKWARD:
            return
        unit.phase = Phase.RESTING
        nvtx.end(unit.mark)
        self._claiming.remove(unit)
        for group in unit.groups:
            group.num_claims -= 1
            if group.stays_unsharded or unit.index in self._staying:  # kept: until the end of the last backward
                self.unsharder.keep_unsharded(group)
            else:
                self.unsharder.reshard(group)
