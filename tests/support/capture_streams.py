"""Streams that keep the rules of a CUDA capture, on the CPU: who breaks one is written down.

A stream is part of a capture once it has waited for an event of it. Within, nothing may wait for an event from before,
and what is issued on a stream that is not part of it would not be replayed; at its end all streams must have been joined to
the one that is captured; afterwards nothing may wait for its events.
Source: the CUDA programming guide, "Cross-stream dependencies and events" of stream capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.core.distributed.fsdp.comm.streams import Edge, Role, Streams


@dataclass(frozen=True, eq=False)
class _Event:
    role: Role
    capture: int | None
    """The capture that it was recorded in; None outside of one."""
    seen: dict[Role, int]
    """Work of each role that was done when it fires."""


class CaptureStreams(Streams):
    """Implements ``Streams``.

    Attributes:
        faults: what a CUDA device would refuse, or leave out of a graph.
        num_waits: waits within captures.
    """

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.num_waits = 0
        self._num_captures = 0
        self._is_capturing = False
        self._captured: set[Role] = set()
        self._seen: dict[Role, dict[Role, int]] = {role: dict.fromkeys(Role, 0) for role in Role}

    @contextmanager
    def capture(self) -> Iterator[None]:
        """A scope in which compute is captured."""
        self._num_captures += 1
        self._is_capturing, self._captured = True, {Role.COMPUTE}
        yield
        seen = self._seen[Role.COMPUTE]
        self.faults += [f"{r.value} is not joined" for r in self._captured if seen[r] < self._seen[r][r]]
        self._is_capturing, self._captured = False, set()

    @contextmanager
    def on(self, role: Role) -> Iterator[None]:
        if self._is_capturing and role not in self._captured:
            self.faults.append(f"work on {role.value} is not captured")
        self._seen[role][role] += 1
        yield

    def record(self, role: Role, again: _Event | None = None) -> _Event:
        return _Event(role, self._num_captures if role in self._captured else None, dict(self._seen[role]))

    def wait(self, edge: Edge, event: _Event | None) -> None:
        if event is None:
            return
        consumer = edge.consumer
        self.num_waits += self._is_capturing
        if event.capture is None:
            if consumer in self._captured:
                self.faults.append(f"{edge.name} waits in a capture for an event from outside")
        elif event.capture != self._num_captures or not self._is_capturing:
            self.faults.append(f"{edge.name} waits outside of a capture for an event from it")
        else:
            self._captured.add(consumer)
        seen = self._seen[consumer]
        for role, count in event.seen.items():
            seen[role] = max(seen[role], count)
