"""Records the order of a step, says what comes next, and lays buffers out for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.comm.transport import MemoryKind, Transport
from megatron.core.distributed.fsdp.layout.plan import NO_UNITS, Plan, RangePlan, Recorder, Use
from megatron.core.distributed.fsdp.runtime.grad_reducer import GradReducer
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder

logger = logging.getLogger(__name__)

# Forwards in a row that find a retained graph, until a plan is adopted all the same.
_MAX_WAITS = 8

_MAX_LOGGED = 8
"""Uses by which steps left a plan that are logged."""


class Planner:
    """The plan of a context: recorded, adopted, followed, left.

    Attributes:
        plan: what a step is expected to do; None until one has been recorded.
        in_plan: this step has done so far what the plan says.
        num_uses: how many uses of units have followed the plan in this pass.
        staying: units that run again at once, if they end now.
        recorder: writes this step down, where the plan is missing or was left.
        arenas: memory of the ranges that the plan lays out: of full weights, of reduce-scatter inputs.

    Ranks: every rank plans alike, since all run units in the same order.
    """

    def __init__(self, unsharder: Unsharder, grad_reducer: GradReducer) -> None:
        self.unsharder, self.grad_reducer = unsharder, grad_reducer
        self.state, self.registry, self.recorder = unsharder.state, unsharder.state.registry, unsharder.recorder
        self.plan: Plan | None = None
        self.in_plan = False
        self.arenas: list[torch.Tensor] = []
        self.staying = NO_UNITS
        self._departures: set[Use] = set()  # uses by which steps have left this plan; each is logged once
        self._has_warned = False  # later departures are logged as information
        self.num_uses = 0
        self._candidate: Plan | None = None
        self._last_uses: tuple[Use, ...] = ()
        self._wants_record = True
        self._is_outdated = False
        self._num_waits = 0
        self._roots: set[int] = set()  # units that have ever had an outermost forward
        self._pass: set[int] | None = None  # the roots that ran in the current pass; None between passes

    # ---- a step -------------------------------------------------------------------------------------------------

    def begin_step(self, unit: FsdpUnit) -> None:
        """Adopt a plan that was recorded, also by forwards without a backward, and compare what runs from now on with it.

        No graph is waiting for its backward: with one, the step goes on.

        Args:
            unit: whose outermost forward begins now.
        """
        self.end_record()
        self._pass = {unit.index}
        self.state.graphs.forget()
        self.unsharder.observer.pass_begins()
        # Only here: no graph waits, so buffers may move. See [Note: the generation of a graph].
        if self._is_outdated:
            self._is_outdated, self._candidate = False, None
            self.leave_plan()
        if self._candidate is not None and not self._waits_for_graphs():
            self._adopt(self._candidate)
            self._candidate = None
        self.num_uses = 0
        self.in_plan = self.plan is not None
        if not self.in_plan or self._wants_record:
            self.recorder.start()

    def _waits_for_graphs(self) -> bool:
        """Return whether to adopt later, since a graph that was retained may be gone through again where weights are now.

        Not forever: most that retain a graph never go through it again, and keep the loss until the next one is there. Ranks: all.
        """
        graphs = self.state.graphs
        is_retained = graphs.may_be_retained and self.registry.is_true_on_any_rank(graphs.are_retained)
        self._num_waits = self._num_waits + 1 if is_retained else 0
        return 0 < self._num_waits < _MAX_WAITS

    def enter_root(self, unit: FsdpUnit) -> bool:
        """Begin an outermost forward, and return whether it belongs to the current step.

        A pass is a run of forwards of sibling roots. It ends with a backward, or when a root runs a second time. With several roots, the
        plan may contain a root several times in one pass. See [Note: sibling roots].

        Args:
            unit: whose outermost forward begins now. Call it once for each of these.

        Ranks: all. The pass follows from the order of units and the plan; after it, where a graph may wait for its backward, ranks ask
        each other.
        """
        self._roots.add(unit.index)
        is_planned = self._planned_use == (unit.index, False)
        if self._pass is not None:
            is_new = unit.index not in self._pass
            # A single root that runs again begins another evaluation. Out of plan, the first root of the plan begins the next pass.
            starts_over = self.is_forward_again(Use(unit.index, False))
            if (is_new or len(self._pass) > 1) if is_planned else (is_new and not starts_over):
                self._pass.add(unit.index)
                return True
        return self.state.waits_for_backward(is_planned=is_planned)

    def on_their_way(self, next_forward: FsdpUnit | None = None) -> list[FsdpParameterGroup]:
        """Return the groups that the plan has prefetched for the next sibling root, and for forwards after it.

        The list is empty if only one root has ever run, or if the plan does not continue with a root's forward. Groups whose writes cannot
        be detected (``Weights.can_detect_writes``) are left out. See [Note: sibling roots].

        Args:
            next_forward: the root whose outermost forward begins now; if the plan has another one here, none are returned. None: a
                root's forward has just ended.

        Ranks: each alone; the same answer on all.
        """
        planned = self._planned_use if len(self._roots) > 1 else None
        if planned is None or planned.backward or planned.unit not in self._roots:
            return []
        if next_forward is not None and planned.unit != next_forward.index:
            return []
        uses = [use for use in self.upcoming if not use.backward]
        if not torch.is_grad_enabled():
            uses = [use for use in uses if not self.is_forward_again(use)]
        groups = self.registry.groups_of(uses) if uses else ()
        return sorted((g for g in groups if g.weights.can_detect_writes), key=lambda group: group.index)

    def outdate(self) -> None:
        """Leave the plan when the next step begins, and record that one: groups have buffers that the plan does not know."""
        self._is_outdated = True

    def use(self, unit: FsdpUnit, *, backward: bool) -> None:
        """Unshard the unit and, where this use is in the plan, prefetch the units after it. Ranks: all, in the same order of units."""
        if self.recorder.is_recording:
            self.recorder.use(unit.index, backward=backward)
        plan = self.plan
        following: tuple[Use, ...] = ()
        if plan is not None and self.in_plan:
            cursor = self.num_uses
            if cursor < len(plan.uses) and plan.uses[cursor] == (unit.index, backward):
                self.num_uses, self.staying = cursor + 1, plan.staying[cursor]
                following = plan.ahead[cursor]
            else:
                self._depart(unit, backward)
        for group in unit.groups:
            self.unsharder.unshard(group, forward=not backward)
        # Afterwards, so that the gathers of later units queue behind this one's. Their order must be the same on all ranks.
        for use in following:
            # Without gradients neither a backward follows, nor another forward on these weights.
            if backward or torch.is_grad_enabled() or not (use.backward or self.is_forward_again(use)):
                for group in self.registry.by_number[use.unit].groups:
                    self.unsharder.prefetch(group, forward=not use.backward)

    def prefetch_first(self) -> None:
        """Prefetch the units with which the plan begins, if there is one. No forward is under way. Ranks: all."""
        if self.plan is None:
            return
        # Gathered weights are of the version before, and their ranges may be those of the first units.
        self.unsharder.reshard_idle()
        for use in (self.plan.uses[0], *self.plan.ahead[0]):  # the root, which may have no weights, and the first in it
            for group in self.registry.by_number[use.unit].groups:
                self.unsharder.prefetch(group, forward=not use.backward)

    def first_use(self, unit: int) -> int:
        """Return the position of the unit's first use in a step; without a plan, that of its registration."""
        if self.plan is None:
            return unit
        return self.plan.first_uses.get(unit, len(self.plan.uses))

    @property
    def upcoming(self) -> tuple[Use, ...]:
        """The uses, of those that follow in this step, whose weights are gathered or on their way by now."""
        if not self.in_plan or self.plan is None:
            return ()
        return self.plan.uses[self.num_uses : self.plan.horizons[self.num_uses - 1]]

    def is_forward_again(self, use: Use) -> bool:
        """Return whether the use begins another forward of this step, which an evaluation does not have."""
        return self.plan is not None and use.unit == self.plan.uses[0].unit

    def _depart(self, unit: FsdpUnit, backward: bool) -> None:
        ran = Use(unit.index, backward)
        planned = "end of the step" if self._planned_use is None else self._words(self._planned_use)
        self.in_plan, self.staying = False, NO_UNITS
        self._wants_record = True
        if ran not in self._departures and len(self._departures) < _MAX_LOGGED:
            self._departures.add(ran)
            logger.log(
                logging.INFO if self._has_warned else logging.WARNING,
                "unit %s ran %s out of the planned order, which has the %s here: weights are gathered on demand, without overlap, "
                "until an order repeats. All ranks must do the same; if some follow the plan, this step ends in an error, "
                "at the latest when a collective times out or the backend ends the process",
                unit.name,
                "backward" if backward else "forward",
                planned,
            )
            self._has_warned = True
        self.unsharder.observer.departed(self._words(ran), planned)

    @property
    def _planned_use(self) -> Use | None:
        """What this step's plan goes on with; None if it has ended, or was left."""
        if self.plan is None or not self.in_plan or self.num_uses == len(self.plan.uses):
            return None
        return self.plan.uses[self.num_uses]

    def _words(self, use: Use) -> str:
        unit = self.registry.by_number[use.unit]
        return f"{'backward' if use.backward else 'forward'} of unit {unit.name}"

    # ---- the record ---------------------------------------------------------------------------------------------

    def end_record(self) -> None:
        """Make the next plan of the record, if the step is over and the record differs from the plan there is.

        The first record is planned at once, one that is longer than a plan of forwards alone too; another order only when
        it comes twice in a row.
        """
        self._pass = None
        recorder = self.recorder
        if not recorder.is_recording or not recorder.uses:
            return
        if not recorder.is_too_long and self.state.waits_for_backward():
            return
        recorder.stop()
        uses = tuple(recorder.uses)
        grows = self.plan is None or not any(use.backward for use in self.plan.uses)
        # Evaluations match the begin of the plan, so that they replace no plan of training.
        if self.plan is not None and uses == self.plan.uses[: len(uses)]:
            if not grows and len(uses) == len(self.plan.uses):
                self._wants_record = False  # else it is the forward alone, which says nothing about the rest
            return
        repeats, self._last_uses = uses == self._last_uses, uses
        if not (repeats or grows) or recorder.is_too_long:
            return
        # First: ranks with different records would merge ranges of different groups, or wait for each other.
        self.unsharder.observer.recorded()
        self._agree(recorder)
        self._candidate = self._plan_of(recorder)

    def _plan_of(self, recorder: Recorder) -> Plan:
        units, groups, options = self.registry.units, self.registry.groups, self.unsharder.options
        root = next((unit for unit in units if not unit.prefix), None)  # a shared context has none
        itemsizes = [g.weights.rest_dtype.itemsize for g in groups if g.weights.needs_gather]
        return recorder.plan(
            weight_nbytes={
                g.index: g.weights.full_storage.nbytes for g in groups if g.weights.full_storage is not None
            },
            input_nbytes={g.index: g.grads.input.storage.nbytes for g in groups if g.plans_input},
            groups_of={unit.index: [group.index for group in unit.groups] for unit in units},
            pool_of={group.index: number for number, pool in enumerate(_pools(groups)) for group in pool},
            prefetch_depth_of={unit.index: unit.prefetch_depth(root) for unit in units},
            ahead_nbytes=options.ahead_numel * max(itemsizes, default=0),
            memory_budget_nbytes=options.memory_budget_nbytes,
            keeping=[unit.index for unit in units if unit.options.keeps_weights],
        )

    def expect(self) -> Plan:
        """Plan a step that runs units in the order of their registration: an estimate, never followed.

        Units that hold others are used around them.
        """
        recorder, units = Recorder(), self.registry.units
        around = [unit for unit in units if unit.origin.has_nested]
        inside = [unit for unit in units if not unit.origin.has_nested]
        forward, backward = (*around, *inside), (*around, *reversed(inside))
        for unit, is_backward in (*((unit, False) for unit in forward), *((unit, True) for unit in backward)):
            recorder.use(unit.index, backward=is_backward)
            for group in unit.groups:
                recorder.begin("weights", group.index)
                if is_backward and group.plans_input:
                    recorder.begin("inputs", group.index)
                if not unit.origin.has_nested:
                    recorder.end("weights", group.index)
                    recorder.end("inputs", group.index)
        return self._plan_of(recorder)

    def _agree(self, recorder: Recorder) -> None:
        """Merge the ranks' records, where buffers must lie at equal offsets on all of them.

        Gradients come at other moments on a rank that uses other parameters, which would give another layout.
        """
        for pool in _pools(self.registry.groups):
            transport, indices = pool[0].group_mesh.axes[-1], {group.index for group in pool}
            if transport.is_symmetric:
                own = {kind: {g: live[g] for g in live if g in indices} for kind, live in recorder.ranges.items()}
                for ranges in transport.exchange(own):
                    recorder.add(ranges)

    def abandon(self) -> None:
        """Discard the record of a pass that failed. The next forward begins a step unless a graph waits for its backward."""
        self.recorder.stop()
        self.unsharder.observer.pass_failed()
        self._pass = None
        self.in_plan, self.staying = False, NO_UNITS

    # ---- the layout ---------------------------------------------------------------------------------------------

    def _adopt(self, plan: Plan) -> None:
        """Move buffers to where the plan says. No graph is waiting for its backward."""
        self.leave_plan()
        self.unsharder.take_ranges(self._fill_arenas(plan.weights, MemoryKind.UNSHARDED))
        self.grad_reducer.take_ranges(self._fill_arenas(plan.inputs, MemoryKind.REDUCE_SCATTER_INPUT))
        self.unsharder.ranges_moved()
        for group in self.registry.groups:
            group.weights.holders.keep_for_plan(group.index in plan.stays_unsharded_nbytes)
        self.plan = plan
        self._wants_record = False
        self._departures.clear()
        self._remove_unused(plan)

    def _remove_unused(self, plan: Plan) -> None:
        """Remove units that steps do not use any more and whose modules are gone on all ranks. Ranks: all."""
        used = {use.unit for use in plan.uses}
        # In the order of the registry: all ranks ask about the same unit at a time, whichever of them has freed its module.
        for unit in [unit for unit in self.registry.units if unit.index not in used]:
            if not self.registry.is_true_on_any_rank(unit.tree() is not None):
                self.registry.remove([unit])

    def _fill_arenas(self, ranges: RangePlan, what: MemoryKind) -> dict[int, set[FsdpParameterGroup]]:
        """Move buffers into new arenas, and return the groups that share addresses with each group's buffer. [Note: pools]."""
        if any(group.device.type == "cuda" for group in self.registry.groups):
            torch.cuda.empty_cache()  # memory of the first step, in blocks that would fragment the rest
        is_weight = what is MemoryKind.UNSHARDED
        # What the user holds unsharded remains where it is: the plan does not know how long its range is needed. Ranges of
        # units that were removed since remain empty, so that ranks plan the same though they free a module at different times.
        placed = {g.index: g for g in self.registry.groups if not (is_weight and g.weights.is_unsharded)}
        shared: dict[int, set[FsdpParameterGroup]] = {}
        for pool in ranges.pools:
            members = [placed[index] for index in pool.groups if index in placed]
            # See [Note: memory that goes]: units with the least memory follow the plan's order, and have no arena.
            if all(group.least_memory for group in members):
                continue
            arena = members[0].group_mesh.empty(pool.nbytes, torch.uint8, members[0].device, what).zero_()
            self.arenas.append(arena)
            for group in members:
                storage = group.weights.full_storage if is_weight else group.grads.input.storage
                assert storage is not None, "a plan has ranges only for buffers"
                flat = arena[(offset := ranges.offsets[group.index]) : offset + storage.nbytes].view(storage.dtype)
                (group.weights.move if is_weight else group.grads.move_input)(flat)
                shared[group.index] = {placed[o] for o in ranges.overlapping[group.index] if o in placed}
        return shared

    def leave_plan(self) -> None:
        """Give every group memory of its own again, none of it allocated but for weights that the user holds unsharded."""
        self.unsharder.reshard_idle()
        for group in self.registry.groups:
            group.weights.holders.keep_for_plan(False)
            storage = group.weights.full_storage
            if storage is not None and storage.in_arena:
                group.weights.move(None, copies=group.weights.is_unsharded)
                if not group.weights.is_unsharded:
                    storage.free()
            if group.trainable and group.grads.input.storage.in_arena:
                group.grads.move_input(None)
                group.grads.input.storage.free()
        self.unsharder.take_ranges({})
        self.grad_reducer.take_ranges({})
        self.arenas.clear()
        if self.plan is not None:
            self.state.graphs.moved()  # views that autograd saved point into the arenas: refuse their backwards
        self.plan = None
        self.in_plan, self.staying = False, NO_UNITS
        self._wants_record = True


def _pools(groups: Sequence[FsdpParameterGroup]) -> list[list[FsdpParameterGroup]]:
    """Return the groups whose buffers may lie in one arena, in an order that is the same on all ranks.

    Buffers that must lie at equal offsets of one transport's memory, on all of its ranks, are by themselves; others need
    no memory in particular.
    """
    pools: dict[Transport | None, list[FsdpParameterGroup]] = {}
    for group in groups:
        transport = group.group_mesh.axes[-1]
        pools.setdefault(transport if transport.is_symmetric else None, []).append(group)
    return list(pools.values())
