"""Optimizer updates, group by group: where they run, who waits for them, and when the gradients they read may go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.runtime import nvtx
from megatron.core.distributed.fsdp.runtime.host_work import HostWork
from megatron.core.distributed.fsdp.runtime.streams import Edge, Role, Streams
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder

Update = Callable[[FsdpParameterGroup], HostWork | None]
"""Updates a group, on the current stream, or by a thread of the host, whose work it returns."""


class Updater:
    """Runs updates of main weights on the compute stream or beside it. [Note: updates beside the forward] in DESIGN.md."""

    def __init__(self, streams: Streams, unsharder: Unsharder) -> None:
        self.streams, self.unsharder = streams, unsharder
        self._beside: list[FsdpParameterGroup] = []  # groups whose updates compute has not waited for as a whole
        self._of_host: list[HostWork] = []
        self._last: Any = None

    def run(
        self, groups: Sequence[FsdpParameterGroup], update: Update, *, first: Callable[[], None], overlaps: bool
    ) -> None:
        """Call ``first``, then ``update`` for each group, in this order; beside compute if ``overlaps``."""
        self.finish()
        if not overlaps:
            first()
            for work in [_run(group, update) for group in groups]:
                self.streams.wait_for_update(Edge.UPDATES_DONE, work)
            return
        self.streams.wait(Edge.GRADS_FINAL, self.streams.record(Role.COMPUTE))
        with self.streams.on(Role.UPDATE):
            first()
            for group in groups:
                work, weights = _run(group, update), group.weights
                if work is None:
                    self._last = weights.updated_event = self.streams.record(Role.UPDATE, weights.updated_event)
                else:
                    self._of_host.append(work)
                weights.updated = work or self._last
                group.grads.begin_update()
        self._beside = list(groups)

    def finish(self) -> None:
        """Make compute wait for all updates; afterwards it may read main weights and free main gradients."""
        if not self._beside:
            return
        self.streams.wait(Edge.UPDATES_DONE, self._last)
        for work in self._of_host:
            self.streams.wait_for_update(Edge.UPDATES_DONE, work)
        self.unsharder.order_after_compute()  # from now on all-gathers only need to wait for compute
        for group in self._beside:
            group.weights.updated = None
            if group.grads.read_by_update:
                group.grads.end_update()
        self.forget_events()

    def forget_events(self) -> None:
        """As ``Unsharder.forget_events``."""
        self._beside, self._of_host, self._last = [], [], None


def _run(group: FsdpParameterGroup, update: Update) -> HostWork | None:
    nvtx.push(group.update_range)
    work = update(group)
    nvtx.pop()
    group.weights.updated_write_count = group.weights.write_count
    group.weights.num_updates += 1
    return work
