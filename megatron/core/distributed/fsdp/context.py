"""One step, in order: what runs when a unit is entered or left, forward and backward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron.core.distributed.fsdp import ranges
from megatron.core.distributed.fsdp.autograd_hooks import BackwardEnd, OutputHook
from megatron.core.distributed.fsdp.collectives import Transport
from megatron.core.distributed.fsdp.gatherer import Gatherer
from megatron.core.distributed.fsdp.grad_sums import sum_grads
from megatron.core.distributed.fsdp.graphs import Graphs, GraphToken
from megatron.core.distributed.fsdp.memory_report import MemoryReport, report_memory
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.plan import NO_UNITS, Plan, Use
from megatron.core.distributed.fsdp.planner import Planner
from megatron.core.distributed.fsdp.reducer import Reducer
from megatron.core.distributed.fsdp.streams import CudaStreams, Streams, make_streams
from megatron.core.distributed.fsdp.unit import FsdpUnit, Phase
from megatron.core.distributed.fsdp.updater import Update, Updater

logger = logging.getLogger(__name__)


class FsdpContext:
    """Streams, order, plan and microbatch state of the units under one root (or of sibling roots that share it).

    Ranks: units are used in the same order on all ranks; everything here follows from that order alone.
    """

    def __init__(self, device: torch.device, streams: Streams | None = None, *, is_shared: bool = False) -> None:
        self.device = device
        self.is_shared = is_shared  # made by fully_shard_context: units stay in it whatever lies above them
        self.streams = streams or make_streams(device)
        self.gatherer = Gatherer(self.streams)
        self_ref = weakref.ref(self)
        self.gatherer.can_move = lambda: (own := self_ref()) is not None and own._can_move()
        self.reducer = Reducer(self.streams)
        self._updater = Updater(self.streams, self.gatherer)
        self.is_last_microbatch = True
        self.overlaps_gather = True  # the next unit's weights are gathered ahead of its use
        self.graphs = Graphs()
        self.planner = Planner(self.gatherer, self.reducer, self.graphs, device)
        self._units: list[weakref.ref[FsdpUnit]] = []
        self._groups: list[weakref.ref[FsdpParameterGroup]] = []
        self._owners: list[weakref.ref[FsdpUnit]] = []  # of the groups
        self._read_peers: list[
            Transport
        ] = []  # transports whose gathers read shards without asking, one for each group
        self._is_capturing = False
        self._depth = 0
        self._num_entered = 0  # forwards of units, ever
        self._scope_depth = 0
        self._epoch_is_open = False  # the next forward uses the epoch that was opened for it
        # Backward
        self._backward_end: weakref.ref[BackwardEnd] | None = None
        self._open_units: list[
            FsdpUnit
        ] = []  # their gradients are owed or not reduced yet, in the order of their begin
        self._claiming: list[FsdpUnit] = []  # their backward holds weights
        self._recomputed: list[FsdpUnit] = []  # of these, the ones that recompute and whose gradients have not come
        self._lingering: list[FsdpUnit] = []  # of these, the ones that hold weights until the second next unit begins
        self._staying = NO_UNITS  # at a backward's end, the units that the plan goes on with

    @property
    def plan(self) -> Plan | None:
        """What a step is expected to do; None until one has been recorded."""
        return self.planner.plan

    @property
    def in_plan(self) -> bool:
        """True if this step has done so far what the plan says."""
        return self.planner.in_plan

    @property
    def overlaps_reduce(self) -> bool:
        """A unit's gradients are reduced while the next backward runs; off, compute waits for each reduction."""
        return self.reducer.overlaps

    @overlaps_reduce.setter
    def overlaps_reduce(self, value: bool) -> None:
        self.reducer.overlaps = value

    @property
    def poisons(self) -> bool:
        """Released ranges are filled with NaN: a debugging aid that turns a use after release into NaN losses."""
        return self.gatherer.poisons

    @poisons.setter
    def poisons(self, value: bool) -> None:
        self.gatherer.poisons = self.reducer.poisons = value

    # ---- units --------------------------------------------------------------------------------------------------

    def register(self, unit: FsdpUnit) -> None:
        """Afterwards the unit belongs to this context, which drops its plan, since it does not know the unit."""
        unit.context, unit.index = self, len(self._units)
        self._units.append(weakref.ref(unit))
        for group in unit.own_groups:
            group.index, group.context = len(self._groups), weakref.ref(self)
            group.set_prefix(unit.prefix)
            self._groups.append(weakref.ref(group))
            self._owners.append(self._units[-1])
            self._read_peers += [axis for axis in group.group_mesh.axes if axis.reads_peers and group.needs_gather][:1]
        self._read_peers = list({tuple(axis.ranks): axis for axis in self._read_peers}.values())
        unit.forward_range, unit.backward_range = (
            f"fsdp.{phase} {unit.prefix.rstrip('.') or 'root'}" for phase in ("forward", "backward")
        )
        self.planner.leave_plan(self.groups)

    def disband(self) -> bool:
        """Afterwards, if it was at rest, this context has no units left; the caller registers them elsewhere."""
        if self._depth or self._claiming or self._open_units or self.graphs.are_open:
            return False
        self.planner.leave_plan(self.groups)
        self._units.clear()
        self._groups.clear()
        self._owners.clear()
        self._read_peers.clear()
        return True

    @property
    def units(self) -> list[FsdpUnit]:
        """The units that still exist, in the order of their registration."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    @property
    def groups(self) -> list[FsdpParameterGroup]:
        """The groups that still exist."""
        return [group for ref in self._groups if (group := ref()) is not None]

    def describe(self) -> MemoryReport:
        """What the buffers of these units take on this rank: as planned, or, before a step has run, as expected."""
        plan = self.plan or self.planner.expect(self.units, self.groups)
        return report_memory(self.groups, plan, is_planned=self.plan is not None)

    # ---- microbatches -------------------------------------------------------------------------------------------

    @contextmanager
    def microbatch(self, *, is_first: bool, is_last: bool) -> Iterator[None]:
        """In the scope, weights are synchronised once (``is_first``) or not at all, and gradients summed over ranks
        at rest placement only, or (``is_last``) to the optimizer's."""
        previous = self.is_last_microbatch
        if self._epoch_is_open:
            self._use_prepared_epoch()
        elif is_first:
            self._open_epoch()
        self.is_last_microbatch = is_last
        self._scope_depth += 1
        if is_first:
            for group in self.groups:
                if group.trainable and group.has_partial:
                    self.reducer.drop_partial(group)  # left by a step that was given up
        try:
            yield
        finally:
            self._scope_depth -= 1
            self.is_last_microbatch = previous

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """In the scope, backward leaves gradients where they rest between microbatches."""
        previous, self.is_last_microbatch = self.is_last_microbatch, False
        try:
            yield
        finally:
            self.is_last_microbatch = previous

    def _open_epoch(self) -> None:
        if isinstance(self.streams, CudaStreams):
            self.streams.follow_caller()
        self.gatherer.new_epoch()

    def prepare_forward(self) -> None:
        """Afterwards the weights of the step to come are final, and the first unit's are on their way.

        Ranks: all. Call it after the optimizer has stepped; the next forward or first microbatch uses what it began.
        """
        self._recover()
        self._open_epoch()
        self._epoch_is_open = True
        if self.plan is not None and self._depth == 0:
            self.gatherer.release_idle()
            first = self.plan.uses[0], *self.plan.ahead[0]  # the root, which may have no weights, and the first in it
            for use in first:
                self._prefetch_use(use, forward=True)

    def weights_changed(self) -> None:
        """Afterwards the next forward uses the main weights as they are now, also in a scope that is not a step's first."""
        self.gatherer.release_idle()
        self._open_epoch()
        self._epoch_is_open = False

    def update_weights(
        self,
        groups: Sequence[FsdpParameterGroup],
        update: Update,
        *,
        overlaps: bool = False,
    ) -> None:
        """Afterwards ``update`` has been called for each group, in the order in which the next forward needs them.

        Args:
            groups: some of this context's.
            update: writes the group's main weights from its main gradient, and its ``model_piece``, on the current
                stream; reads nothing that compute writes later.
            overlaps: the updates run beside the next forward, on a stream of their own; a unit's first gather waits for
                its own update. Who reads main weights otherwise must call ``finish_updates`` first.

        Ranks: all that hold the groups.
        """
        self.gatherer.release_idle()
        in_order = sorted(groups, key=lambda group: self.planner.first_use(self._owner(group).index))
        self._updater.run(in_order, update, overlaps=overlaps)
        self._open_epoch()
        self._epoch_is_open = False

    def finish_updates(self) -> None:
        """Afterwards work on the compute stream sees main weights, and may free main gradients, as updates leave them."""
        self._updater.finish()

    def _use_prepared_epoch(self) -> None:
        """Afterwards a step begins on the weights that ``prepare_forward`` has begun to gather."""
        self._epoch_is_open = False
        for group in self.gatherer.live:
            if group.main_version != group.synced_version and not group.pinned:
                raise RuntimeError(
                    f"weights of {group} were written after start_param_sync had begun to gather them, so that forward would "
                    "read the old ones; call start_param_sync after the optimizer's step, or use fully_shard_optimizer"
                )

    # ---- forward ------------------------------------------------------------------------------------------------

    def enter_forward(self, unit: FsdpUnit) -> bool:
        """Afterwards the unit's weights are whole and its module holds them; True if this recomputes activations.

        Ranks: all.
        """
        if torch._C._current_graph_task_id() != -1:
            self._open_backward()
            if unit.phase is not Phase.BACKWARD:
                self._recomputed.append(unit)
            self._claim(unit)
            return True
        if self._depth == 0:
            self._begin_forward()
        self._depth += 1
        self._num_entered += 1
        unit.order = self._num_entered
        unit.forward_depth += 1
        unit.phase = Phase.FORWARD
        ranges.push(unit.forward_range)
        for group in unit.groups:
            group.num_users += 1
        try:
            self._use(unit, backward=False)
        except BaseException:
            self.fail_forward(unit)
            raise
        return False

    def leave_forward(self, unit: FsdpUnit, tensors: list[torch.Tensor]) -> None:
        """Afterwards the unit's weights are released, and its backward begins with the gradient of any of ``tensors``."""
        token = self.graphs.current
        if tensors and token is not None:
            self._watch(unit, tensors, token)
            # Used twice in one graph, its gradients are whole only at the end.
            is_again = unit.last_token is not None and unit.last_token() is token
            unit.is_deferred = unit.has_nested or is_again
            unit.last_token = weakref.ref(token)
        self._step_out(unit, keeps=unit.index in self.planner.staying)
        if self._depth == 0:
            self.graphs.end()
            if not tensors:
                self.gatherer.release_idle()
                self.gatherer.end_pass(self._read_peers)

    def leave_recomputation(self, unit: FsdpUnit, tensors: list[torch.Tensor]) -> None:
        """Afterwards the weights stay for the backward that recomputed, and the gradient of any of ``tensors`` begins it.

        Those gradients come if the recomputed graph itself is differentiated, as reentrant checkpoints do.
        """
        self._watch(unit, tensors, GraphToken(self.graphs.generation))

    def fail_forward(self, unit: FsdpUnit) -> None:
        """Afterwards the unit is not in forward any more; if it was the outermost, nothing of the step is left.

        A module that holds the unit may catch what was raised and go on without it.
        """
        self._step_out(unit, keeps=False)
        if self._depth == 0:
            self.abandon()

    def _watch(self, unit: FsdpUnit, tensors: list[torch.Tensor], token: GraphToken) -> None:
        hook = OutputHook(self, unit, token)
        for tensor in tensors:
            tensor.register_hook(hook)

    def _step_out(self, unit: FsdpUnit, *, keeps: bool) -> None:
        ranges.pop()
        unit.last_inside = self._num_entered
        unit.forward_depth -= 1
        if unit.forward_depth == 0 and unit.phase is Phase.FORWARD:
            unit.phase = Phase.RESTING
        self._depth -= 1
        for group in unit.groups:
            group.num_users -= 1
            if group.is_kept and torch.is_grad_enabled():
                self.gatherer.set_aside(group)
            elif not (keeps and group.needs_gather):
                self.gatherer.release(group)

    def _begin_forward(self) -> None:
        if isinstance(self.streams, CudaStreams):
            self.streams.follow_caller()
            self._notice_capture()
        self._recover()
        if self._scope_depth == 0:
            if self._epoch_is_open:
                self._use_prepared_epoch()
            else:
                self._open_epoch()
        self._check_parameters()
        for group in self.groups:
            if group.trainable:
                group.watch_gradients()
                group.free_main_grad_if_cleared()
        if not self.graphs.are_open:
            self._begin_step()
        self.graphs.begin()

    def _notice_capture(self) -> None:
        """Afterwards, where a capture into a CUDA graph has begun or ended, nothing waits for events of before."""
        is_capturing = torch.cuda.is_current_stream_capturing()
        if is_capturing is not self._is_capturing:
            self._is_capturing = is_capturing
            self.gatherer.forget_events()
            self.reducer.forget_events()
            self._updater.forget_events()
            for group in self.groups:
                group.forget_events()
            self._open_epoch()

    def _check_parameters(self) -> None:
        for group in self.groups:
            replaced = group.holders.replaced()
            if replaced is not None:
                raise RuntimeError(
                    f"{group.name_of(replaced)} must stay the parameter that fully_shard made, got another one in its place, which no forward "
                    "would use; write to the parameter in place, or replace it before fully_shard"
                )
            changed = group.with_other_requires_grad()
            if changed is not None:
                raise RuntimeError(
                    f"requires_grad of {changed} must stay {group.trainable}, as it was when fully_shard was called, got "
                    f"{not group.trainable}; freeze or unfreeze parameters before fully_shard"
                )

    # ---- backward -----------------------------------------------------------------------------------------------

    def begin_unit_backward(self, unit: FsdpUnit) -> None:
        """Afterwards the unit's weights are whole for its backward. Ranks: all.

        Units that ran later in forward are done with theirs, so their gradients are on their way to their owners, with
        zeros for what is missing. Not when they are complete: a parameter that gets no gradient on this rank may get
        one on another, and ranks must issue gathers and reductions in one order. Units whose gradients come from
        elsewhere too wait for backward's end. [Note: one order of reductions] in DESIGN.md.
        """
        self._open_backward()
        for later in list(self._open_units):
            if later.order > unit.last_inside and not later.waits_for_end:
                self._reduce(later)
        self._open(unit)
        for group in unit.borrowed_groups:
            if group.trainable and group.context is not None and group.context() is self:
                self._open(self._owner(group))
        self._claim(unit)

    def _claim(self, unit: FsdpUnit) -> None:
        """Afterwards backward holds the unit's weights, for its recomputation or for its gradients."""
        if unit.phase is Phase.BACKWARD:
            for group in unit.groups:
                if not group.is_gathered:  # another unit needed its addresses meanwhile
                    self.gatherer.acquire(group, forward=False)
            return
        unit.phase = Phase.BACKWARD
        unit.mark = ranges.begin(unit.backward_range)
        self._release_lingering()
        if unit.lingers:
            self._lingering.append(unit)
        self._claiming.append(unit)
        for group in unit.groups:
            group.num_claims += 1
        self._use(unit, backward=True)

    def _open_backward(self) -> None:
        if self._backward_end is not None:
            if self._backward_end() is not None:
                return
            self._recover()
        end = BackwardEnd(self)
        self._backward_end = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _open(self, unit: FsdpUnit) -> None:
        """Afterwards this backward owes the gradients of the unit's own parameters."""
        if unit.is_open or not unit.trainable_groups:
            return
        unit.is_open = True
        for group in unit.trainable_groups:
            group.is_owed = True
        self._open_units.append(unit)
        if unit in self._recomputed:
            self._recomputed.remove(unit)

    def open_group(self, group: FsdpParameterGroup) -> None:
        """Afterwards this backward owes the group's gradients: one of them has arrived, or is about to be written."""
        self._open_backward()
        self._open(self._owner(group))

    def _owner(self, group: FsdpParameterGroup) -> FsdpUnit:
        owner = self._owners[group.index]()
        assert owner is not None, "a group lives no longer than its unit"
        return owner

    def acquire_staging(self, group: FsdpParameterGroup) -> None:
        """Afterwards backward may write gradients of the group in place."""
        self.open_group(group)
        self.reducer.stage(group)

    def _reduce(self, unit: FsdpUnit) -> None:
        """Afterwards the unit's gradients are on their way to their owners. Ranks: all."""
        unit.is_open = False
        self._open_units.remove(unit)
        for group in unit.trainable_groups:
            group.is_owed = False
            self.reducer.reduce(group, is_last=self.is_last_microbatch)
        if unit not in self._lingering:
            self._close(unit)

    def _close(self, unit: FsdpUnit) -> None:
        """Afterwards the unit's backward no longer holds any weights."""
        if unit.phase is not Phase.BACKWARD:
            return
        unit.phase = Phase.RESTING
        ranges.end(unit.mark)
        self._claiming.remove(unit)
        for group in unit.groups:
            group.num_claims -= 1
            if group.is_kept or unit.index in self._staying:  # kept: until the end of the last backward
                self.gatherer.set_aside(group)
            else:
                self.gatherer.release(group)

    def _release_lingering(self) -> None:
        """Afterwards weights that get no gradient here are released for all units but the last one.

        Such weights (frozen, or tied and owned by another unit) have no event that says when backward is done with
        them. Autograd runs what was recorded later first, so once the second next unit has begun, all that could
        read them has run; the version fence would catch an exception to that.
        """
        while len(self._lingering) >= 2:
            unit = self._lingering.pop(0)
            if not unit.is_open:
                self._close(unit)

    def end_backward(self) -> None:
        """Afterwards every gradient of this backward is in ``param.grad`` and nothing stays gathered. Ranks: all."""
        self._backward_end = None
        upcoming = self.planner.upcoming  # other graphs wait for their backward, and the plan goes on with these
        self._staying = frozenset(use.unit for use in upcoming)
        for unit in list(self._recomputed):
            self._open(unit)  # no gradient came, here
        for unit in sorted(self._open_units, key=lambda unit: -unit.order):
            self._reduce(unit)
        if self.is_last_microbatch:
            self._reduce_partial()
        self._lingering.clear()
        self._recomputed.clear()
        for unit in list(self._claiming):
            self._close(unit)
        self._staying = NO_UNITS
        self.reducer.finish()
        if self.is_last_microbatch:
            sum_grads(self.groups, in_use=False)
        if self._read_peers and self.gatherer.has_unused and not upcoming:
            self.gatherer.end_pass(self._read_peers)  # reductions tell of gathers that compute waited for, no others
        self.gatherer.release_idle(keeps=not self.is_last_microbatch, upcoming=self._groups_of(upcoming))
        self.planner.end_record(self.units, self.groups)

    def reduce_partial(self) -> None:
        """Afterwards gradients that microbatches left unreduced are in ``param.grad``. Ranks: all."""
        self._reduce_partial()
        self.reducer.finish()
        sum_grads(self.groups, in_use=False)

    def _reduce_partial(self) -> None:
        for group in self.groups:
            if group.trainable and group.has_partial:
                self.reducer.reduce_rest(group)

    # ---- failure ------------------------------------------------------------------------------------------------

    @property
    def epoch_is_open(self) -> bool:
        """True between ``prepare_forward`` and the forward or microbatch that it prepared."""
        return self._epoch_is_open

    @property
    def is_running(self) -> bool:
        """True within a forward or a backward."""
        return self._depth > 0 or (self._backward_end is not None and self._backward_end() is not None)

    @property
    def has_failed(self) -> bool:
        """True after a backward that did not reach its end."""
        return self._backward_end is not None and self._backward_end() is None

    def _recover(self) -> None:
        if self.has_failed:
            logger.warning(
                "the last backward did not finish: its gradients are dropped, and what it had gathered is released"
            )
            self.abandon()

    def abandon(self) -> None:
        """Afterwards nothing of the step that was under way is left: nothing gathered, no gradient half reduced."""
        self._backward_end = None
        self._depth = 0
        for unit in self._claiming:
            ranges.end(unit.mark)
        for unit in self.units:
            unit.phase, unit.forward_depth, unit.is_open = Phase.RESTING, 0, False
        for group in self.groups:
            group.num_users = group.num_claims = 0
            if group.trainable:
                self.reducer.abandon(group)
                if group.has_partial:
                    self.reducer.drop_partial(group)
        for units in (self._open_units, self._claiming, self._lingering, self._recomputed):
            units.clear()
        self.reducer.finish()
        for group in self.groups:
            self.gatherer.release(group)
        self.graphs.end()
        self.planner.drop_record()

    # ---- the user's view of a unit ------------------------------------------------------------------------------

    def pin(self, unit: FsdpUnit) -> None:
        """Afterwards the unit's weights are whole until ``unpin``. Ranks: all."""
        if self._depth == 0 and self._scope_depth == 0 and not self._epoch_is_open:
            self._open_epoch()
        for group in unit.groups:
            storage = group.weight_storage
            if storage is not None and storage.in_arena and not group.is_gathered and self._can_move():
                self.gatherer.leave_arena(group)  # the plan does not know how long its range is needed
            group.pinned = True
            self.gatherer.acquire(group, forward=True)

    def unpin(self, unit: FsdpUnit) -> None:
        """Afterwards the unit's weights are released, unless a pass is using them."""
        for group in unit.groups:
            group.pinned = False
            self.gatherer.release(group)

    # ---- the plan -----------------------------------------------------------------------------------------------

    def _use(self, unit: FsdpUnit, *, backward: bool) -> None:
        """Afterwards compute may read the unit's weights, and, where the plan holds, the next unit's are on their way."""
        following = self.planner.use(unit, backward=backward)
        for group in unit.groups:
            self.gatherer.acquire(group, forward=not backward)
        for use in following if self.overlaps_gather else ():
            # Without gradients neither a backward follows, nor another forward on these weights.
            if backward or torch.is_grad_enabled() or not (use.backward or self.planner.is_forward_again(use)):
                self._prefetch_use(use, forward=not use.backward)

    def _groups_of(self, uses: Sequence[Use]) -> set[FsdpParameterGroup]:
        units = [self._units[use.unit]() for use in uses]
        return {group for unit in units if unit is not None for group in unit.groups}

    def _prefetch_use(self, use: Use, *, forward: bool) -> None:
        unit = self._units[use.unit]()
        if unit is not None:
            for group in unit.groups:
                self.gatherer.prefetch(group, forward=forward)

    def _begin_step(self) -> None:
        """Afterwards a new step is compared with the plan, and what is gathered was gathered for it."""
        self.planner.end_record(self.units, self.groups)
        self.planner.begin_step(self.groups)
        if any(group.synced_epoch != self.gatherer.epoch for group in self.gatherer.live):
            self.gatherer.release_idle()

    def _can_move(self) -> bool:
        """True if no graph waits for its backward or is in it; graphs that have had theirs are refused another then."""
        if self.graphs.are_open or self._backward_end is not None:
            return False
        self.graphs.moved()
        return True
