"""Streams by role, and the waits between them. Each wait names its edge; the edges are explained in SCHEDULE.md."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, Protocol

import torch


class Role(Enum):
    """Who runs on a stream."""

    COMPUTE = "compute"
    GATHER = "gather"
    REDUCE = "reduce"


class Edge(Enum):
    """A wait between two streams: (producer, consumer, hazard). One row of SCHEDULE.md each."""

    WEIGHTS_UPDATED = ("compute", "gather", "read after write")
    RANGE_RELEASED = ("compute", "gather", "write after read")
    WEIGHTS_GATHERED = ("gather", "compute", "read after write")
    GRADS_WRITTEN = ("compute", "reduce", "read after write")
    STAGING_REDUCED = ("reduce", "compute", "write after read")
    GRADS_REDUCED = ("reduce", "compute", "read after write")
    GATHER_BEFORE_FREE = ("gather", "compute", "free")
    REDUCE_BEFORE_FREE = ("reduce", "compute", "free")


class Streams(Protocol):
    """Runs work under a role and orders it. An event is whatever ``record`` returns; ``None`` is "nothing to wait for"."""

    def on(self, role: Role) -> AbstractContextManager[Any]:
        """A scope in which work is issued on the role's stream."""

    def record(self, role: Role) -> Any:
        """An event that fires when all work issued on the role's stream so far is done."""

    def wait(self, edge: Edge, event: Any) -> None:
        """Afterwards work issued on the edge's consumer runs after ``event``; the host does not wait."""


class HostStreams:
    """Streams of a device without streams: work is done when the call returns, so there is nothing to order."""

    def on(self, role: Role) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self, role: Role) -> Any:
        return None

    def wait(self, edge: Edge, event: Any) -> None:
        pass


class CudaStreams:
    """Compute is the stream that the caller was on when a pass began; gather and reduce are ours, of high priority."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute: torch.cuda.Stream | None = None
        self._own = {role: torch.cuda.Stream(device, priority=-1) for role in (Role.GATHER, Role.REDUCE)}

    def follow_caller(self) -> None:
        """Afterwards compute is the caller's current stream."""
        self._compute = torch.cuda.current_stream(self.device)

    def stream(self, role: Role) -> torch.cuda.Stream:
        """The role's stream."""
        if role is not Role.COMPUTE:
            return self._own[role]
        if self._compute is None:
            self.follow_caller()
        assert self._compute is not None
        return self._compute

    def on(self, role: Role) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream(role))

    def record(self, role: Role) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self.stream(role))
        return event

    def wait(self, edge: Edge, event: torch.cuda.Event | None) -> None:
        if event is not None:
            self.stream(Role(edge.value[1])).wait_event(event)


def make_streams(device: torch.device) -> Streams:
    """Streams for work on ``device``."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
