"""Streams by role, and the waits between them. Each wait names its edge; the edges are explained in SCHEDULE.md."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial
from typing import Any

import torch


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


class HostWork:
    """An event that a thread will record; who waits for it blocks the host until it is recorded.

    Args:
        start: begins the thread's work if it has not begun.
    """

    __slots__ = ("_event", "_start")

    def __init__(self, start: Callable[[], None]) -> None:
        self._start = start
        self._event: Future[Any] = Future()

    def done(self, event: Any) -> None:
        """Say that the work is issued up to ``event``, None if it is over."""
        self._event.set_result(event)

    def failed(self, error: BaseException) -> None:
        """Let who waits raise ``error``, unless the work is done."""
        if not self._event.done():
            self._event.set_exception(error)

    def event(self) -> Any:
        """Return the event, None if nothing is to be waited for; blocks the host."""
        self._start()
        return self._event.result()


class Streams:
    """Runs work under a role and orders it. An event is whatever ``record`` returns; ``None`` is "nothing to wait for".

    This is for devices without streams: work is done when the call returns, so there is nothing to order.
    """

    one_for_communication = False  # gathers and reductions share one stream

    def adopt(self, other: Streams) -> None:
        """Run on the streams of ``other`` from now on. Whoever has this object need not know."""
        vars(self).update(vars(other))

    def stream(self, role: Role) -> Any:
        """Return the role's stream; None on a device without streams."""
        return None

    def on(self, role: Role) -> AbstractContextManager[Any]:
        """Return a scope in which work is issued on the role's stream; scopes of one role do not nest."""
        return nullcontext()

    def record(self, role: Role, again: Any = None) -> Any:
        """Record an event that fires when all work issued on the role's stream so far is done.

        ``again``, an earlier event that nobody will wait for any more, may be used anew.
        """
        return None

    def wait(self, edge: Edge, event: Any) -> None:
        """Make work issued on the edge's consumer run after ``event``; the host does not wait."""

    def wait_for_update(self, edge: Edge, update: Any) -> None:
        """As ``wait``, for an event or a ``HostWork``, for whose record the host waits."""
        self.wait(edge, update.event() if isinstance(update, HostWork) else update)


class _OnStream:
    """``torch.cuda.stream`` for a stream of the current device, without its look-ups."""

    __slots__ = ("_before", "_current", "_enter")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        place = {"device_index": stream.device_index, "device_type": stream.device_type}
        self._enter = partial(torch._C._cuda_setStream, stream_id=stream.stream_id, **place)
        self._current = partial(torch._C._cuda_getCurrentStream, stream.device_index)
        self._before = self._current()

    def __enter__(self) -> None:
        self._before = self._current()
        self._enter()

    def __exit__(self, *_: object) -> None:
        stream_id, index, kind = self._before
        torch._C._cuda_setStream(stream_id=stream_id, device_index=index, device_type=kind)


class CudaStreams(Streams):
    """Compute is the stream that the caller was on when a pass began; the others are ours.

    Communication has high priority, so that its few blocks are not kept waiting by GEMMs; updates, which GEMMs of the
    next forward should not wait for, have not.
    """

    def __init__(self, device: torch.device, *, one_for_communication: bool = False) -> None:
        self.device, self.one_for_communication = device, one_for_communication
        gather = torch.cuda.Stream(device, priority=-1)
        self._streams = {
            Role.GATHER: gather,
            Role.REDUCE: gather if one_for_communication else torch.cuda.Stream(device, priority=-1),
            Role.UPDATE: torch.cuda.Stream(device),
        }
        # What Event.record and Stream.wait_event end in, without their lines of Python: several hundred calls a step.
        self._record, self._wait = torch._C._CudaEventBase.record, torch._C._CudaEventBase.wait
        self._scopes = {role: _OnStream(stream) for role, stream in self._streams.items()}
        self.follow_caller()

    def follow_caller(self) -> None:
        """Take the caller's current stream as the compute stream."""
        self._streams[Role.COMPUTE] = torch.cuda.current_stream(self.device)

    def stream(self, role: Role) -> torch.cuda.Stream:
        return self._streams[role]

    def on(self, role: Role) -> AbstractContextManager[Any]:
        return self._scopes[role] if role is not Role.COMPUTE else torch.cuda.stream(self._streams[role])

    def record(self, role: Role, again: torch.cuda.Event | None = None) -> torch.cuda.Event:
        event = torch.cuda.Event() if again is None else again
        self._record(event, self._streams[role])
        return event

    def wait(self, edge: Edge, event: torch.cuda.Event | None) -> None:
        if event is not None:
            self._wait(event, self._streams[edge.consumer])


def make_streams(device: torch.device, *, one_for_communication: bool = False) -> Streams:
    """Streams for work on ``device``."""
    if device.type != "cuda":
        streams = Streams()
        streams.one_for_communication = one_for_communication
        return streams
    return CudaStreams(device, one_for_communication=one_for_communication)
