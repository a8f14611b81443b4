"""What spans the weights of several groups: order, shared memory and optimizer updates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.buffers.weight_codec import SharedScales
from megatron.core.distributed.fsdp.buffers.weight_state import WeightState
from megatron.core.distributed.fsdp.comm.streams import Edge, HostWork, Mark, Role, Streams
from megatron.core.distributed.fsdp.comm.transport import Transport
from megatron.core.distributed.fsdp.config.engine_options import EngineOptions
from megatron.core.distributed.fsdp.layout.plan import NUM_KINDS, SYNC, Recorder
from megatron.core.distributed.fsdp.runtime import nvtx
from megatron.core.distributed.fsdp.runtime.observer import Observer
from megatron.core.distributed.fsdp.runtime.step_state import StepState

logger = logging.getLogger(__name__)


class Unsharder:
    """All-gathers weights of groups on the gather stream, and gives their memory back.

    Attributes:
        recorder: writes down what is gathered and released, while a step is recorded.
        observer: is told of each all-gather, and of those that fail.
        options: the context's settings.
        live: groups whose full weight is complete, or whose all-gather is under way.
        held: groups that the user unsharded; ended by ``end_hold``.
        overlapping: groups that share addresses in the arena, by group number.
    """

    def __init__(
        self, streams: Streams, state: StepState, recorder: Recorder, observer: Observer, options: EngineOptions
    ) -> None:
        self.streams, self.state, self.recorder = streams, state, recorder
        self.observer, self.options = observer, options
        self.live: dict[FsdpParameterGroup, None] = {}
        self.held: dict[FsdpParameterGroup, None] = {}
        self.overlapping: dict[int, set[FsdpParameterGroup]] = {}
        self._updated = streams.mark()  # compute has written main weights
        self._released = streams.mark()  # compute's latest release of a range
        self._now = streams.mark()  # what compute has been given until now
        self._shards_read = streams.mark()
        self._has_warned = False

    def use_options(self, options: EngineOptions) -> None:
        """Follow these settings of the context from now on."""
        self.options = options

    # ---- weight versions ----------------------------------------------------------------------------------------

    def order_after_compute(self) -> None:
        """Make the next all-gather wait for the compute work enqueued so far, such as writes to main weights."""
        self._updated.record(Role.COMPUTE)

    def take_over(self, group: FsdpParameterGroup) -> None:
        """Serve a group that another context may have served: it is synced before its next forward."""
        weights = group.weights
        # Marks of the former context's streams order nothing here.
        weights.use_streams(self.streams)
        weights.freshness.outdate()
        if weights.holders.by_user:
            self.held[group] = None
        if weights.is_unsharded and weights.full_storage is not None:
            self.live[group] = None

    def were_written(self, groups: Sequence[FsdpParameterGroup]) -> bool | torch.Tensor:
        """Return whether the gathered weights of these groups may be older than their main weights, as far as this rank can see.

        Call it on the gather stream, before the next weight version begins, after ``order_after_compute``: the comparison waits for what
        compute was given until then. See [Note: sibling roots].

        Returns:
            True where it is known at once: a group is not gathered, is of an earlier version, or version counters have moved. Otherwise
            a tensor [] on the device: whether values differ, since writes through ``.data`` and by kernels move no counter.

        Ranks: each alone; the caller must ask the others.
        """
        for group in groups:
            freshness = group.weights.freshness
            if group not in self.live or freshness.version != self.state.weight_version or freshness.is_written:
                return True
        self._updated.wait(Edge.WEIGHTS_UPDATED)
        return torch.stack([group.weights.differs() for group in groups]).any()

    # ---- unshard ------------------------------------------------------------------------------------------------

    def prefetch(self, group: FsdpParameterGroup, *, forward: bool) -> None:
        """Begin the all-gather of the group's weights, unless it is under way. Ranks: all of the group's mesh, in one order."""
        weights = group.weights
        is_stale = forward and weights.freshness.version != self.state.weight_version
        if not is_stale and weights.state is not WeightState.SHARDED:
            return
        # May reshard others in its range, and makes the gather stream wait for their release.
        self._make_room(group)
        # First: the debug mode compares ranks here, and reads main weights on the compute stream.
        self.observer.issued(NUM_KINDS * group.index + (SYNC if weights.full_storage is None else forward))
        if self.recorder.is_recording and weights.full_storage is not None:
            self.recorder.begin("weights", group.index)
        if self._updated.is_pending:
            self._updated.wait(Edge.WEIGHTS_UPDATED)
        if weights.updated.is_pending:
            weights.updated.wait(Edge.UNIT_UPDATED)
        nvtx.push(group.ranges.gather)
        with self.streams.on(Role.GATHER):  # no buffer requires gradients: there is nothing to record
            try:
                if is_stale:
                    nvtx.push(group.ranges.sync)
                    try:
                        weights.follow_main(self.state.weight_version)
                    finally:
                        nvtx.pop()
                elif forward:
                    self._follow_own_write(group)
                # Backward gathers what the model weight is now; the fence refuses what autograd saved of another one.
                elif not weights.freshness.is_followed:
                    self._follow_writes(group)
                weights.gather()
            except RuntimeError as error:
                what = f"all-gather of the weights of {group} ({'forward' if forward else 'backward'})"
                raise self.observer.failed(what, group.group_mesh.axes, error) from error
            finally:
                nvtx.pop()
        self.live[group] = None

    def _follow_own_write(self, group: FsdpParameterGroup) -> None:
        """Cast again what this rank has written since the cast of this version, if other ranks need not know.

        Raises:
            RuntimeError: other ranks read the weights where they rest.
        """
        weights = group.weights
        if weights.syncs_jointly or not weights.freshness.is_written:
            return
        if any(axis.reads_peers for axis in group.group_mesh.axes):
            raise RuntimeError(
                f"weights of {group} must not be written between the forwards of a step: other ranks read them where they rest; "
                "write before the first microbatch (is_first=True)"
            )
        weights.follow_late_write(self.state.weight_version, gathers=True)

    def _follow_writes(self, group: FsdpParameterGroup) -> None:
        """Let autograd refuse what it saved of weights that have been written since."""
        group.weights.freshness.follow(self.state.weight_version)
        if torch._C._current_graph_task_id() != -1 and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "weights of %s were written between forward and this backward: if it needs those that forward used, PyTorch "
                "raises that they were 'modified by an inplace operation'; write to weights (optimizer.step(), loads) after "
                "backward, or run forward again",
                group,
            )

    def follow_late_writes(self, groups: Sequence[FsdpParameterGroup]) -> None:
        """See to writes to main weights that no all-gather of this version brings along: a later microbatch begins.

        Raises:
            RuntimeError: the model weights could follow only if all ranks did so together, and they were not told.
        """
        for group in self.written_after_gather():
            if group.weights.freshness.version == self.state.weight_version:
                raise RuntimeError(
                    f"weights of {group} must not be written within a microbatch after they were gathered for a later forward, "
                    "which would read the old values: all ranks would have to gather them again together; write before "
                    "the step's first microbatch (is_first=True), or run these forwards outside of microbatch scopes"
                )
        for group in groups:
            weights = group.weights
            if weights.syncs_at_gather or weights.freshness.version != self.state.weight_version:
                continue
            if not weights.freshness.is_written:
                continue
            if weights.syncs_jointly:
                raise RuntimeError(
                    f"weights of {group} must not be written between the microbatches of a step where ranks hold parts of them and "
                    "compute with all: the other ranks would not see it; write before the step's first microbatch, or pass "
                    "is_first=True to the next one, which drops what earlier ones summed up"
                )
            weights.follow_late_write(self.state.weight_version, gathers=False)

    def written_after_gather(self) -> Iterator[FsdpParameterGroup]:
        """Find gathered groups whose main weights this rank has written since their cast, but for those that the user unsharded."""
        for group in self.live:
            if group.weights.freshness.is_written and not group.weights.holders.by_user:
                yield group

    def unshard(self, group: FsdpParameterGroup, *, forward: bool) -> None:
        """Let compute read the group's full weights, and put them into its modules. Ranks: as ``prefetch``."""
        weights = group.weights
        if weights.state is WeightState.SHARDED or (forward and weights.freshness.version != self.state.weight_version):
            self.prefetch(group, forward=forward)
        if weights.full_storage is None:
            self.live.pop(group, None)  # synced, and waited for: there is nothing to reshard
            if not weights.freshness.is_followed:
                self._follow_writes(group)
        # Makes compute wait for the gather, and moves the fence to this content. See [Note: version fence].
        weights.use(group.param_slots)
        if group.trainable and group.grads.read_by_update:
            group.grads.release_from_update()  # the all-gather came after it

    def wait_for_gathers(self) -> None:
        """Make compute wait for every all-gather that is under way."""
        for group in self.live:
            group.weights.wait(Edge.WEIGHTS_GATHERED)

    @property
    def has_unused(self) -> bool:
        """True if something was prefetched that compute has not waited for; the same on all ranks."""
        return any(group.weights.state is WeightState.GATHERING for group in self.live)

    # ---- reshard ------------------------------------------------------------------------------------------------

    def reshard_unused(self, group: FsdpParameterGroup) -> None:
        """Reshard the group unless a pass or the user needs its full weights."""
        if not group.weights.holders.is_used:
            self.reshard(group)

    def show_sharded(self, group: FsdpParameterGroup) -> None:
        """Put the sharded parameters back, unless the user unsharded them; a backward needs the full weights."""
        if not group.weights.holders.by_user:
            group.param_slots.to_sharded()

    def reshard(self, group: FsdpParameterGroup) -> None:
        """Put the sharded parameters back and release the full weights, which nobody needs."""
        group.param_slots.to_sharded()
        weights = group.weights
        # Prefetched and never used: the gather may still write to memory that is about to be given back.
        if weights.gathered.is_pending:
            weights.wait(Edge.GATHER_BEFORE_FREE)
        storage = weights.full_storage
        if storage is None or weights.state is WeightState.SHARDED:
            self.live.pop(group, None)
            weights.end_use()
            return
        weights.release(poisons=self.options.poisons)
        self._released.record(Role.COMPUTE)
        del self.live[group]
        if self.recorder.is_recording:
            self.recorder.end("weights", group.index)

    def reshard_idle(self, *, keeps: bool = False, upcoming: Collection[FsdpParameterGroup] = ()) -> None:
        """Reshard every group that nobody uses, except ``upcoming`` and (``keeps``) what the plan keeps unsharded."""
        for group in list(self.live):  # a copy: resharding removes entries
            if group not in upcoming and not (keeps and group.weights.holders.by_plan):
                self.reshard_unused(group)

    # ---- weights that the user unsharded ------------------------------------------------------------------------

    def hold(self, group: FsdpParameterGroup, *, waits: bool = True) -> None:
        """Unshard the group for the user, or begin to. [Note: weights that the user unsharded]. Ranks: as ``prefetch``."""
        group.weights.holders.hold_for_user(True)
        self.held[group] = None
        (self.unshard if waits else self.prefetch)(group, forward=True)

    def end_hold(self, groups: Iterable[FsdpParameterGroup]) -> None:
        """Let go of what the user unsharded of these groups; the caller uses them, or reshards them."""
        for group in groups:
            group.weights.holders.hold_for_user(False)
            self.held.pop(group, None)

    def reshard_held(self) -> None:
        """Reshard all that the user unsharded."""
        for group in list(self.held):
            self.end_hold((group,))
            self.reshard_unused(group)

    def end_pass(self, transports: Sequence[Transport]) -> None:
        """Let compute write to shards again: all ranks have read what they gathered until now. Ranks: all."""
        if not transports:
            return
        with self.streams.on(Role.GATHER):
            for transport in transports:
                transport.end_pass()
        self._shards_read.record(Role.GATHER)
        self._shards_read.wait(Edge.SHARDS_READ)

    # ---- memory -------------------------------------------------------------------------------------------------

    def take_ranges(self, overlapping: dict[int, set[FsdpParameterGroup]]) -> None:
        """Use ranges of an arena, shared as ``overlapping`` says. Nothing is gathered into them."""
        self.overlapping = overlapping

    def ranges_moved(self) -> None:
        """Make all-gathers wait for what compute has done to the arena until now: it is zeroed when made."""
        self._released.record(Role.COMPUTE)

    def _make_room(self, group: FsdpParameterGroup) -> None:
        storage = group.weights.full_storage
        if storage is None:
            return
        if storage.in_arena and group.weights.state is WeightState.SHARDED:
            sharing = self.overlapping[group.index]
            if not sharing.isdisjoint(self.live):
                self._make_range_free(group, sharing)
            if storage.in_arena:
                # Compute runs in order, so its latest release comes after that of whatever was in this range.
                if self._released.is_pending:
                    self._released.wait(Edge.RANGE_RELEASED)
                return
        # The allocator may hand out memory that compute has freed and still reads, so the gather waits for all of compute's work.
        if not storage.in_arena:
            storage.allocate()
        self._now.record(Role.COMPUTE)
        self._now.wait(Edge.RANGE_RELEASED)

    def _make_range_free(self, group: FsdpParameterGroup, sharing: set[FsdpParameterGroup]) -> None:
        for other in [live for live in self.live if live in sharing]:
            self.reshard_unused(other)
            if other.weights.is_unsharded and not self._evict(group, other):
                break

    def _evict(self, group: FsdpParameterGroup, other: FsdpParameterGroup) -> bool:
        """Reshard ``other``, which is in the group's range of the arena, or give the group memory of its own (False).

        Two units need one range at the same time where they run out of plan. While a graph refers to their addresses
        neither can move; but a unit that backward has only begun, and will come back to, can be gathered again then.
        """
        if self.state.move_weights():
            self.leave_arena(group)
            return False
        if other.weights.holders.forwards or other.weights.holders.by_user:
            raise RuntimeError(
                f"the weights of {group.name_of(0)} and {other.name_of(0)} share addresses, because they were "
                "never needed together, and now are, while a graph still refers to them; finish its backward (or delete "
                "its loss) before using the units in this order"
            )
        self.reshard(other)
        return True

    def leave_arena(self, group: FsdpParameterGroup) -> None:
        """Give the group's full weight memory of its own. ``StepState.move_weights`` must have said so."""
        group.weights.move(None)
        # Others in its former range need not wait for it any more, nor evict it.
        for overlap in self.overlapping.values():
            overlap.discard(group)
        self.overlapping.pop(group.index, None)


