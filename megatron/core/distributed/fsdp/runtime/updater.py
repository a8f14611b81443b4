"""Optimizer updates, group by group: where they run, who waits for them, and when the gradients they read may go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.comm.streams import Edge, HostWork, Mark, Role, Streams
from megatron.core.distributed.fsdp.runtime import nvtx
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder

Update = Callable[[FsdpParameterGroup], HostWork | None]
"""Updates a group, on the current stream, or by a thread of the host, whose work it returns."""


class Updater:
    """Runs updates of main weights on the compute stream or beside it. [Note: updates beside the forward]."""

    def __init__(self, streams: Streams, unsharder: Unsharder) -> None:
        self.streams, self.unsharder = streams, unsharder
        self._beside: list[FsdpParameterGroup] = []  # groups whose updates compute has not waited for as a whole
        self._awaited: list[Mark] = []  # the last update's on the stream, and those of all that threads do
        self._grads_final = streams.mark()

    def run(
        self, groups: Sequence[FsdpParameterGroup], update: Update, *, first: Callable[[], None], overlaps: bool
    ) -> None:
        """Call ``first``, then ``update`` for each group, in this order; beside compute if ``overlaps``."""
        self.finish()
        if not overlaps:
            first()
            for work in [_run(group, update) for group in groups]:
                if work is not None:
                    self.streams.wait(Edge.UPDATES_DONE, work.event())
            return
        self._grads_final.record(Role.COMPUTE)
        self._grads_final.wait(Edge.GRADS_FINAL)
        last: list[Mark] = []
        with self.streams.on(Role.UPDATE):
            first()
            for group in groups:
                work, mark = _run(group, update), group.weights.updated
                if work is None:
                    mark.record(Role.UPDATE)
                    last = [mark]
                else:
                    mark.expect(work)
                    self._awaited.append(mark)
                group.grads.begin_update()
        self._beside, self._awaited = list(groups), self._awaited + last

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
                group.grads.end_update()
        self._beside, self._awaited = [], []


def _run(group: FsdpParameterGroup, update: Update) -> HostWork | None:
    nvtx.push(group.ranges.update)
    work = update(group)
    nvtx.pop()
    group.weights.freshness.note_update()
    return work
