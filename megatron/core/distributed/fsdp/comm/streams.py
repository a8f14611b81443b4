"""Streams by role, and the waits between them. Each wait names its edge; the edges are explained in SCHEDULE.md."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, ClassVar
from weakref import WeakSet

import torch

# What Event.record and Stream.wait_event end in, without their lines of Python: several hundred calls a step. A build of torch
# for CPUs has neither.
_EVENT: Any = getattr(torch._C, "_CudaEventBase", None)
_RECORD: Any = getattr(_EVENT, "record", None)
_WAIT: Any = getattr(_EVENT, "wait", None)


class Role(Enum):
    """Who runs on a stream."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"
    UPDATE = "update"

    __hash__ = object.__hash__  # that of Enum is a function in Python, and streams are looked up by role all the time


class Edge(Enum):
    """A wait between two streams: (producer, consumer, hazard). One row of SCHEDULE.md each."""

    WEIGHTS_UPDATED = ("compute", "gather", "read after write")
    UNIT_UPDATED = ("update", "gather", "read after write")
    RANGE_RELEASED = ("compute", "gather", "write after read")
    WEIGHTS_GATHERED = ("gather", "compute", "read after write")
    GRADS_WRITTEN = ("compute", "reduce", "read after write")
    INPUT_REDUCED = ("reduce", "compute", "write after read")
    GRADS_REDUCED = ("reduce", "compute", "read after write")
    GRADS_FINAL = ("compute", "update", "read after write")
    UPDATES_DONE = ("update", "compute", "read after write")
    SHARDS_READ = ("gather", "compute", "write after read")
    GATHER_BEFORE_FREE = ("gather", "compute", "free")
    REDUCE_BEFORE_FREE = ("reduce", "compute", "free")

    consumer: Role

    def __init__(self, producer: str, consumer: str, hazard: str) -> None:
        self.consumer = Role(consumer)


class HostWork(Future[Any]):
    """The event that a thread of the host will record, or None if there is nothing to wait for.

    Args:
        start: begins the thread's work if it has not begun.
    """

    def __init__(self, start: Callable[[], None]) -> None:
        super().__init__()
        self._start = start

    def result(self, timeout: float | None = None) -> Any:
        """Return the event; blocks the host until it is recorded."""
        # The thread may not have begun: nobody would ever set the result.
        self._start()
        return super().result(timeout)


class Mark:
    """A point in the work of a role, for which another role may still have to wait. Made by ``Streams.mark``.

    One consumer waits for it: ``wait`` orders the consumer once, so a mark with two consumers would lose the second wait. Callers on
    the hot path ask ``is_pending`` first, which saves the call.

    Attributes:
        is_pending: recorded, and nobody has waited since.
        event: the device's event, kept to be recorded again, or the work that will record one; None on a device without streams.
    """

    __slots__ = ("__weakref__", "_streams", "event", "is_pending")

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.event: Any = None
        self.is_pending = False

    def record(self, role: Role) -> None:
        """Mark the end of the work that the role has been given so far."""
        self.event = self._streams.record(role, self.event)
        self.is_pending = True

    def expect(self, work: HostWork) -> None:
        """Mark the end of what a thread does; waiting blocks the host until the thread has issued it."""
        self.event, self.is_pending = work, True

    def wait(self, edge: Edge) -> None:
        """Make later work of the edge's consumer run after the marked point, unless it has waited already."""
        if self.is_pending:
            self.is_pending = False
            self._streams.wait(edge, self.resolve())

    def resolve(self) -> Any:
        """Return the event; blocks the host until a thread that is to record it has done so."""
        if isinstance(self.event, HostWork):
            self.event = self.event.result()
        return self.event

    def forget(self) -> None:
        """Drop the event: nobody waits for it any more."""
        self.event, self.is_pending = None, False


