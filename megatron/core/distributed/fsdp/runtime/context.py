"""One step, in order: what runs when a unit is entered or left, forward and backward."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from megatron.core.distributed.fsdp.buffers.grad_sums import sum_grads
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.comm.streams import CudaStreams, Role, make_streams
from megatron.core.distributed.fsdp.config.engine_options import EngineOptions
from megatron.core.distributed.fsdp.layout.plan import LOAD, NUM_KINDS, UPDATE, Recorder
from megatron.core.distributed.fsdp.runtime import nvtx
from megatron.core.distributed.fsdp.runtime.backward import Backward, OutputHook
from megatron.core.distributed.fsdp.runtime.grad_reducer import GradReducer, MissingGradients
from megatron.core.distributed.fsdp.runtime.memory_report import MemoryReport, report_memory
from megatron.core.distributed.fsdp.runtime.observer import Observer
from megatron.core.distributed.fsdp.runtime.planner import Planner
from megatron.core.distributed.fsdp.runtime.step_state import Anchor, Graph, StepState
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit, UnitRegistry
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder, Update, Updater

logger = logging.getLogger(__name__)


_SELECTIVE_CHECKPOINTS = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


class FsdpContext:
    """Streams, order, plan and state of a step of the units under one root (or of sibling roots that share it).

    Ranks: units are used in the same order on all ranks; everything here follows from that order alone.

    Attributes:
        state: where the step is; all that changes within one and is not a unit's or a group's.
        is_shared: made by ``fully_shard_context``: units stay in it whatever lies above them.
    """

    def __init__(
        self,
        device: torch.device,
        options: EngineOptions | None = None,
        *,
        is_shared: bool = False,
        observer_class: type[Observer] | None = None,
    ) -> None:
        self.device, self.is_shared, self.options = device, is_shared, options or EngineOptions()
        self.streams = make_streams(device, one_for_communication=self.options.unify_communication_stream)
        self.registry = UnitRegistry()
        self.state = StepState(self.registry)
        self.observer = (observer_class or Observer)(self)
        recorder = Recorder()
        recorder.stop()  # until the first step begins: forwards of single units before it are not a step
        self.unsharder = Unsharder(self.streams, self.state, recorder, self.observer, self.options)
        self.grad_reducer = GradReducer(self.streams, recorder, self.observer, self.options)
        self.updater = Updater(self.streams, self.unsharder)
        self.planner = Planner(self.unsharder, self.grad_reducer)
        self._missing_gradients = MissingGradients(self.registry, self.grad_reducer, device)
        self.backward = Backward(self.planner)
        if self.options.debug:
            self.debug = True

    def change_options(self, **changes: Any) -> None:
        """Change settings of the context (fields of ``EngineOptions``) from now on. Ranks: all, with the same arguments; does not communicate."""
        self.options = replace(self.options, **changes)
        for part in (self.unsharder, self.grad_reducer):
            part.use_options(self.options)

    @property
    def debug(self) -> bool:
        """Whether the debug mode is on (``fully_shard_context`` has what it does); slow. Ranks: the same on all."""
        return self.observer.is_debugging

    @debug.setter
    def debug(self, value: bool) -> None:
        """Turn the debug mode on. Ranks: all, with the same value, which they compare where there are units; blocks the host."""
        self.observer.debug(value)
        if value:
            self.change_options(debug=True, poisons=True)

    # ---- units --------------------------------------------------------------------------------------------------

    def register(self, unit: FsdpUnit) -> None:
        """Add the unit, and drop the plan, which does not know it."""
        for group in unit.own_groups:
            self.unsharder.take_over(group)
            self.updater.add(group)
        self.registry.add(unit, self)
        self._missing_gradients.rebuild_ballots()
        self.observer.registered(unit)
        self.planner.leave_plan()

    def disband(self) -> bool:
        """Give up all units, if no pass is under way, and return whether that was so; the caller registers them elsewhere. Ranks: all."""
        if self.is_running or self.state.has_failed or self.state.waits_for_backward():
            return False
        # Another context has other marks, for which nothing here would be waited for.
        self.updater.clear()
        self.unsharder.wait_for_gathers()
        self.planner.leave_plan()
        self.registry.clear()
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
        plan = self.planner.plan
        return report_memory(self.groups, plan or self.planner.expect(), is_planned=plan is not None)

    # ---- microbatches -------------------------------------------------------------------------------------------

    def follow_sync_of_units(self) -> None:
        """Let backwards end the step if any unit wants its gradients reduced over all ranks."""
        settings = [unit.settings for unit in self.units if unit.own_groups]
        self.state.set_last(not settings or any(own.syncs_gradients and own.all_reduces for own in settings))

    @contextmanager
    def microbatch(self, *, is_first: bool | None = None, is_last: bool = True) -> Iterator[None]:
        """Synchronise weights in the scope only if ``is_first``, and reduce gradients over all ranks only if ``is_last``.

        Otherwise gradients are reduced over the axes alone on which they are sharded. If ``is_first`` is None, a microbatch
        is the first one unless sums of earlier ones wait for the last one.
        """
        if is_first:
            self.state.end_step()  # of a step that was given up
        waiting = [group for group in self.groups if group.trainable and group.grads.refresh_pending()]
        starts = not waiting if is_first is None else is_first
        if not self._use_prepared_version() and starts:
            self._begin_version()
        with self.state.microbatch(is_first=starts, is_last=is_last):
            for group in waiting if is_first else ():
                self.grad_reducer.drop_partial(group)  # left by a step that was given up
            yield

    def _begin_version(self, *, prepares: bool = False) -> None:
        """Begin a weight version: all-gathers see the weights as compute leaves them now.

        Args:
            prepares: for the next step, whose all-gathers may begin at once.
        """
        if isinstance(self.streams, CudaStreams):
            self.streams.follow_caller()
        self.state.begin_version(prepares=prepares)
        self.unsharder.order_after_compute()

    def _use_prepared_version(self) -> bool:
        """Use the weight version that was prepared, if one was, and return whether so.

        Raises:
            RuntimeError: weights were written after the version was prepared.
        """
        if not self.state.take_prepared_version():
            return False
        # This rank alone knows of the write, so it cannot gather again: the others would not join.
        for group in self.unsharder.written_after_gather():
            raise RuntimeError(
                f"weights of {group} were written after start_param_sync had begun to gather them, so that forward would "
                "read the old ones; call start_param_sync after the optimizer's step, or use fully_shard_optimizer"
            )
        return True

    def prepare_forward(self) -> None:
        """Take the main weights as final for the next step, and prefetch its first unit.

        Ranks: all. Call it after the optimizer has stepped; the next forward or first microbatch uses what it began.
        """
        self._recover()
        self._begin_version(prepares=True)
        if self.state.outermost is None:
            self.planner.prefetch_first()

    def weights_changed(self) -> None:
        """Make the next forward use the main weights as they are now, also in a scope that is not a step's first."""
        self.unsharder.reshard_held()
        self.unsharder.reshard_idle()
        self._begin_version()

    def update_weights(self, groups: Sequence[FsdpParameterGroup], update: Update, *, overlaps: bool = False) -> None:
        """Call ``update`` for each group, in the order in which the next forward needs them.

        Args:
            groups: some of this context's.
            update: writes the group's main weights from its main gradient, and its ``piece_of_update``, on the current
                stream; reads nothing that compute writes later.
            overlaps: the updates run concurrently with the next forward, on a stream of their own; a unit's first gather waits for
                its own update. Who reads main weights otherwise must call ``finish_updates`` first.

        Ranks: all that hold the groups.
        """
        self.observer.raise_found()
        # Before main weights change: what is unsharded now would be read as the new weights.
        self.unsharder.reshard_held()
        self.unsharder.reshard_idle()
        in_order = sorted(groups, key=lambda group: self.planner.first_use(self.registry.owner(group).index))
        self.updater.run(in_order, update, overlaps=overlaps)
        self.note_update(groups)
        self._begin_version()

    def note_update(self, groups: Sequence[FsdpParameterGroup]) -> None:
        """Note that an optimizer has stepped on these groups, some of the context, for other ranks to compare. Ranks: all, with the same arguments."""
        first = next((group for group in groups if group.context is not None and group.context() is self), None)
        if first is not None:
            # One entry, of the first group that it writes to, stands for the whole update.
            self.observer.issued(NUM_KINDS * first.index + UPDATE)

    def note_load(self, group: FsdpParameterGroup) -> None:
        """Note that ``load_state_dict`` writes to this group of the context, for other ranks to compare. Ranks: all."""
        self.observer.issued(NUM_KINDS * group.index + LOAD)

    def finish_updates(self) -> None:
        """Make compute wait for all updates; then it may read main weights and free main gradients."""
        self.updater.finish()

    # ---- forward ------------------------------------------------------------------------------------------------

    def enter_forward(self, unit: FsdpUnit) -> bool:
        """Unshard the unit for its forward; return True if that is a recomputation within a backward.

        Ranks: all.
        """
        if torch._C._current_graph_task_id() != -1:
            self._open_backward()
            with hidden_from_user() if torch._C._len_torch_dispatch_stack() else nullcontext():
                self.backward.recompute(unit)
            return True
        state = self.state
        if state.outermost is None:
            state.begin_outermost(is_transformed=_is_transformed())
            if state.is_transformed or torch.is_inference_mode_enabled() or torch._C._len_torch_dispatch_stack():
                # Memory that is made now serves training, too. Not in other forwards: leaving inference mode enables gradients.
                with hidden_from_user(), torch.inference_mode(False):
                    self._begin_forward(unit)
            else:
                self._begin_forward(unit)
        unit.enter_forward(state.enter_forward(unit))
        nvtx.enter(unit.forward_range)
        # Before anything is gathered: a gather that needs memory may reshard what nobody holds.
        for group in unit.groups:
            group.weights.holders.enter_forward()
        if self.unsharder.held:
            self.unsharder.end_hold(unit.groups)
        try:
            if state.is_transformed or torch._C._len_torch_dispatch_stack():
                with hidden_from_user():
                    self.planner.use(unit, backward=False)
            else:
                self.planner.use(unit, backward=False)
        except BaseException:
            self.fail_forward(unit)
            raise
        return False

    def watch_inputs(self, unit: FsdpUnit, tensors: Iterable[torch.Tensor]) -> None:
        """End the unit's backward when the gradient of its input arrives; for the first unit within the outermost one.

        Otherwise its weights and gradients would stay in memory while the rest of the outermost unit's backward runs, for example that
        of a large embedding.

        Args:
            tensors: those of its inputs that require gradients.
        """
        now = torch.autograd._get_sequence_nr()
        for tensor in tensors:
            # Of another device, another thread would come here at any time. Numbers of another thread's forward are no order.
            node = tensor.grad_fn
            if node is not None and tensor.device.type == self.device.type and node._sequence_nr() < now:
                # No unit before this one has a begin of backward that would reduce this one. Autograd runs what was recorded later
                # first, so the unit's own gradients have come by then: of this forward and of all later ones.
                tensor.register_hook(lambda _: self.backward.finish(unit))
                break

    def leave_forward(self, unit: FsdpUnit, tensors: list[torch.Tensor]) -> None:
        """Reshard the unit, and begin its backward when the gradient of any of ``tensors`` arrives."""
        for group in unit.groups:
            if group.weights.unsharded[0]._version != group.weights.version:
                self._refuse_writes(unit, group)
        # Without a tensor that gets a gradient no backward comes through the unit: its graph does not wait for one.
        graph = self.state.graphs.current if tensors else None
        if graph is not None:
            OutputHook(self, unit, tensors, graph, self.state.graphs.anchor, unit.entered)
        self._step_out(unit, graph, keeps=unit.index in self.planner.staying)
        if self.state.outermost is None:
            self.state.graphs.end()
            self.backward.show_sharded()
            ahead = self.planner.on_their_way()
            if ahead:  # the user may write these weights next, so compute waits for their all-gathers
                self.unsharder.wait_for_gathers()
            # Else a backward does both: it reshards what was prefetched and not used, and its reductions let peers write to shards.
            if not tensors:
                self.unsharder.reshard_idle(upcoming=ahead)
                self.unsharder.end_pass(self.registry.read_peers)

    def leave_recomputation(self, unit: FsdpUnit, tensors: list[torch.Tensor]) -> None:
        """Keep the weights for the backward that recomputed, which begins when the gradient of any of ``tensors`` arrives.

        Those gradients come if the recomputed graph itself is differentiated, as reentrant checkpoints do.
        """
        anchor = Anchor()
        graph = Graph(self.state.graphs.generation, self.state.weight_version, anchor)
        OutputHook(self, unit, tensors, graph, anchor, unit.order)

    def fail_forward(self, unit: FsdpUnit) -> None:
        """End a forward that raised; if the unit was the outermost, drop what is left of the pass.

        A module that holds the unit may catch what was raised and go on without it.
        """
        self._step_out(unit, None, keeps=False)
        if self.state.outermost is None:
            # A backward that took turns with this forward cannot end either, and may have added a part to sums.
            self.abandon(drops_sums=self.state.is_in_backward or self.state.has_failed)

    def _refuse_writes(self, unit: FsdpUnit, group: FsdpParameterGroup) -> None:
        """Refuse a write to the group's unsharded weights in the unit's forward, unless it is one to the main weights too.

        Writes through ``.data`` are not seen here; the debug mode sees them.

        Raises:
            RuntimeError: resharding would lose them; whether ranks have written the same nobody knows.
        """
        if group.weights.loses_writes:
            self.fail_forward(unit)
            raise RuntimeError(
                f"forward must not write to the weights of its unit, got a write in place to one of {group} in the forward of "
                f"{unit.name}, which would be lost when they are resharded; write to the parameters between steps (`with "
                "torch.no_grad(): layer.weight.clamp_(-1, 1)`), or hold what forward updates in a buffer, or in a parameter that "
                "fully_shard was told to ignore (ignored_params)"
            )

    def refuse_returned_weights(self, unit: FsdpUnit, tensors: Sequence[torch.Tensor]) -> None:
        """Refuse a forward of the unit that returns these leaf tensors, or views of them, if one is a weight that is resharded after it.

        Raises:
            RuntimeError: other weights would take the memory before the caller reads it.
        """
        for group in unit.groups:
            weights = group.weights
            stays = unit.index in self.planner.staying or weights.holders.by_user or weights.holders.by_plan
            for index, weight in enumerate(() if stays or weights.full_storage is None else weights.unsharded):
                if any(weight is tensor for tensor in tensors):
                    raise RuntimeError(
                        f"forward of {unit.name} must not return {group.name_of(index)}, or a view of it, whose memory other weights "
                        "take afterwards; compute with the weight in this forward, return a copy (weight.clone()), or keep the "
                        "weights with fully_shard(..., reshard_after_forward=False)"
                    )

    def _step_out(self, unit: FsdpUnit, graph: Graph | None, *, keeps: bool) -> None:
        nvtx.leave()
        unit.leave_forward(self.state.num_entered, graph)
        if unit is self.state.outermost and not unit.forward_depth:
            self.state.leave_outermost()
        for group in unit.groups:
            if not group.weights.holders.leave_forward():
                continue
            if keeps or (group.weights.holders.by_plan and torch.is_grad_enabled()):
                group.param_slots.to_sharded()
            else:
                self.unsharder.reshard(group)

    def _begin_forward(self, unit: FsdpUnit) -> None:
        """Prepare for an outermost forward: choose its weight version, check parameters, and begin a step unless one goes on.

        The order of these calls is fixed: later ones go by what earlier ones have brought up to date.
        """
        if torch.cuda.nvtx.range_push is not nvtx.followed:
            nvtx.follow()
        if isinstance(self.streams, CudaStreams):
            self.streams.follow_caller()
            self._notice_capture()
        # Before anything goes by the state, which a backward that failed has left half way.
        self._recover()
        # Before this rank issues a collective: ranks that differ would meet there in an error that names nothing.
        self.observer.raise_found()
        # The user may have written weights that they hold: released here, they are gathered again.
        held = self.unsharder.held
        if held and self.registry.is_true_on_any_rank(any(group.weights.freshness.is_written for group in held)):
            self.unsharder.reshard_held()
        if self.state.num_scopes == 0:
            # A new version makes all gathered weights stale. What was prefetched for this root joins it if no rank has written it since;
            # that is asked first, while the version of the gathered weights is the current one. See [Note: sibling roots].
            ahead = self.planner.on_their_way(unit)
            keeps = bool(ahead) and not self._were_written(ahead)
            if not self._use_prepared_version():
                self._begin_version()
            for group in ahead if keeps else ():
                group.weights.freshness.rejoin(self.state.weight_version)
        else:
            self.unsharder.follow_late_writes(self.groups)
        self.registry.check_filled()
        self.observer.forward_begins()
        self.registry.check_parameters()
        # Before the step begins: a group that is trained from now on outdates the plan. See [Note: freezing].
        if torch.is_grad_enabled():
            self.follow_requires_grad()
        for group in self.groups:
            if group.trainable:
                if not group.grads.is_watched:
                    self._watch_gradients(group)
                group.grads.free_main_if_cleared()  # before a plan is adopted, whose arenas may take the memory
        if not self.planner.enter_root(unit):
            self.backward.release_kept()
            self.planner.begin_step(unit)
            # Backward takes gathered weights as they are, so those of an earlier step must not be left.
            if not all(g.weights.freshness.version == self.state.weight_version for g in self.unsharder.live):
                self.unsharder.reshard_idle()
            self.state.begin_step(spans_step=self.options.spans_step)
        # Last: a graph that is open would say that the step before goes on.
        self.state.graphs.begin(self.state.weight_version)

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
        group.watch_gradients()
        self.observer.watched(group)

    def _notice_capture(self) -> None:
        """Forget all events where a capture into a CUDA graph has begun or ended: work from before cannot be waited for."""
        # An event from across the capture's border would make the capture, or the replay, fail. See [Note: capture].
        if self.state.note_capture(torch.cuda.is_current_stream_capturing()):
            self.streams.forget()
            self.updater.finish()  # waits for nothing that was forgotten, and frees gradients
            self._begin_version()

    # ---- backward -----------------------------------------------------------------------------------------------

    def begin_unit_backward(self, unit: FsdpUnit) -> None:
        """Unshard the unit for its backward, and launch the reductions of later units. Ranks: all."""
        if not self.state.is_in_backward:
            self._open_backward()
        self.backward.begin(unit)

    def _open_backward(self) -> None:
        if self.state.is_in_backward:
            return
        self._recover()
        _is_transformed()  # within a forward: when that began there was none
        self.backward.open()
        self.follow_requires_grad()  # again: the graph may be older than the latest forward. See [Note: freezing].
        # Autograd keeps ``end`` until the backward ends, in whatever way: if it goes without having been called, backward has failed.
        end = _while_alive(self.end_backward)
        self.state.begin_backward(end, _while_alive(self.fail_backward))
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def open_group(self, group: FsdpParameterGroup) -> None:
        """Note that this backward owes the group's gradients: one of them has arrived, or is about to be written."""
        self._open_backward()
        self.backward.expect(self.registry.owner(group))

    def open_group_late(self, group: FsdpParameterGroup) -> None:
        """As ``open_group``, for a gradient that no output of the group's unit announced.

        Raises:
            RuntimeError: it was, or may have been, computed with other weights than forward's.
        """
        self.open_group(group)
        group.refuse_gradient_of_earlier_weights()
        self.observer.came_late(group)

    def acquire_input(self, group: FsdpParameterGroup) -> None:
        """Let backward write to the group's reduce-scatter input."""
        self.open_group(group)
        self.grad_reducer.acquire_input(group)

    def end_backward(self) -> None:
        """Finish the backward: every gradient is in ``param.grad``, and every unit is resharded. Ranks: all.

        The order of these calls is fixed, and comments say why.
        """
        is_last = self.state.is_last
        # First: what follows may move weights, and may ask whether the step goes on.
        self.state.end_backward()
        upcoming = self.planner.upcoming  # other graphs wait for their backward, and the plan goes on with these
        self.backward.end(staying=frozenset(use.unit for use in upcoming))
        # After all reductions are launched, and before weights are resharded, whose memory then waits for nothing more.
        self._finish_reductions(is_last=is_last)
        if self.registry.read_peers and self.unsharder.has_unused and not upcoming:
            # Before weights are resharded, which drops the events of gathers that compute has not waited for: reductions tell peers
            # only of gathers that compute waited for.
            self.unsharder.end_pass(self.registry.read_peers)
        if self.unsharder.held and is_last:
            # Before the idle ones: what the user unsharded is not idle until its hold has ended.
            self.unsharder.reshard_held()
        self.unsharder.reshard_idle(keeps=not is_last, upcoming=self.registry.groups_of(upcoming))
        # It may raise, so all memory of the step has been given back by now.
        self.observer.backward_ended(is_last=is_last)
        # The last event of the record is the reshard of the last unit. A record may become a plan, which compares ranks.
        self.planner.end_record()
        if is_last:
            # At the very end, since hooks of users may step an optimizer or begin another pass.
            self.grad_reducer.call_hooks()

    def reduce_partial(self) -> None:
        """Reduce gradients that microbatches left unreduced into ``param.grad``. Ranks: all."""
        self.backward.reduce_partial()
        self._finish_reductions(is_last=True)
        self.observer.backward_ended(is_last=True)
        self.grad_reducer.call_hooks()

    def _finish_reductions(self, *, is_last: bool) -> None:
        if is_last:
            # Behind all reductions on the reduce stream, and before compute waits for that: one wait serves both.
            self._missing_gradients.ask()
        self.grad_reducer.finish()
        if is_last:
            # Reads the answer, for which compute has waited by now. Gradients that are None on all ranks are not summed further.
            self._missing_gradients.resolve()
            sum_grads(self.groups, in_use=False)

    # ---- failure ------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        """True within a forward or a backward."""
        return self.state.outermost is not None or self.state.is_in_backward

    def fail_backward(self) -> None:
        """Note that the backward did not reach its end, and show sharded parameters. ``_recover`` does the rest."""
        # Called where the last reference to the backward's callback is dropped, by any thread: so the rest waits for the next pass.
        self.state.fail_backward()
        self.backward.show_sharded()

    def _recover(self) -> None:
        if self.state.has_failed:
            logger.warning(
                "the last backward did not finish: its units are resharded, and gradients that it had not reduced are dropped, with "
                "sums of earlier microbatches that it was adding them to; those that it had reduced are in param.grad: call zero_grad() if you have not"
            )
            self.abandon()

    def abandon(self, *, drops_sums: bool = True) -> None:
        """Drop the pass that was under way: reshard all units, and drop what it left of gradients.

        Args:
            drops_sums: also sums over microbatches that wait, to which a backward that failed may have added a part.
        """
        # The order of units is unknown from here on: forwards that an exception has left are over, and so is the step.
        self.state.abandon()
        # Units that were open or used weights, and the NVTX ranges of this thread.
        self.backward.abandon()
        for unit in self.units:
            unit.abandon()
        for group in self.groups:
            # Who used the weights is over, so that they can be resharded below.
            group.weights.holders.drop_passes()
            if group.trainable:
                # What backward has written of a gradient that is not whole.
                self.grad_reducer.abandon(group)
                if drops_sums:
                    self.grad_reducer.drop_partial(group)
        # Reductions that were launched go on: compute waits for them before their memory is used again.
        self.grad_reducer.finish()
        # After reductions, which may read weights' memory under the poison; modules show sharded parameters again.
        for group in self.groups:
            self.unsharder.reshard_unused(group)
        # Last, since resharding writes into the record: a record of half a step must not become a plan.
        self.planner.abandon()

    # ---- the user's view of a unit ------------------------------------------------------------------------------

    def unshard(self, groups: Sequence[FsdpParameterGroup], *, waits: bool = True) -> None:
        """Unshard groups for the user, as ``FsdpModule.unshard`` says; without ``waits`` begin it. Ranks: all."""
        state = self.state
        if state.outermost is None and state.num_scopes == 0 and not state.is_prepared:
            self._begin_version()
        for group in groups:
            if group.trainable:
                self._watch_gradients(group)  # the user may compute with the weights without calling the module
            weights, storage = group.weights, group.weights.full_storage
            # A hold has no end that the plan knows, so its weights must not lie in a range that the plan gives to others.
            if storage is not None and storage.in_arena and not weights.holders.is_used and state.move_weights():
                self.unsharder.reshard(group)  # an earlier pass may have kept it gathered
                self.unsharder.leave_arena(group)
            self.unsharder.hold(group, waits=waits)

    def wait_for_unshard(self, unit: FsdpUnit) -> None:
        """Finish what ``unshard`` began without ``waits``, unless a pass has ended it since."""
        for group in unit.groups:
            if group.weights.holders.by_user:
                self.unsharder.unshard(group, forward=True)

    def reshard(self, groups: Sequence[FsdpParameterGroup]) -> None:
        """Reshard groups, unless a pass is using their weights."""
        self.unsharder.end_hold(groups)
        for group in groups:
            self.unsharder.reshard_unused(group)


