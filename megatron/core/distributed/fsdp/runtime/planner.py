"""Records the order of a step, says what comes next, and lays buffers out for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.buffers.storage import IdleArena
from megatron.core.distributed.fsdp.comm.transport import MemoryKind, Transport
from megatron.core.distributed.fsdp.layout.plan import NO_UNITS, Plan, Pool, RangePlan, Recorder, Use
from megatron.core.distributed.fsdp.runtime.grad_reducer import GradReducer
from megatron.core.distributed.fsdp.runtime.graphs import Graphs
from megatron.core.distributed.fsdp.runtime.observer import Observer
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit
from megatron.core.distributed.fsdp.runtime.unit_registry import UnitRegistry
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
        recorder: writes this step down, where the plan is missing or was left.
        arenas: memory of the ranges that the plan lays out: of full weights, of reduce-scatter inputs.
        ahead_numel: elements of weights to have on their way, where the units' prefetch depth alone means fewer.
        memory_budget_nbytes: bytes to spend on weights that stay gathered throughout a step.
        observer: is told where a step leaves its plan, and what was recorded.

    Ranks: every rank plans alike, since all run units in the same order.
    """

    def __init__(
        self,
        registry: UnitRegistry,
        unsharder: Unsharder,
        grad_reducer: GradReducer,
        graphs: Graphs,
        recorder: Recorder,
        observer: Observer,
        device: torch.device,
    ) -> None:
        self.registry, self.unsharder, self.grad_reducer, self.graphs = registry, unsharder, grad_reducer, graphs
        self.recorder, self.observer, self.device = recorder, observer, device
        self.plan: Plan | None = None
        self.in_plan = False
        self.arenas: list[torch.Tensor] = []
        self.ahead_numel = 0
        self.memory_budget_nbytes = 0
        self.unplanned: set[Use] = set()  # uses by which steps have left this plan; each is logged once
        self._has_warned = False  # a warning; what comes later is information
        self._cursor = -1
        self._candidate: Plan | None = None
        self._last_uses: tuple[Use, ...] = ()
        self._wants_record = True
        self._is_outdated = False
        self._num_waits = 0
        # See [Note: sibling roots].
        self._roots: set[int] = set()  # units that have ever had an outermost forward
        self._begun: set[int] | None = None  # the ones that ran in the current pass; None between passes

    # ---- a step -------------------------------------------------------------------------------------------------

    def begin_step(self, unit: FsdpUnit) -> None:
        """Adopt a plan that was recorded, and compare what runs from now on with it.

        No graph is waiting for its backward: with one, the step goes on.

        Args:
            unit: whose outermost forward begins now.
        """
        self._begun = {unit.index}
        self.graphs.forget()
        self.observer.pass_begins()
        if self._is_outdated:
            self._is_outdated, self._candidate = False, None
            self.leave_plan()
        if self._candidate is not None and not self._waits_for_graphs():
            self._adopt(self._candidate)
            self._candidate = None
        self._cursor = -1
        self.in_plan = self.plan is not None
        if not self.in_plan or self._wants_record:
            self.recorder.start()

    def _waits_for_graphs(self) -> bool:
        """Return whether to adopt later, since a graph that was retained may be gone through again where weights are now.

        Not forever: most that retain a graph never go through it again, and keep the loss until the next one is there. Ranks: all.
        """
        is_retained = self.graphs.may_be_retained and self.registry.is_true_on_any_rank(self.graphs.are_retained)
        self._num_waits = self._num_waits + 1 if is_retained else 0
        return 0 < self._num_waits < _MAX_WAITS

    def waits_for_backward(self, next_forward: FsdpUnit | None = None) -> bool:
        """Return whether a graph waits for its backward on any rank, or more of the step will come.

        Args:
            next_forward: whose outermost forward begins now; where this step's plan goes on with it, no rank is asked.

        Ranks: all; where a graph may wait, blocks the host.
        """
        graphs = self.graphs
        if graphs.is_held or not graphs.may_be_open:
            return graphs.is_held
        if next_forward is not None and self._planned_use == (next_forward.index, False):
            return True
        return self.registry.is_true_on_any_rank(graphs.are_open)

    def enter_root(self, unit: FsdpUnit) -> bool:
        """Begin an outermost forward, and return whether it continues the current pass.

        A pass is a run of forwards of sibling roots. It ends with a backward, or when a root runs a second time. With several roots, the
        plan may contain a root several times in one pass. See [Note: sibling roots].

        Args:
            unit: whose outermost forward begins now. Call it once for each of these.

        Ranks: each alone; the same answer on all, since it follows from the order of units and the plan.
        """
        self._roots.add(unit.index)
        begun = self._begun
        if begun is None:
            return False
        is_new = unit.index not in begun
        if self._planned_use == (unit.index, False):
            goes_on = is_new or len(begun) > 1  # a single root that runs again begins another evaluation
        else:  # out of plan, the first root of the plan begins the next pass
            goes_on = is_new and (self.plan is None or unit.index != self.plan.uses[0].unit)
        if goes_on:
            begun.add(unit.index)
        return goes_on

    def on_their_way(self, next_forward: FsdpUnit | None = None) -> list[FsdpParameterGroup]:
        """Return the groups that the plan has prefetched for the next sibling root, and for forwards after it.

        The list is empty if only one root has ever run, or if the plan does not continue with a root's forward. Groups whose writes cannot
        be detected (``GroupWeights.can_detect_writes``) are left out. See [Note: sibling roots].

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

    def use(self, unit: FsdpUnit, *, backward: bool) -> tuple[Use, ...]:
        """Return the uses whose weights the plan gathers as this one begins; none where this use is not in the plan."""
        if self.recorder.is_recording:
            self.recorder.use(unit.index, backward=backward)
        plan = self.plan
        if plan is None or not self.in_plan:
            return ()
        cursor = self._cursor + 1
        if cursor < len(plan.uses) and plan.uses[cursor] == (unit.index, backward):
            self._cursor = cursor
            return plan.ahead[cursor]
        self._depart(unit, backward)
        return ()

    def first_use(self, unit: int) -> int:
        """Return the position of the unit's first use in a step; without a plan, that of its registration."""
        if self.plan is None:
            return unit
        return self.plan.first_uses.get(unit, len(self.plan.uses))

    @property
    def staying(self) -> frozenset[int]:
        """Units that run again at once, if they end now."""
        return self.plan.staying[self._cursor] if self.in_plan and self.plan is not None else NO_UNITS

    @property
    def upcoming(self) -> tuple[Use, ...]:
        """The uses, of those that follow in this step, whose weights are gathered or on their way by now."""
        if not self.in_plan or self.plan is None:
            return ()
        return self.plan.uses[self._cursor + 1 : self.plan.horizons[self._cursor]]

    def is_forward_again(self, use: Use) -> bool:
        """Return whether the use begins another forward of this step, which an evaluation does not have."""
        return self.plan is not None and use.unit == self.plan.uses[0].unit

    def _depart(self, unit: FsdpUnit, backward: bool) -> None:
        ran = Use(unit.index, backward)
        planned = "end of the step" if self._planned_use is None else self._words(self._planned_use)
        self.in_plan = False
        self._wants_record = True
        if ran not in self.unplanned and len(self.unplanned) < _MAX_LOGGED:
            self.unplanned.add(ran)
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
        self.observer.departed(self._words(ran), planned)

    @property
    def num_uses(self) -> int:
        """How many uses of units have followed the plan in this pass."""
        return self._cursor + 1

    @property
    def _planned_use(self) -> Use | None:
        """What this step's plan goes on with; None if it has ended, or was left."""
        if self.plan is None or not self.in_plan or self.num_uses == len(self.plan.uses):
            return None
        return self.plan.uses[self.num_uses]

    def _words(self, use: Use) -> str:
        unit = self.registry.by_number[use.unit]
        return (
            f"{'backward' if use.backward else 'forward'} of unit {'that was removed' if unit is None else unit.name}"
        )

    # ---- the record ---------------------------------------------------------------------------------------------

    def end_record(self) -> None:
        """Make the next plan of the record, if the step is over and the record differs from the plan there is.

        The first record is planned at once, one that is longer than a plan of forwards alone too; another order only when
        it comes twice in a row.
        """
        self._begun = None
        recorder = self.recorder
        if (
            not recorder.is_recording
            or not recorder.uses
            or not (recorder.is_too_long or not self.waits_for_backward())
        ):
            return
        recorder.stop()
        uses = tuple(recorder.uses)
        grows = self.plan is None or not any(use.backward for use in self.plan.uses)
        if self.plan is not None and uses == self.plan.uses[: len(uses)]:
            if not grows and len(uses) == len(self.plan.uses):
                self._wants_record = False  # else it is the forward alone, which says nothing about the rest
            return
        repeats, self._last_uses = uses == self._last_uses, uses
        if not (repeats or grows) or recorder.is_too_long:
            return
        self.observer.recorded(recorder.collectives)
        self._agree(recorder)
        self._candidate = self._plan_of(recorder)

    def _plan_of(self, recorder: Recorder) -> Plan:
        units, groups = self.registry.units, self.registry.groups
        itemsizes = [g.weights.rest_dtype.itemsize for g in groups if g.weights.needs_gather]
        return recorder.plan(
            weight_nbytes={
                g.index: g.weights.full_storage.nbytes for g in groups if g.weights.full_storage is not None
            },
            input_nbytes={g.index: g.grads.input.storage.nbytes for g in groups if g.trainable and not g.least_memory},
            groups_of={unit.index: [group.index for group in unit.groups] for unit in units},
            pool_of={group.index: number for number, pool in enumerate(_pools(groups)) for group in pool},
            prefetch_depth_of={unit.index: unit.prefetch_depth for unit in units},
            ahead_nbytes=self.ahead_numel * max(itemsizes, default=0),
            memory_budget_nbytes=self.memory_budget_nbytes,
            keeping=[unit.index for unit in units if unit.keeps_weights],
        )

    def expect(self) -> Plan:
        """Plan a step that runs units in the order of their registration: an estimate, never followed.

        Units that hold others are used around them.
        """
        recorder, units = Recorder(), self.registry.units
        around = [unit for unit in units if unit.has_nested]
        inside = [unit for unit in units if not unit.has_nested]
        for unit in (*around, *inside):
            recorder.use(unit.index, backward=False)
            for group in unit.groups:
                recorder.begin("weights", group.index)
                if unit in inside:
                    recorder.end("weights", group.index)
        for unit in (*around, *reversed(inside)):
            recorder.use(unit.index, backward=True)
            for group in unit.groups:
                recorder.begin("weights", group.index)
                if group.trainable and not group.least_memory:
                    recorder.begin("inputs", group.index)
                if unit in inside:
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
        self.observer.pass_failed()
        self._begun, self.in_plan = None, False

    # ---- the layout ---------------------------------------------------------------------------------------------

    def _adopt(self, plan: Plan) -> None:
        """Move buffers to where the plan says. No graph is waiting for its backward."""
        self.leave_plan()
        by_index = {group.index: group for group in self.registry.groups}
        for ranges, kind in ((plan.weights, "weights"), (plan.inputs, "inputs")):
            self._fill_arena(ranges, by_index, kind)
        self.unsharder.ranges_moved()
        self.unsharder.last_users = self._last_users(plan)
        for index in plan.stays_unsharded_nbytes:
            if index in by_index:
                by_index[index].weights.stays_unsharded = True
        self.plan = plan
        self._wants_record = False
        self.unplanned.clear()
        self._remove_unused(plan)

    def _remove_unused(self, plan: Plan) -> None:
        """Remove units that steps do not use any more and whose modules are gone on all ranks. Ranks: all."""
        used = {use.unit for use in plan.uses}
        for unit in [unit for unit in self.registry.units if unit.index not in used]:
            if not self.registry.is_true_on_any_rank(unit.tree() is not None):
                self.registry.remove([unit])

    def _fill_arena(self, ranges: RangePlan, groups: dict[int, FsdpParameterGroup], kind: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # memory of the first step, in blocks that would fragment the rest
        what = MemoryKind.UNSHARDED if kind == "weights" else MemoryKind.REDUCE_SCATTER_INPUT
        owner: Any = self.unsharder if kind == "weights" else self.grad_reducer
        # What the user holds unsharded stays where it is: the plan does not know how long a range of it is needed. Ranges of
        # units that were removed since stay empty, so that ranks plan alike though they free a module at different times.
        held = {i for i, group in groups.items() if kind == "weights" and group.weights.is_unsharded}
        placed = {i: groups[i] for i in ranges.overlapping if i in groups and i not in held}
        owner.overlapping = {i: {placed[o] for o in ranges.overlapping[i] if o in placed} for i in placed}
        for pool in ranges.pools:
            members = [index for index in pool.groups if index in placed]
            if not members:
                continue
            goes = kind == "weights" and all(placed[index].least_memory for index in members)
            for part in ranges.parts(pool) if goes else [pool]:
                self._fill_part(part, ranges, placed, what, goes=goes)

    def _fill_part(
        self, part: Pool, ranges: RangePlan, groups: dict[int, FsdpParameterGroup], what: MemoryKind, *, goes: bool
    ) -> None:
        """Move buffers into an arena of these groups; it ``goes`` while it is not used, or stays."""
        members = [groups[index] for index in part.groups if index in groups]
        if not members:
            return
        arena = members[0].group_mesh.empty(part.nbytes, torch.uint8, self.device, what).zero_()
        self.arenas.append(arena)
        idle_arena = IdleArena(arena) if goes else None
        if idle_arena is not None:
            self.unsharder.idle_arenas.append(idle_arena)
        begin = ranges.offsets[part.groups[0]] if goes else 0
        for group in members:
            is_weight = what is MemoryKind.UNSHARDED
            storage = group.weights.full_storage if is_weight else group.grads.input.storage
            assert storage is not None
            offset = ranges.offsets[group.index] - begin
            flat = arena[offset : offset + storage.nbytes].view(storage.dtype)
            (group.weights.move if is_weight else group.grads.move_input)(flat)
            storage.idle_arena = idle_arena

    def _last_users(self, plan: Plan) -> set[FsdpParameterGroup]:
        """Return the groups after which a forward, or a backward, gathers nothing more into an arena that goes."""
        found: set[FsdpParameterGroup] = set()
        units = {unit.index: unit for unit in self.registry.units}
        seen: set[IdleArena] = set()
        is_backward = False
        for use in reversed(plan.uses):
            if use.backward != is_backward:
                is_backward = use.backward
                seen.clear()
            for group in units[use.unit].groups if use.unit in units else ():
                storage = group.weights.full_storage
                if storage is not None and storage.idle_arena is not None and storage.idle_arena not in seen:
                    seen.add(storage.idle_arena)
                    found.add(group)
        return found

    def leave_plan(self) -> None:
        """Give every group memory of its own again, none of it allocated but for weights that the user holds unsharded."""
        self.unsharder.reshard_idle()
        for group in self.registry.groups:
            group.weights.stays_unsharded = False
            storage = group.weights.full_storage
            if storage is not None and storage.in_arena:
                group.weights.move(None, copies=group.weights.is_unsharded)
                if not group.weights.is_unsharded:
                    storage.free()
            if group.trainable and group.grads.input.storage.in_arena:
                group.grads.move_input(None)
                group.grads.input.storage.free()
        self.unsharder.overlapping, self.grad_reducer.overlapping = {}, {}
        self.unsharder.drop_arenas()
        self.arenas.clear()
        if self.plan is not None:
            self.graphs.moved()
        self.plan = None
        self.in_plan = False
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
