"""Gradients from backward's first write to the optimizer: staged, reduced on their own stream, accumulated."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.comm import unfinished
from megatron.core.distributed.fsdp.layout.plan import Recorder
from megatron.core.distributed.fsdp.runtime import nvtx
from megatron.core.distributed.fsdp.runtime.streams import Edge, Role, Streams


class GradReducer:
    """Reduces the gradients of groups on the reduce stream."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.recorder: Recorder | None = None
        self.poisons = False
        self.overlaps = True
        self.num_reductions = 0
        self.overlapping: dict[int, set[FsdpParameterGroup]] = {}  # groups that share addresses in the arena
        self._holding: dict[FsdpParameterGroup, None] = {}  # groups whose gradients are being staged
        self._last: Any = None
        self._written: Any = None
        self._finished: list[FsdpParameterGroup] = []  # reduced in this backward, in order
        self._reading: list[FsdpParameterGroup] = []  # groups with memory of their own that a reduction still reads

    def stage(self, group: FsdpParameterGroup) -> None:
        """Afterwards backward may write the group's gradients to its staging buffer."""
        if group.staging_held:
            return
        self._free_read(keep=1)
        if group in self._reading:
            self._free(group)
        elif group.reduced is not None:  # it was reduced in this backward already
            self.streams.wait(Edge.STAGING_REDUCED, group.reduced)
        storage = group.staging_storage
        if storage.in_arena:
            self._make_room(group)
        else:
            storage.allocate()
        group.staging_held = True
        self._holding[group] = None
        if self.recorder is not None:
            self.recorder.staged(group.index)

    def _make_room(self, group: FsdpParameterGroup) -> None:
        if self._occupants(group):
            group.set_staging_aside(copies=False)  # the range is taken, out of plan
            return
        self._wait_for_readers(group)

    def _occupants(self, group: FsdpParameterGroup) -> list[FsdpParameterGroup]:
        """Groups whose gradients are being staged in the group's range."""
        sharing = self.overlapping[group.index]
        return [other for other in self._holding if other in sharing and not other.staging_is_aside]

    def _wait_for_readers(self, group: FsdpParameterGroup) -> None:
        """Afterwards compute may write to the group's range of the arena."""
        # Reductions run in order, so the latest one that read the range is the one to wait for.
        readers = self.overlapping[group.index]
        latest = next((earlier for earlier in reversed(self._finished) if earlier in readers), None)
        if latest is not None:
            self.streams.wait(Edge.STAGING_REDUCED, latest.reduced)

    def _bring_home(self, group: FsdpParameterGroup, *, copies: bool) -> None:
        """Afterwards the group's gradients lie where the plan says: reductions read nothing else, on any rank.

        Which ranks need this depends on the gradients that each of them gets; the order of reductions does not.
        """
        for other in self._occupants(group):
            other.set_staging_aside(copies=True)
        self._wait_for_readers(group)
        group.bring_staging_home(copies=copies)

    def reduce(self, group: FsdpParameterGroup, *, is_last: bool) -> None:
        """Afterwards the gradient of this backward is part of the group's sum; with ``is_last`` so is every rank's.

        Ranks: all of the group's mesh, in the same order; without ``is_last`` all of its inner axis.
        """
        self.stage(group)
        group.stage_grads()
        if group.accumulates_partial and not is_last:
            group.accumulate_partial()
            self._let_go(group)
            if group.staging_is_aside:
                group.bring_staging_home(copies=False)
            group.staging_storage.free()
        else:
            self._launch(group, is_last=is_last, is_staged=True)
        if self.recorder is not None:
            self.recorder.reduced(group.index)

    def reduce_rest(self, group: FsdpParameterGroup) -> None:
        """Afterwards sums over microbatches that were not reduced over all ranks are. Ranks: all of the group's mesh."""
        if not group.has_outer_partial:
            self.reduce(group, is_last=True)
            return
        self.stage(group)  # for what travels
        self._launch(group, is_last=True, is_staged=False)
        if self.recorder is not None:
            self.recorder.reduced(group.index)

    def drop_partial(self, group: FsdpParameterGroup) -> None:
        """Afterwards sums over microbatches that are not reduced over all ranks are gone."""
        self.streams.wait(Edge.REDUCE_BEFORE_FREE, group.reduced)  # of a backward that failed: it may be writing them
        group.drop_partial()

    def _launch(self, group: FsdpParameterGroup, *, is_last: bool, is_staged: bool) -> None:
        if group.staging_is_aside:
            self._bring_home(group, copies=is_staged)
        overwrite = group.prepare_main_grad() if is_last else group.prepare_sum()
        self._written = self.streams.record(Role.COMPUTE, self._written)
        self.streams.wait(Edge.GRADS_WRITTEN, self._written)
        nvtx.push(group.reduce_range)
        with self.streams.on(Role.REDUCE):  # no buffer requires gradients: there is nothing to record
            try:
                group.reduce(overwrite=overwrite, is_last=is_last, is_staged=is_staged)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise unfinished(f"reduction of the gradients of {group}", group.group_mesh.axes, error) from error
            finally:
                nvtx.pop()
            if self.poisons:
                group.staging_storage.flat.fill_(float("nan"))
        self.num_reductions += 1
        group.reduced = group.reduced_event = self._last = self.streams.record(Role.REDUCE, group.reduced_event)
        self._let_go(group)
        self._finished.append(group)
        if group.holds_own_memory:
            self._reading.append(group)
        if not self.overlaps:
            self.streams.wait(Edge.GRADS_REDUCED, self._last)

    def _let_go(self, group: FsdpParameterGroup) -> None:
        group.staging_held = False
        del self._holding[group]

    def _free_read(self, *, keep: int) -> None:
        """Afterwards at most ``keep`` groups still hold memory of their own for a reduction."""
        while len(self._reading) > keep:
            self._free(self._reading[0])

    def _free(self, group: FsdpParameterGroup) -> None:
        self._reading.remove(group)
        self.streams.wait(Edge.REDUCE_BEFORE_FREE, group.reduced)
        group.free_own_memory()

    def finish(self) -> None:
        """Afterwards work on the compute stream sees all reduced gradients."""
        self.streams.wait(Edge.GRADS_REDUCED, self._last)
        self._free_read(keep=0)
        for group in self._finished:
            group.reduced = None
        self._finished.clear()
        self._last = None

    def forget_events(self) -> None:
        """As ``Unsharder.forget_events``. No backward is under way."""
        self._written = None

    def abandon(self, group: FsdpParameterGroup) -> None:
        """Afterwards nothing is left of the group's unfinished backward."""
        group.drop_grads()
        if group.staging_held:
            self._let_go(group)
            if group.staging_is_aside:
                group.bring_staging_home(copies=False)
            group.staging_storage.free()
