"""One step, in order: what runs when a unit is entered or left, forward and backward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter

import torch

from megatron.core.distributed.fsdp.buffers.grad_sums import sum_grads
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.comm.streams import CudaStreams, Role, Streams, make_streams
from megatron.core.distributed.fsdp.layout.plan import LOAD, NUM_KINDS, UPDATE, Plan, Recorder
from megatron.core.distributed.fsdp.runtime import nvtx
from megatron.core.distributed.fsdp.runtime.autograd_hooks import BackwardEnd, InputHook, OutputHook
from megatron.core.distributed.fsdp.runtime.backward import Backward
from megatron.core.distributed.fsdp.runtime.grad_reducer import GradReducer
from megatron.core.distributed.fsdp.runtime.graphs import Anchor, Graph, Graphs
from megatron.core.distributed.fsdp.runtime.hidden import hidden_from_user
from megatron.core.distributed.fsdp.runtime.kept_weights import KeptWeights
from megatron.core.distributed.fsdp.runtime.megatron_context import MegatronContext
from megatron.core.distributed.fsdp.runtime.memory_report import MemoryReport, report_memory
from megatron.core.distributed.fsdp.runtime.missing_gradients import MissingGradients
from megatron.core.distributed.fsdp.runtime.observer import Observer
from megatron.core.distributed.fsdp.runtime.planner import Planner
from megatron.core.distributed.fsdp.runtime.prefetch_scheduler import PrefetchScheduler
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit, Phase
from megatron.core.distributed.fsdp.runtime.unit_registry import UnitRegistry
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder
from megatron.core.distributed.fsdp.runtime.updater import Update, Updater
from megatron.core.distributed.fsdp.runtime.weight_scales import WeightScales
from megatron.core.distributed.fsdp.runtime.weight_versions import WeightVersions

logger = logging.getLogger(__name__)

# Of a group's unsharded weights: as writes have moved it on, and as it was set.
_VERSION, _VERSION_SET = attrgetter("weights.counted._version"), attrgetter("weights.version")


class FsdpContext(MegatronContext):
    """Streams, order, plan and microbatch state of the units under one root (or of sibling roots that share it).

    Ranks: units are used in the same order on all ranks; everything here follows from that order alone.
    """

    use_symmetric_memory = False  # for units that are made in its scope and name no transport
    spans_step = (
        False  # the plan holds a step's microbatches from the first to the last: [Note: several graphs in flight]
    )

    def __init__(
        self,
        device: torch.device,
        streams: Streams | None = None,
        *,
        is_shared: bool = False,
        observer_class: type[Observer] | None = None,
    ) -> None:
        self.device = device
        self.is_shared = is_shared  # made by fully_shard_context: units stay in it whatever lies above them
        self.streams = streams or make_streams(device)
        self.registry = UnitRegistry()
        self.observer = (observer_class or Observer)(self)
        recorder = Recorder(self.observer.before_issue)
        recorder.stop()  # until the first step begins
        self.unsharder = Unsharder(self.streams, recorder, self.observer)
        self_ref = weakref.ref(self)
        self.unsharder.can_move = lambda: (own := self_ref()) is not None and own._can_move()
        self.grad_reducer = GradReducer(self.streams, recorder, self.observer)
        self._updater = Updater(self.streams, self.unsharder)
        self._weight_scales = WeightScales(self.unsharder)
        self.graphs = Graphs()
        self.planner = Planner(
            self.registry, self.unsharder, self.grad_reducer, self.graphs, recorder, self.observer, device
        )
        self._missing_gradients = MissingGradients(self.registry, self.grad_reducer, self.observer, device)
        self._kept_weights = KeptWeights()
        self.prefetch_scheduler = PrefetchScheduler(self.registry, self.unsharder, self.planner)
        self._backward = Backward(self.registry, self.prefetch_scheduler, self.unsharder, self.grad_reducer)
        self._backward_end: weakref.ref[BackwardEnd] | None = None
        self._on_failure = _on_failure(weakref.ref(self._backward))
        self._is_capturing = False
        self.retains_graph = False  # the backward that is under way
        self._depth = 0
        self._is_transformed = False  # by torch.func, since the outermost forward began
        self.num_entered = 0  # forwards of units, ever
        self.first_inside = 0  # of these, the first that is within the outermost
        self._weight_versions = WeightVersions(self.streams, self.unsharder)

    @property
    def plan(self) -> Plan | None:
        """What a step is expected to do; None until one has been recorded."""
        return self.planner.plan

    @property
    def in_plan(self) -> bool:
        """True if this step has done so far what the plan says."""
        return self.planner.in_plan

    @property
    def poisons(self) -> bool:
        """Whether released memory is filled with NaN: a debugging aid that turns a read after release into NaN losses."""
        return self.unsharder.poisons

    @poisons.setter
    def poisons(self, value: bool) -> None:
        self.unsharder.poisons = self.grad_reducer.poisons = value

    @property
    def debug(self) -> bool:
        """Whether the debug mode is on (``fully_shard_context`` has what it does); slow. Ranks: alike on all."""
        return self.observer.is_debugging

    @debug.setter
    def debug(self, value: bool) -> None:
        """Turn the debug mode on. Ranks: all, alike, which they compare where there are units; blocks the host."""
        self.observer.debug(value)
        if value:
            self.poisons = True

    def use_streams(self, streams: Streams) -> None:
        """Run on the streams of another context. No pass is under way."""
        self.streams.share(streams)

    # ---- units --------------------------------------------------------------------------------------------------

    def register(self, unit: FsdpUnit) -> None:
        """Add the unit, and drop the plan, which does not know it."""
        unit.join(self)
        for group in unit.own_groups:
            group.join(self)
            self.unsharder.take_over(group)
            self._weight_scales.add(group)
        self.registry.add(unit)
        self._missing_gradients.rebuild_ballots()
        self.observer.registered(unit)
        self.planner.leave_plan()

    def disband(self) -> bool:
        """Give up all units, if no pass is under way, and return whether that was so; the caller registers them elsewhere. Ranks: all."""
        if self._depth or not self._backward.is_at_rest or self.planner.waits_for_backward():
            return False
        self._updater.finish()  # another context has other marks
        self.unsharder.wait_for_gathers()
        self.planner.leave_plan()
        self.registry.clear()
        self._weight_scales.clear()
        return True

    @property
    def units(self) -> list[FsdpUnit]:
        """The units that still exist, in the order of their registration."""
        return self.registry.units

    @property
    def groups(self) -> list[FsdpParameterGroup]:
        """The groups that still exist."""
        return self.registry.groups

    def describe(self) -> MemoryReport:
        """Report the memory of these units' buffers on this rank: as planned, or as estimated before the first step."""
        plan = self.plan or self.planner.expect()
        return report_memory(self.groups, plan, is_planned=self.plan is not None)

    @property
    def progress(self) -> tuple[int, str]:
        """How many collectives this rank has begun, and the last ones in words; from any thread."""
        return self.observer.progress

    # ---- microbatches -------------------------------------------------------------------------------------------

    @property
    def is_last_microbatch(self) -> bool:
        """Whether a backward ends the step, that is, reduces gradients over all ranks."""
        return self._backward.is_last

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        self._backward.is_last = value

    def follow_sync_of_units(self) -> None:
        """Let backwards end the step if any unit wants its gradients reduced over all ranks."""
        wishes = [unit.syncs_gradients and unit.all_reduces for unit in self.units if unit.own_groups]
        self.is_last_microbatch = any(wishes) or not wishes

    @contextmanager
    def microbatch(self, *, is_first: bool | None = None, is_last: bool = True) -> Iterator[None]:
        """Synchronise weights in the scope only if ``is_first``, and reduce gradients over all ranks only if ``is_last``.

        Otherwise gradients are reduced over the axes alone on which they are sharded. If ``is_first`` is None, a microbatch
        is the first one unless sums of earlier ones wait for the last one.
        """
        previous, previous_first = self.is_last_microbatch, self._is_first_microbatch
        if is_first:
            self.graphs.is_held = False  # of a step that was given up
        waiting = [group for group in self.groups if group.trainable and group.grads.has_partial]
        starts = not waiting if is_first is None else is_first
        self._weight_versions.begin_pass(is_first=starts)
        self.is_last_microbatch, self._is_first_microbatch = is_last, starts
        self._weight_versions.num_scopes += 1
        for group in waiting if is_first else ():
            self.grad_reducer.drop_partial(group)  # left by a step that was given up
        try:
            yield
        finally:
            self._weight_versions.num_scopes -= 1
            self.is_last_microbatch, self._is_first_microbatch = previous, previous_first

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """In the scope, backward leaves gradients where they rest between microbatches."""
        previous, self.is_last_microbatch = self.is_last_microbatch, False
        try:
            yield
        finally:
            self.is_last_microbatch = previous

    def prepare_forward(self) -> None:
        """Take the main weights as final for the next step, and prefetch its first unit.

        Ranks: all. Call it after the optimizer has stepped; the next forward or first microbatch uses what it began.
        """
        self._recover()
        self._weight_versions.begin(prepares=True)
        if self._depth == 0:
            self.prefetch_scheduler.prefetch_first()

    def weights_changed(self) -> None:
        """Make the next forward use the main weights as they are now, also in a scope that is not a step's first."""
        self.unsharder.reshard_held()
        self.unsharder.reshard_idle()
        self._weight_versions.begin()

    def update_weights(
        self,
        groups: Sequence[FsdpParameterGroup],
        update: Update,
        *,
        overlaps: bool = False,
    ) -> None:
        """Call ``update`` for each group, in the order in which the next forward needs them.

        Args:
            groups: some of this context's.
            update: writes the group's main weights from its main gradient, and its ``piece_of_update``, on the current
                stream; reads nothing that compute writes later.
            overlaps: the updates run beside the next forward, on a stream of their own; a unit's first gather waits for
                its own update. Who reads main weights otherwise must call ``finish_updates`` first.

        Ranks: all that hold the groups.
        """
        self.check_order()
        self.unsharder.reshard_held()
        self.unsharder.reshard_idle()
        in_order = sorted(groups, key=lambda group: self.planner.first_use(self.registry.owner(group).index))
        self._updater.run(in_order, update, first=self._weight_scales.begin_update, overlaps=overlaps)
        self.note_update(groups)
        self._weight_versions.begin()

    def begin_replay(self) -> None:
        """Bring what eager passes left to where a captured step begins: before its capture, and before each replay.

        Without it a step may be captured too; it then does in each replay what cannot be known to have been done.
        """
        self._weight_scales.begin_replay()

    def note_update(self, groups: Sequence[FsdpParameterGroup]) -> None:
        """Note that an optimizer has stepped on these groups, some of the context, for other ranks to compare. Ranks: all, alike."""
        first = next((group for group in groups if group.context is not None and group.context() is self), None)
        if first is not None:
            # One entry, of the first group that it writes to, stands for the whole update.
            self.observer.issued(NUM_KINDS * first.index + UPDATE)

    def note_load(self, group: FsdpParameterGroup) -> None:
        """Note that ``load_state_dict`` writes to this group of the context, for other ranks to compare. Ranks: all."""
        self.observer.issued(NUM_KINDS * group.index + LOAD)

    def check_order(self) -> None:
        """Check that all ranks issued the same collectives in the last step, as far as the answer is there. Ranks: each alone.

        Raises:
            OrderDiffersError: they did not.
        """
        self.observer.check()

    def finish_updates(self) -> None:
        """Make compute wait for all updates; then it may read main weights and free main gradients."""
        self._updater.finish()

    # ---- forward ------------------------------------------------------------------------------------------------

    def enter_forward(self, unit: FsdpUnit) -> bool:
        """Unshard the unit for its forward; return True if that is a recomputation within a backward.

        Ranks: all.
        """
        if torch._C._current_graph_task_id() != -1:
            self._open_backward()
            with hidden_from_user() if torch._C._len_torch_dispatch_stack() else nullcontext():
                self._backward.recompute(unit)
            return True
        if self._depth == 0:
            self.first_inside = self.num_entered + 2
            self._is_transformed = _is_transformed()
            if self._is_transformed or torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack():
                with hidden_from_user(), torch.inference_mode(False):  # memory that is made now serves training, too
                    self._begin_forward(unit)
            else:
                self._begin_forward(unit)
        self._depth += 1
        unit.order = self.num_entered = self.num_entered + 1
        unit.forward_depth, unit.phase = unit.forward_depth + 1, Phase.FORWARD
        nvtx.enter(unit.forward_range)
        for group in unit.groups:
            group.weights.num_forwards += 1
        if self.unsharder.held:
            self.unsharder.end_hold(unit.groups)
        try:
            if self._is_transformed or torch._C._len_torch_dispatch_stack():
                with hidden_from_user():
                    self.prefetch_scheduler.begin(unit, backward=False)
            else:
                self.prefetch_scheduler.begin(unit, backward=False)
        except BaseException:
            self.fail_forward(unit)
            raise
        return False

    def watch_inputs(self, unit: FsdpUnit, tensors: Iterable[torch.Tensor]) -> None:
        """End the unit's backward when the gradient of an input is there: its forward is the first within the outermost unit's.

        Else its gradients and weights would lie there while the outermost unit's backward goes on: of an embedding, which is large.

        Args:
            tensors: those of its inputs that are to get gradients, and are no leaves.
        """
        now = torch.autograd._get_sequence_nr()
        for tensor in tensors:
            # Of another device, another thread would come here at any time. Numbers of another thread's forward are no order.
            if tensor.device.type == self.device.type and tensor.grad_fn._sequence_nr() < now:  # type: ignore[union-attr]
                tensor.register_hook(InputHook(self, unit))
                break

    def leave_forward(self, unit: FsdpUnit, tensors: list[torch.Tensor]) -> None:
        """Reshard the unit, and begin its backward when the gradient of any of ``tensors`` arrives."""
        if list(map(_VERSION, unit.groups)) != list(map(_VERSION_SET, unit.groups)):
            self._refuse_writes(unit)
        if tensors and (graph := self.graphs.current) is not None:
            self._watch(unit, tensors, graph, self.graphs.anchor)
            # Used again in one graph, and other units in between: its gradients are whole only at the end.
            comes_back = unit in graph.units and (unit.is_deferred or unit.order != unit.last_inside + 1)
            unit.is_deferred = unit.has_nested or comes_back
            graph.units[unit] = None
        self._step_out(unit, keeps=unit.index in self.planner.staying)
        if self._depth == 0:
            self.graphs.end()
            self._backward.show_kept()
            ahead = self.planner.on_their_way()
            if ahead:  # the user may write these weights next, so compute waits for their all-gathers
                self.unsharder.wait_for_gathers()
            if not tensors:
                self.unsharder.reshard_idle(upcoming=ahead)
                self.unsharder.end_pass(self.registry.read_peers)

    def leave_recomputation(self, unit: FsdpUnit, tensors: list[torch.Tensor]) -> None:
        """Keep the weights for the backward that recomputed, which begins when the gradient of any of ``tensors`` arrives.

        Those gradients come if the recomputed graph itself is differentiated, as reentrant checkpoints do.
        """
        anchor = Anchor()
        self._watch(unit, tensors, Graph(self.graphs.generation, self.unsharder.weight_version, anchor), anchor)

    def fail_forward(self, unit: FsdpUnit) -> None:
        """End a forward that raised; if the unit was the outermost, drop what is left of the pass.

        A module that holds the unit may catch what was raised and go on without it.
        """
        self._step_out(unit, keeps=False)
        if self._depth == 0:
            self.abandon(drops_sums=False)

    def _refuse_writes(self, unit: FsdpUnit) -> None:
        """Refuse writes to unsharded weights in the unit's forward, unless they are writes to the main weights too.

        Writes through ``.data`` are not seen here; the debug mode sees them.

        Raises:
            RuntimeError: resharding would lose them; whether ranks have written the same nobody knows.
        """
        lost = [g for g in unit.groups if g.weights.counted._version != g.weights.version and g.weights.loses_writes]
        if lost:
            self.fail_forward(unit)
            raise RuntimeError(
                f"forward must not write to the weights of its unit, got a write in place to one of {lost[0]} in the forward of "
                f"{unit.name}, which would be lost when they are resharded; write to the parameters between steps (`with "
                "torch.no_grad(): layer.weight.clamp_(-1, 1)`), or hold what forward updates in a buffer, or in a parameter that "
                "fully_shard was told to ignore (ignored_params)"
            )

    def _watch(self, unit: FsdpUnit, tensors: list[torch.Tensor], graph: Graph, anchor: Anchor | None) -> None:
        hook = OutputHook(self, unit, graph, anchor)
        for tensor in tensors:
            tensor.register_hook(hook)

    def _step_out(self, unit: FsdpUnit, *, keeps: bool) -> None:
        nvtx.leave()
        unit.last_inside = self.num_entered
        unit.forward_depth -= 1
        if unit.forward_depth == 0 and unit.phase is Phase.FORWARD:
            unit.phase = Phase.RESTING
        self._depth -= 1
        for group in unit.groups:
            group.weights.num_forwards -= 1
            if keeps or (group.weights.stays_unsharded and torch.is_grad_enabled()):
                self.unsharder.keep_unsharded(group)
            else:
                self.unsharder.reshard(group)

    def _begin_forward(self, unit: FsdpUnit) -> None:
        """Prepare for an outermost forward: choose its weight version, check parameters, and begin a step unless one goes on."""
        if self.is_under_construction:
            self.ensure_finalized()
        if torch.cuda.nvtx.range_push is not nvtx.followed:
            nvtx.follow()
        if isinstance(self.streams, CudaStreams):
            self.streams.follow_caller()
            self._notice_capture()
        self._recover()
        self.check_order()
        if self.unsharder.held and self.registry.is_true_on_any_rank(self.unsharder.was_held_written()):
            self.unsharder.reshard_held()
        if self._weight_versions.num_scopes == 0:
            # A new version makes all gathered weights stale. What was prefetched for this root joins it if no rank has written it since;
            # that is asked first, while the version of the gathered weights is the current one. See [Note: sibling roots].
            ahead = self.planner.on_their_way(unit)
            keeps = bool(ahead) and not self._were_written(ahead)
            self._weight_versions.begin_pass()
            if keeps:
                self.unsharder.take_as_current(ahead)
        else:
            self.unsharder.follow_late_writes(self.groups)
        if self.registry.waits_for_values:
            self.registry.check_filled()
        self.observer.forward_begins()
        self.registry.check()
        if torch.is_grad_enabled():
            self.follow_requires_grad()
        for group in self.groups:
            if group.trainable:
                if not group.grads.is_watched:
                    self._watch_gradients(group)
                group.grads.free_main_if_cleared()
        if not (self.planner.enter_root(unit) or self.planner.waits_for_backward(unit)):
            self._backward.release_kept()
            self._begin_step(unit)
            self.graphs.is_held = self.spans_step and self._weight_versions.num_scopes > 0
        self.graphs.begin(self.unsharder.weight_version)

    def follow_requires_grad(self) -> None:
        """Train the parameters that require gradients now, and plan again if that adds a group. Ranks: all."""
        if self.registry.follow_requires_grad():
            self.planner.outdate()
            self._missing_gradients.rebuild_ballots()
            for group in self.groups:
                if group.trainable and not group.grads.is_watched:
                    self._watch_gradients(group)

    def _were_written(self, groups: Sequence[FsdpParameterGroup]) -> bool:
        """Return whether any rank has written main weights of these groups since their all-gather. Ranks: all; blocks the host."""
        self.unsharder.order_after_compute()
        with self.streams.on(Role.GATHER):
            return self.registry.is_true_on_any_rank(self.unsharder.were_written(groups))

    def _watch_gradients(self, group: FsdpParameterGroup) -> None:
        group.watch_gradients(self.registry.owner(group))
        self._kept_weights.add(group)

    def _notice_capture(self) -> None:
        """Forget all events where a capture into a CUDA graph has begun or ended: work from before cannot be waited for."""
        is_capturing = torch.cuda.is_current_stream_capturing()
        if is_capturing is not self._is_capturing:
            self._is_capturing = is_capturing
            self.streams.forget()
            self._updater.finish()  # waits for nothing that was forgotten, and frees gradients
            self.unsharder.keep_arenas()  # a graph that is replayed knows their addresses
            self._weight_versions.begin()

    # ---- backward -----------------------------------------------------------------------------------------------

    def begin_unit_backward(self, unit: FsdpUnit) -> None:
        """Unshard the unit for its backward, and launch the reductions of later units. Ranks: all."""
        if self._backward_end is None or self._backward_end() is None:
            self._open_backward()
        self._backward.begin(unit)

    def end_unit_backward(self, unit: FsdpUnit) -> None:
        """Launch the reductions of a unit whose gradients are there, unless another graph that waits may bring more. Ranks: all."""
        if self._backward_end is not None and self._backward_end() is not None and not self.graphs.may_be_open:
            self._backward.finish(unit)

    def _open_backward(self) -> None:
        if self._backward_end is not None:
            if self._backward_end() is not None:
                return
            self._recover()
        _is_transformed()  # within a forward: when that began there was none
        self._backward.open()
        self.retains_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        # A recomputation always enables gradients, so grad mode does not prove create_graph. create_graph keeps the graph.
        self._backward.makes_graph = self.retains_graph and torch.is_grad_enabled()
        self.follow_requires_grad()
        end = BackwardEnd(self)
        self._backward_end = weakref.ref(end, self._on_failure)  # called unless the backward reaches its end
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def open_group(self, group: FsdpParameterGroup) -> None:
        """Note that this backward owes the group's gradients: one of them has arrived, or is about to be written."""
        self._open_backward()
        self._backward.owe(self.registry.owner(group))

    def open_group_late(self, group: FsdpParameterGroup) -> None:
        """As ``open_group``, for a gradient that no output of the group's unit announced.

        Raises:
            RuntimeError: it was, or may have been, computed with other weights than forward's.
        """
        self.open_group(group)
        group.refuse_gradient_of_earlier_weights()
        self._kept_weights.check(group, self.planner.arenas)

    def acquire_input(self, group: FsdpParameterGroup) -> None:
        """Let backward write to the group's reduce-scatter input."""
        self.open_group(group)
        self.grad_reducer.acquire_input(group)

    def end_backward(self) -> None:
        """Finish the backward: every gradient is in ``param.grad``, and every unit is resharded. Ranks: all."""
        self._backward_end = None
        if self.is_last_microbatch:
            self.graphs.is_held = False
        upcoming = self.planner.upcoming  # other graphs wait for their backward, and the plan goes on with these
        self._backward.end(staying=frozenset(use.unit for use in upcoming))
        if self.is_last_microbatch:
            self._missing_gradients.ask()
        self.grad_reducer.finish()
        if self.is_last_microbatch:
            self._missing_gradients.settle()
            sum_grads(self.groups, in_use=False)
        if self.registry.read_peers and self.unsharder.has_unused and not upcoming:
            # Reductions tell of gathers that compute waited for, no others.
            self.unsharder.end_pass(self.registry.read_peers)
        if self.unsharder.held and self.is_last_microbatch:
            self.unsharder.reshard_held()
        self.unsharder.reshard_idle(keeps=not self.is_last_microbatch, upcoming=self.registry.groups_of(upcoming))
        self.observer.backward_ended(is_last=self.is_last_microbatch)
        self.planner.end_record()
        if self.is_last_microbatch:
            self.grad_reducer.call_hooks()

    def reduce_partial(self) -> None:
        """Reduce gradients that microbatches left unreduced into ``param.grad``. Ranks: all."""
        self._backward.reduce_partial()
        self._missing_gradients.ask()
        self.grad_reducer.finish()
        self._missing_gradients.settle()
        sum_grads(self.groups, in_use=False)
        self.observer.backward_ended(is_last=True)
        self.grad_reducer.call_hooks()

    # ---- failure ------------------------------------------------------------------------------------------------

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
                "the last backward did not finish: its units are resharded, and gradients that it had not reduced are dropped; "
                "those that it had reduced are in param.grad: call zero_grad() if you have not"
            )
            self.abandon()

    def abandon(self, *, drops_sums: bool = True) -> None:
        """Drop the pass that was under way: reshard all units, and drop what it left of gradients.

        Args:
            drops_sums: also sums over microbatches that wait, to which a backward that failed may have added a part.
        """
        self._backward_end = None
        self._depth = 0
        self._backward.abandon()
        for unit in self.units:
            unit.phase, unit.forward_depth, unit.is_open = Phase.RESTING, 0, False
        for group in self.groups:
            group.weights.num_forwards = group.weights.num_backwards = 0
            if group.trainable:
                self.grad_reducer.abandon(group)
                if drops_sums:
                    self.grad_reducer.drop_partial(group)
        self.grad_reducer.finish()
        for group in self.groups:
            self.unsharder.reshard(group)
        self.graphs.is_held = False
        self.graphs.give_up()
        self.planner.abandon()

    # ---- the user's view of a unit ------------------------------------------------------------------------------

    def unshard(self, unit: FsdpUnit, *, waits: bool = True) -> None:
        """Unshard the unit for the user, as ``FsdpModule.unshard`` says; without ``waits`` begin it. Ranks: all."""
        self.unshard_groups(unit.groups, waits=waits)

    def unshard_groups(self, groups: Sequence[FsdpParameterGroup], *, waits: bool = True) -> None:
        """As ``unshard``, for some groups of the context. Ranks: all."""
        if self._depth == 0 and self._weight_versions.num_scopes == 0 and not self._weight_versions.is_prepared:
            self._weight_versions.begin()
        for group in groups:
            if group.trainable:
                self._watch_gradients(group)  # the user may compute with the weights without calling the module
            weights, storage = group.weights, group.weights.full_storage
            is_used = weights.num_forwards or weights.num_backwards or weights.held_by_user
            if storage is not None and storage.in_arena and not is_used and self._can_move():
                self.unsharder.reshard(group)  # an earlier pass may have kept it gathered
                self.unsharder.leave_arena(group)  # the plan does not know how long its range is needed
            self.unsharder.hold(group, waits=waits)

    def wait_for_unshard(self, unit: FsdpUnit) -> None:
        """Finish what ``unshard`` began without ``waits``, unless a pass has ended it since."""
        for group in unit.groups:
            if group.weights.held_by_user:
                self.unsharder.unshard(group, forward=True)

    def reshard(self, unit: FsdpUnit) -> None:
        """Reshard the unit, unless a pass is using its weights."""
        self.reshard_groups(unit.groups)

    def reshard_groups(self, groups: Sequence[FsdpParameterGroup]) -> None:
        """As ``reshard``, for some groups of the context."""
        self.unsharder.end_hold(groups)
        for group in groups:
            self.unsharder.reshard(group)

    # ---- the plan -----------------------------------------------------------------------------------------------

    def _begin_step(self, unit: FsdpUnit) -> None:
        """Compare what runs from now on with the plan, and drop weights that were gathered for an earlier step."""
        self.planner.end_record()
        self.planner.begin_step(unit)
        if any(group.weights.synced_weight_version != self.unsharder.weight_version for group in self.unsharder.live):
            self.unsharder.reshard_idle()

    def _can_move(self) -> bool:
        """Return whether no graph waits for its backward or is in it; a backward of an earlier graph is refused then. Ranks: all."""
        if self._backward_end is not None or self.planner.waits_for_backward():
            return False
        self.graphs.moved()
        return True


def _on_failure(backward: weakref.ref[Backward]) -> Callable[[object], None]:
    def show_sharded(_: object) -> None:
        own = backward()
        if own is not None:
            own.show_sharded()

    return show_sharded


def _is_transformed() -> bool:
    """Return whether a transform of torch.func is under way; refuse those that differentiate backward."""
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None and transform.key() == torch._C._functorch.TransformType.Grad:
        raise NotImplementedError(
            "torch.func.grad, vjp and jacrev of a sharded model, or a part of it, are not served: their backward runs on copies, which no "
            "reduction over the ranks can read; use backward() and param.grad"
        )
    return transform is not None