class Streams:
    """Runs work under a role and orders it with events. An event of ``None`` is "nothing to wait for".

    This is for devices without streams: work is done when the call returns, so there is nothing to order.

    Attributes:
        one_for_communication: gathers and reductions share one stream.
        queues: the device's stream of each role; empty on a device without streams.
    """

    mark_class: ClassVar[type[Mark]] = Mark

    def __init__(self, *, one_for_communication: bool = False) -> None:
        self.one_for_communication = one_for_communication
        self.queues: dict[Role, Any] = {}
        self._marks: WeakSet[Mark] = WeakSet()

    def mark(self) -> Mark:
        """Make a mark for work on these streams."""
        mark = self.mark_class(self)
        self._marks.add(mark)
        return mark

    def forget(self) -> None:
        """Drop all marks: a CUDA graph's capture began or ended, and work from before cannot be waited for.

        The caller has joined all streams into the one that is captured.
        """
        for mark in self._marks:
            mark.forget()

    def share(self, other: Streams) -> None:
        """Run on the streams of ``other`` from now on. Marks stay valid: an event may be waited for on any stream."""
        self.queues, self.one_for_communication = other.queues, other.one_for_communication

    def on(self, role: Role) -> AbstractContextManager[Any]:
        """Return a scope in which work is issued on the role's stream; scopes of one role do not nest."""
        return nullcontext()

    def record(self, role: Role, again: Any = None) -> Any:
        """Record an event that fires when all work issued on the role's stream so far is done.

        ``again``, an earlier event that nobody will wait for any more, may be used again.
        """
        if not self.queues:
            return None
        event = torch.cuda.Event() if again is None else again
        _RECORD(event, self.queues[role])
        return event

    def wait(self, edge: Edge, event: Any) -> None:
        """Make work issued on the edge's consumer run after ``event``; the host does not wait."""
        if self.queues and event is not None:
            _WAIT(event, self.queues[edge.consumer])


class _CudaMark(Mark):
    """A ``Mark`` that calls the device itself: several hundred calls a step."""

    __slots__ = ()

    def record(self, role: Role) -> None:
        if self.event is None:
            self.event = torch.cuda.Event()
        _RECORD(self.event, self._streams.queues[role])
        self.is_pending = True

    def wait(self, edge: Edge) -> None:
        if self.is_pending:
            self.is_pending = False
            event = self.event
            if isinstance(event, HostWork):
                event = self.resolve()
            if event is not None:
                _WAIT(event, self._streams.queues[edge.consumer])


class CudaStreams(Streams):
    """Compute is the stream that the caller was on when a pass began; the others are ours.

    Communication has high priority, so that its few blocks are not kept waiting by GEMMs; updates, which GEMMs of the
    next forward should not wait for, have not.
    """

    mark_class: ClassVar[type[Mark]] = _CudaMark

    def __init__(self, device: torch.device, *, one_for_communication: bool = False) -> None:
        super().__init__(one_for_communication=one_for_communication)
        self.device = device
        gather = torch.cuda.Stream(device, priority=-1)
        self.queues = {
            Role.GATHER: gather,
            Role.REDUCE: gather if one_for_communication else torch.cuda.Stream(device, priority=-1),
            Role.UPDATE: torch.cuda.Stream(device),
        }
        self.follow_caller()

    def follow_caller(self) -> None:
        """Take the caller's current stream as the compute stream."""
        self.queues[Role.COMPUTE] = torch.cuda.current_stream(self.device)

    def on(self, role: Role) -> AbstractContextManager[Any]:
        # A stream is itself a scope, in C. It remembers one stream to go back to, so the same one cannot be entered twice.
        scope: AbstractContextManager[Any] = self.queues[role]
        return scope


def make_streams(device: torch.device, *, one_for_communication: bool = False) -> Streams:
    """Make streams for work on ``device``."""
    if device.type != "cuda":
        return Streams(one_for_communication=one_for_communication)
    return CudaStreams(device, one_for_communication=one_for_communication)