Update = Callable[[FsdpParameterGroup], HostWork | None]
"""Updates a group, on the current stream, or by a thread of the host, whose work it returns."""


class Updater:
    """Runs updates of main weights on the compute stream or concurrently with it. [Note: updates during the forward]."""

    def __init__(self, streams: Streams, unsharder: Unsharder) -> None:
        self.streams, self.unsharder = streams, unsharder
        self._beside: list[FsdpParameterGroup] = []  # groups whose updates compute has not waited for as a whole
        self._awaited: list[Mark] = []  # the last update's on the stream, and those of all that threads do
        self._grads_final = streams.mark()
        self._scales: dict[type[SharedScales], SharedScales] = {}  # of codecs whose weights share some

    def add(self, group: FsdpParameterGroup) -> None:
        """Serve a group whose unit has joined the context."""
        kind = group.weights.codec.scales_class
        if kind is not None:
            if kind not in self._scales:
                self._scales[kind] = kind(self.unsharder)
            self._scales[kind].add(group.weights)

    def clear(self) -> None:
        """Finish all updates, and serve no group any more."""
        self.finish()
        for scales in self._scales.values():
            scales.clear()

    def begin_replay(self) -> None:
        """Restore the shared scales that a captured step expects at its start: before its capture, and before each replay.

        Without it a step may be captured too; it then does in each replay what cannot be known to have been done.
        """
        for scales in self._scales.values():
            scales.begin_replay()

    def run(self, groups: Sequence[FsdpParameterGroup], update: Update, *, overlaps: bool) -> None:
        """Call ``update`` for each group, in this order; concurrently with compute if ``overlaps``."""
        self.finish()
        if not overlaps:
            self._begin()
            for work in [_run(group, update) for group in groups]:
                if work is not None:
                    self.streams.wait(Edge.UPDATES_DONE, work.result())
            return
        # Norms and clipping run on compute, and write what updates read.
        self._grads_final.record(Role.COMPUTE)
        self._grads_final.wait(Edge.GRADS_FINAL)
        last: list[Mark] = []
        with self.streams.on(Role.UPDATE):
            self._begin()
            for group in groups:
                work, mark = _run(group, update), group.weights.updated
                if work is None:
                    mark.record(Role.UPDATE)
                    last = [mark]
                else:
                    mark.expect(work)
                    self._awaited.append(mark)
                group.grads.keep_for_update()
        self._beside, self._awaited = list(groups), self._awaited + last

    def _begin(self) -> None:
        for scales in self._scales.values():
            scales.prepare_update()

    def finish(self) -> None:
        """Make compute wait for all updates; afterwards it may read main weights and free main gradients."""
        if not self._beside:
            return
        for mark in self._awaited:  # whether or not a gather has waited: compute is another consumer
            self.streams.wait(Edge.UPDATES_DONE, mark.resolve())
        self.unsharder.order_after_compute()  # from now on all-gathers only need to wait for compute
        for group in self._beside:
            group.weights.updated.forget()
            if group.grads.read_by_update:
                group.grads.release_from_update()
        self._beside, self._awaited = [], []


def _run(group: FsdpParameterGroup, update: Update) -> HostWork | None:
    nvtx.push(group.ranges.update)
    work = update(group)
    nvtx.pop()
    group.weights.freshness.note_update()
    return work
