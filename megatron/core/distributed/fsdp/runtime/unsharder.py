"""Unshards and reshards groups: who holds full weights, in which memory, and what an all-gather must wait for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.buffers.storage import IdleArena
from megatron.core.distributed.fsdp.comm.streams import Edge, Role, Streams
from megatron.core.distributed.fsdp.comm.transport import Transport, raise_foreign
from megatron.core.distributed.fsdp.layout.plan import NUM_KINDS, Recorder
from megatron.core.distributed.fsdp.runtime import nvtx
from megatron.core.distributed.fsdp.runtime.observer import Observer

logger = logging.getLogger(__name__)


class Unsharder:
    """All-gathers weights of groups on the gather stream, and gives their memory back.

    Attributes:
        weight_version: counts the steps' weights: a group is synced from its main weight once per version.
        recorder: writes down what is gathered and released, while a step is recorded.
        observer: is told of each all-gather, and of those that fail.
        poisons: fill released memory with NaN.
        live: groups whose full weight is complete, or whose all-gather is under way.
        held: groups that the user unsharded; ended by ``end_hold``.
        overlapping: groups that share addresses in the arena, by group number.
        can_move: True if no graph will look for weights where they are.
        idle_arenas: arenas whose memory is given back while nothing in them is unsharded, after ``last_users``.
        last_users: groups after which a pass gathers nothing more into an arena, as far as the plan knows.
    """

    def __init__(self, streams: Streams, recorder: Recorder, observer: Observer) -> None:
        self.streams, self.recorder, self.observer = streams, recorder, observer
        self.weight_version = 0
        self.poisons = False
        self.live: dict[FsdpParameterGroup, None] = {}
        self.held: dict[FsdpParameterGroup, None] = {}
        self.overlapping: dict[int, set[FsdpParameterGroup]] = {}
        self.can_move: Callable[[], bool] = lambda: True
        self.idle_arenas: list[IdleArena] = []
        self.last_users: set[FsdpParameterGroup] = set()
        self._updated = streams.mark()  # compute has written main weights
        self._released = streams.mark()  # compute's latest release of a range
        self._now = streams.mark()  # what compute has been given until now
        self._shards_read = streams.mark()
        self._has_warned = False

    # ---- weight versions ----------------------------------------------------------------------------------------

    def begin_weight_version(self) -> None:
        """Note that main weights may have changed: each group is synced before its next forward."""
        self.weight_version += 1
        self.order_after_compute()

    def order_after_compute(self) -> None:
        """Make the next all-gather wait for the compute work enqueued so far, such as writes to main weights."""
        self._updated.record(Role.COMPUTE)

    def take_over(self, group: FsdpParameterGroup) -> None:
        """Serve a group that another context may have served: it is synced before its next forward."""
        weights = group.weights
        weights.use_streams(self.streams)
        weights.synced_weight_version = -1
        if weights.held_by_user:
            self.held[group] = None
        if weights.is_unsharded and weights.needs_gather:
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
            weights = group.weights
            if group not in self.live or weights.synced_weight_version != self.weight_version:
                return True
            if weights.write_count != weights.synced_write_count:
                return True
        self._updated.wait(Edge.WEIGHTS_UPDATED)
        return torch.stack([group.weights.differs() for group in groups]).any()

    def take_as_current(self, groups: Sequence[FsdpParameterGroup]) -> None:
        """Assign gathered weights to the current weight version, so that they are not gathered again.

        No rank may have written them since their all-gather: ``were_written`` is false on all.
        """
        for group in groups:
            group.weights.synced_weight_version = self.weight_version

    # ---- unshard ------------------------------------------------------------------------------------------------

    def prefetch(self, group: FsdpParameterGroup, *, forward: bool) -> None:
        """Begin the all-gather of the group's weights, unless it is under way. Ranks: all of the group's mesh, in one order."""
        weights = group.weights
        is_stale = forward and weights.synced_weight_version != self.weight_version
        if not is_stale and (weights.is_unsharded or not weights.needs_gather):
            return
        self._make_room(group)
        if self.recorder.is_on:
            self.recorder.issue("forward's all-gather" if forward else "backward's all-gather", group.index)
            if weights.needs_gather:
                self.recorder.begin("weights", group.index)
        if self._updated.is_pending:
            self._updated.wait(Edge.WEIGHTS_UPDATED)
        if weights.updated.is_pending:
            weights.updated.wait(Edge.UNIT_UPDATED)
        nvtx.push(group.ranges.gather)
        with self.streams.on(Role.GATHER):  # no buffer requires gradients: there is nothing to record
            try:
                if forward:
                    self._sync(group, is_stale)
                elif weights.fence != weights.content:
                    self._follow_writes(group)
                if weights.needs_gather:
                    self.observer.issued(NUM_KINDS * group.index + forward)
                    weights.all_gather()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise_foreign(error)
                what = f"all-gather of the weights of {group} ({'forward' if forward else 'backward'})"
                raise self.observer.failed(what, group.group_mesh.axes, error) from error
            finally:
                nvtx.pop()
        weights.gathered.record(Role.GATHER)
        weights.is_unsharded = True
        self.live[group] = None

    def _sync(self, group: FsdpParameterGroup, is_stale: bool) -> None:
        # What every rank must take part in depends on the weight version alone, which is the same on all of them.
        weights = group.weights
        write_count = weights.write_count
        if is_stale:
            nvtx.push(group.ranges.sync)
            try:
                if weights.main is not weights.model:
                    weights.sync(casts=write_count != weights.updated_write_count)
                for publish in weights.publishes:
                    publish()
            finally:
                nvtx.pop()
        elif weights.syncs_alone and write_count != weights.synced_write_count:
            if weights.reads_peers:
                raise RuntimeError(
                    f"weights of {group} must not be written between the forwards of a step: other ranks read them where they rest; "
                    "write before the first microbatch (is_first=True)"
                )
            weights.sync()
        else:
            return
        weights.synced_weight_version, weights.synced_write_count = self.weight_version, write_count
        if (content := write_count + weights.num_updates) != weights.fence:
            weights.fence, weights.written_version = content, self.weight_version

    def _follow_writes(self, group: FsdpParameterGroup) -> None:
        """Let autograd refuse what it saved of weights that have been written since."""
        group.weights.fence, group.weights.written_version = group.weights.content, self.weight_version
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
        for group in self.live:
            weights = group.weights
            is_of_version = weights.synced_weight_version == self.weight_version and not weights.held_by_user
            if is_of_version and weights.write_count != weights.synced_write_count:
                raise RuntimeError(
                    f"weights of {group} must not be written within a microbatch after they were gathered for a later forward, "
                    "which would read the old values: all ranks would have to gather them again together; write before "
                    "the step's first microbatch (is_first=True), or run these forwards outside of microbatch scopes"
                )
        for group in groups:
            weights = group.weights
            if (
                weights.main is weights.model
                or weights.syncs_alone
                or weights.synced_weight_version != self.weight_version
            ):
                continue
            write_count = weights.write_count
            if write_count == weights.synced_write_count:
                continue
            if weights.syncs_jointly:
                raise RuntimeError(
                    f"weights of {group} must not be written between the microbatches of a step where ranks hold parts of them and "
                    "compute with all: the other ranks would not see it; write before the step's first microbatch, or pass "
                    "is_first=True to the next one, which drops what earlier ones summed up"
                )
            weights.sync()
            weights.synced_write_count = write_count

    def unshard(self, group: FsdpParameterGroup, *, forward: bool) -> None:
        """Let compute read the group's full weights, and put them into its modules. Ranks: as ``prefetch``."""
        weights = group.weights
        if not weights.is_unsharded or (forward and weights.synced_weight_version != self.weight_version):
            self.prefetch(group, forward=forward)
        if weights.gathered.is_pending:
            weights.gathered.wait(Edge.WEIGHTS_GATHERED)
        if group.trainable and group.grads.read_by_update:
            group.grads.end_update()  # the all-gather came after it
        if not weights.needs_gather:
            self.live.pop(group, None)  # synced, and waited for: there is nothing to reshard
            if weights.fence != weights.content:
                self._follow_writes(group)
        weights.set_fence(True)
        group.param_slots.to_unsharded()

    def wait_for_gathers(self) -> None:
        """Make compute wait for every all-gather that is under way."""
        for group in self.live:
            group.weights.gathered.wait(Edge.WEIGHTS_GATHERED)

    @property
    def has_unused(self) -> bool:
        """True if something was prefetched that compute has not waited for; the same on all ranks."""
        return any(group.weights.gathered.is_pending for group in self.live)

    # ---- reshard ------------------------------------------------------------------------------------------------

    def reshard(self, group: FsdpParameterGroup) -> None:
        """Put the sharded parameters back and let go of the full weights, unless somebody still uses them."""
        weights = group.weights
        if not (weights.num_forwards or weights.num_backwards or weights.held_by_user):
            self._reshard_now(group)

    def keep_unsharded(self, group: FsdpParameterGroup) -> None:
        """Put the sharded parameters back, but keep the full weights for the next pass of this step."""
        weights = group.weights
        if not (weights.num_forwards or weights.num_backwards or weights.held_by_user):
            group.param_slots.to_sharded()

    def show_sharded(self, group: FsdpParameterGroup) -> None:
        """Put the sharded parameters back, unless the user unsharded them; a backward needs the full weights."""
        if not group.weights.held_by_user:
            group.param_slots.to_sharded()

    def _reshard_now(self, group: FsdpParameterGroup) -> None:
        group.param_slots.to_sharded()
        weights = group.weights
        if weights.gathered.is_pending:  # prefetched and never used
            weights.gathered.wait(Edge.GATHER_BEFORE_FREE)
        storage = weights.full_storage
        if storage is None or not weights.is_unsharded:
            self.live.pop(group, None)
            weights.let_go()
            return
        weights.set_fence(False)
        if self.poisons:
            weights.poison()
        if not storage.in_arena:
            storage.free()
        self._released.record(Role.COMPUTE)
        weights.is_unsharded = False
        del self.live[group]
        if storage.idle_arena is not None:
            storage.idle_arena.users.discard(group)
            if group in self.last_users or not self.live:
                self._give_back_arenas()
        if self.recorder.is_on:
            self.recorder.end("weights", group.index)

    def reshard_idle(self, *, keeps: bool = False, upcoming: Collection[FsdpParameterGroup] = ()) -> None:
        """Reshard every group that nobody uses, except ``upcoming`` and (``keeps``) what the plan keeps unsharded."""
        for group in list(self.live):
            if group not in upcoming and not (keeps and group.weights.stays_unsharded):
                self.reshard(group)

    # ---- weights that the user unsharded ------------------------------------------------------------------------

    def hold(self, group: FsdpParameterGroup, *, waits: bool = True) -> None:
        """Unshard the group for the user, or begin to. [Note: weights that the user unsharded] in DESIGN.md. Ranks: as ``prefetch``."""
        group.weights.held_by_user = True
        self.held[group] = None
        (self.unshard if waits else self.prefetch)(group, forward=True)

    def end_hold(self, groups: Iterable[FsdpParameterGroup]) -> None:
        """Let go of what the user unsharded of these groups; the caller uses them, or reshards them."""
        for group in groups:
            group.weights.held_by_user = False
            self.held.pop(group, None)

    def reshard_held(self) -> None:
        """Reshard all that the user unsharded."""
        for group in list(self.held):
            self.end_hold((group,))
            self.reshard(group)

    def was_held_written(self) -> bool:
        """Return whether something that the user unsharded was written to since, on this rank."""
        return any(group.weights.write_count != group.weights.synced_write_count for group in self.held)

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

    def ranges_moved(self) -> None:
        """Make all-gathers wait for what compute has done to the arena until now: it is zeroed when made."""
        self._released.record(Role.COMPUTE)

    def _give_back_arenas(self) -> None:
        """Free the memory of arenas in which nothing lies; compute has waited for every gather into them.

        Not as soon as nothing lies there: the next unit's weights would take it again.
        """
        for arena in self.idle_arenas:
            arena.free_if_unused()

    def keep_arenas(self) -> None:
        """Let arenas stay from now on, until the plan is left."""
        for arena in self.idle_arenas:
            self._allocate(arena)
        self.drop_arenas()

    def _allocate(self, arena: IdleArena) -> None:
        if not arena.allocated:
            arena.allocate()
            self.ranges_moved()

    def drop_arenas(self) -> None:
        """Forget which arenas may be given back; what was given back is not allocated again."""
        self.idle_arenas, self.last_users = [], set()

    def _make_room(self, group: FsdpParameterGroup) -> None:
        storage = group.weights.full_storage
        if storage is None:
            return
        if storage.in_arena and not group.weights.is_unsharded:
            sharing = self.overlapping[group.index]
            if not sharing.isdisjoint(self.live):
                self._make_range_free(group, sharing)
            if storage.in_arena:
                if storage.idle_arena is not None:
                    self._allocate(storage.idle_arena)
                    storage.idle_arena.users.add(group)
                # Compute runs in order, so its latest release comes after that of whatever was in this range.
                if self._released.is_pending:
                    self._released.wait(Edge.RANGE_RELEASED)
                return
        if not storage.in_arena:
            storage.allocate()
        self._now.record(Role.COMPUTE)
        self._now.wait(Edge.RANGE_RELEASED)

    def _make_range_free(self, group: FsdpParameterGroup, sharing: set[FsdpParameterGroup]) -> None:
        for other in [live for live in self.live if live in sharing]:
            self.reshard(other)
            if other.weights.is_unsharded and not self._evict(group, other):
                break

    def _evict(self, group: FsdpParameterGroup, other: FsdpParameterGroup) -> bool:
        """Reshard ``other``, which is in the group's range of the arena, or give the group memory of its own (False).

        Two units need one range at the same time where they run out of plan. While a graph refers to their addresses
        neither can move; but a unit that backward has only begun, and will come back to, can be gathered again then.
        """
        if self.can_move():
            self.leave_arena(group)
            return False
        if other.weights.num_forwards or other.weights.held_by_user:
            raise RuntimeError(
                f"the weights of {group.name_of(0)} and {other.name_of(0)} share addresses, because they were "
                "never needed together, and now are, while a graph still refers to them; finish its backward (or delete "
                "its loss) before using the units in this order"
            )
        self._reshard_now(other)
        return True

    def leave_arena(self, group: FsdpParameterGroup) -> None:
        """Give the group's full weight memory of its own. ``can_move()`` must be true."""
        group.weights.move(None)
        for overlap in self.overlapping.values():
            overlap.discard(group)
        self.overlapping.pop(group.index, None)