@contextmanager
def hidden_from_user() -> Iterator[None]:
    """Run what the scope does outside of transforms of ``torch.func`` and of selective activation checkpoints.

    Casts and all-gathers write to memory that was made outside of a transform. A selective checkpoint saves results of operations in
    forward and leaves these operations out when it recomputes: of a saved all-gather, weights would never arrive. Other dispatch
    modes (``FakeTensorMode``, counters of FLOPs) see the engine's operations.
    """
    modes = _get_current_dispatch_mode_stack()
    first = next((at for at, mode in enumerate(modes) if isinstance(mode, _SELECTIVE_CHECKPOINTS)), len(modes))
    above = [_pop_mode() for _ in modes[first:]][::-1]
    others = [mode for mode in above if not isinstance(mode, _SELECTIVE_CHECKPOINTS)]
    for mode in others:
        _push_mode(mode)
    try:
        with torch._C._DisableFuncTorch():
            yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in above:
            _push_mode(mode)


def _while_alive(method: Callable[[], None]) -> Callable[..., None]:
    """Return a function that calls the method unless its context is gone, which autograd must not keep alive."""
    weak = weakref.WeakMethod(method)

    def call(*_: object) -> None:
        if (alive := weak()) is not None:
            alive()

    return call


def _is_transformed() -> bool:
    """Return whether a transform of torch.func is under way; refuse those that differentiate backward."""
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is not None and transform.key() == torch._C._functorch.TransformType.Grad:
        raise NotImplementedError(
            "torch.func.grad, vjp and jacrev of a sharded model, or a part of it, are not served: their backward runs on copies, which no "
            "reduction over the ranks can read; use backward() and param.grad"
        )
    return transform is not None
