"""Full weights on demand and ahead of it: who holds them, in which memory, and what a gather must wait for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.comm import Transport, unfinished
from megatron.core.distributed.fsdp.layout.plan import Recorder
from megatron.core.distributed.fsdp.runtime import nvtx
from megatron.core.distributed.fsdp.runtime.streams import Edge, Role, Streams


class Unsharder:
    """Gathers and releases the weights of groups on the gather stream.

    ``weight_version`` counts the steps' weights: a group is synchronised from its main weights once per weight_version.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.weight_version = 0
        self.recorder: Recorder | None = None
        self.poisons = False
        self.live: dict[FsdpParameterGroup, None] = {}  # groups whose weights are gathered, or on their way
        self.num_gathers = 0
        self.overlapping: dict[int, set[FsdpParameterGroup]] = {}  # groups that share addresses in the arena
        self.can_move: Callable[[], bool] = lambda: True  # no graph will look for weights where they are
        self._updated: Any = None  # compute has written main weights; None once gathers have waited for that
        self._updated_event: Any = None
        self._released: Any = None  # compute's latest release of a range
        self._now: Any = None  # for waits on what compute has been given until now

    def begin_weight_version(self) -> None:
        """Afterwards main weights may have changed: each group is synchronised before its next forward."""
        self.weight_version += 1
        self.note_update()

    def note_update(self) -> None:
        """Afterwards gathers see what compute has been given until now."""
        self._updated = self._updated_event = self.streams.record(Role.COMPUTE, self._updated_event)

    def forget_events(self) -> None:
        """Afterwards no gather waits for what was issued before: a capture, or its end, makes that impossible.

        Whoever begins or ends a capture sees to it that all streams have joined the one that is captured.
        """
        self._updated = self._updated_event = self._released = self._now = None

    def prefetch(self, group: FsdpParameterGroup, *, forward: bool) -> None:
        """Afterwards the group's weights are on their way. Ranks: all of the group's mesh, in the same order."""
        is_stale = forward and group.synced_weight_version != self.weight_version
        if group.is_gathered and not is_stale:
            return
        if not group.needs_gather and not is_stale:
            return
        self._make_room(group)
        if self._updated is not None:
            self.streams.wait(Edge.WEIGHTS_UPDATED, self._updated)
            self._updated = None
        if group.updated is not None:
            self.streams.wait(Edge.UNIT_UPDATED, group.updated)
            group.updated = None
        nvtx.push(group.gather_range)
        with self.streams.on(Role.GATHER):  # no buffer requires gradients: there is nothing to record
            try:
                if forward:
                    self._sync(group, is_stale)
                if group.needs_gather:
                    group.gather()
                    self.num_gathers += 1
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                what = f"all-gather of the weights of {group} ({'forward' if forward else 'backward'})"
                raise unfinished(what, group.group_mesh.axes, error) from error
            finally:
                nvtx.pop()
        group.gathered = group.gathered_event = self.streams.record(Role.GATHER, group.gathered_event)
        group.is_gathered = True
        self.live[group] = None
        if group.needs_gather and self.recorder is not None:
            self.recorder.gathered(group.index)

    def _sync(self, group: FsdpParameterGroup, is_stale: bool) -> None:
        # What every rank must take part in goes by the weight_version alone, which is the same on all of them.
        version = group.main_write_count
        if is_stale:
            nvtx.push(group.sync_range)
            try:
                group.sync(casts=version != group.updated_write_count)
                group.publish()
            finally:
                nvtx.pop()
        elif group.syncs_alone and version != group.synced_write_count:
            group.sync_within_step()
        else:
            return
        group.synced_weight_version, group.synced_write_count = self.weight_version, version

    def unshard(self, group: FsdpParameterGroup, *, forward: bool) -> None:
        """Afterwards compute may read the group's weights, and modules hold them. Ranks: as ``prefetch``."""
        self.prefetch(group, forward=forward)
        if group.gathered is not None:
            self.streams.wait(Edge.WEIGHTS_GATHERED, group.gathered)
            group.gathered = None
        group.end_update()  # the gather came after it
        if group.needs_gather:
            group.set_fence(True)
        else:
            self.live.pop(group, None)  # synchronised, and waited for: there is nothing to release
        group.param_slots.to_unsharded()

    def wait_for_gathers(self) -> None:
        """Afterwards work on the compute stream sees whatever was gathered ahead."""
        for group in self.live:
            if group.gathered is not None:
                self.streams.wait(Edge.WEIGHTS_GATHERED, group.gathered)
                group.gathered = None

    def reshard(self, group: FsdpParameterGroup) -> None:
        """Afterwards the group's full weights may be overwritten, unless somebody still uses them."""
        if not (group.num_users or group.num_claims or group.held_by_user):
            self._reshard_now(group)

    @property
    def has_unused(self) -> bool:
        """True if something was gathered ahead that compute has not waited for; the same on all ranks."""
        return any(group.gathered is not None for group in self.live)

    def keep_unsharded(self, group: FsdpParameterGroup) -> None:
        """Afterwards modules hold the sharded parameters; the full weights stay for the next pass of this step."""
        if not (group.num_users or group.num_claims or group.held_by_user):
            group.param_slots.to_sharded()

    def _reshard_now(self, group: FsdpParameterGroup) -> None:
        group.param_slots.to_sharded()
        if group.gathered is not None:  # prefetched and never used
            self.streams.wait(Edge.GATHER_BEFORE_FREE, group.gathered)
            group.gathered = None
        storage = group.weight_storage
        if storage is None or not group.is_gathered:
            self.live.pop(group, None)
            return
        group.set_fence(False)
        if self.poisons:
            group.full_weight.local.data.fill_(float("nan"))
        storage.free()
        self._released = self.streams.record(Role.COMPUTE, self._released)
        group.is_gathered = False
        del self.live[group]
        if self.recorder is not None:
            self.recorder.released(group.index)

    def reshard_idle(self, *, keeps: bool = False, upcoming: Collection[FsdpParameterGroup] = ()) -> None:
        """Afterwards nothing is gathered that nobody uses, except ``upcoming`` and what the plan keeps (``keeps``)."""
        for group in list(self.live):
            if group not in upcoming and not (keeps and group.stays_unsharded):
                self.reshard(group)

    def ranges_moved(self) -> None:
        """Afterwards gathers wait for what compute has done to the ranges until now: arenas are zeroed when made."""
        self._released = self.streams.record(Role.COMPUTE, self._released)

    def end_pass(self, transports: Sequence[Transport]) -> None:
        """Afterwards compute may write to shards: all ranks have read what they gathered until now. Ranks: all."""
        if not transports:
            return
        with self.streams.on(Role.GATHER):
            for transport in transports:
                transport.end_pass()
        self.streams.wait(Edge.SHARDS_READ, self.streams.record(Role.GATHER))

    def _make_room(self, group: FsdpParameterGroup) -> None:
        storage = group.weight_storage
        if storage is None:
            return
        if storage.in_arena and not group.is_gathered:
            sharing = self.overlapping[group.index]
            for other in [live for live in self.live if live in sharing]:
                self.reshard(other)
                if other.is_gathered and not self._evict(group, other):
                    break
        if storage.in_arena:
            # Compute runs in order, so its latest release comes after that of whatever was in this range.
            if not group.is_gathered:
                self.streams.wait(Edge.RANGE_RELEASED, self._released)
                return
        else:
            storage.allocate()
        self._now = self.streams.record(Role.COMPUTE, self._now)
        self.streams.wait(Edge.RANGE_RELEASED, self._now)

    def _evict(self, group: FsdpParameterGroup, other: FsdpParameterGroup) -> bool:
        """Afterwards ``other`` is out of the range that they share (True), or else the group has memory of its own.

        Units come to need a range together where they run out of the plan. While a graph refers to their addresses
        none can move; but a unit that backward has only begun, and will come back to, is gathered again then.
        """
        if self.can_move():
            self.leave_arena(group)
            return False
        if other.num_users or other.held_by_user:
            raise RuntimeError(
                f"the weights of {group.name_of(0)} and {other.name_of(0)} share addresses, because they were "
                "never needed together, and now are, while a graph still refers to them; finish its backward (or delete "
                "its loss) before using the units in this order"
            )
        self._reshard_now(other)
        return True

    def leave_arena(self, group: FsdpParameterGroup) -> None:
        """Afterwards the group's weights are gathered into memory of their own. ``can_move()`` must be true."""
        group.move_weights(None)
        for overlap in self.overlapping.values():
            overlap.discard(group)
        self.overlapping.pop(group.index, None)
