"""Streams that write down what is ordered and find what is not: a race detector for the schedule of the engine, on CPU.

Work really runs when it is issued, in the order of the host. What is checked is the order that a device with one queue
per role would have to keep: the order of each queue, and the waits between them. Two accesses to the same bytes, at least one
of them a write, must be ordered by these alone; else there is a device on which the result is wrong.

Source: vector clocks, as in happens-before race detectors (Lamport, 1978).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megatron.core.distributed.fsdp.comm.streams import Edge, Role, Streams

Clock = dict[Role, int]


@dataclass(frozen=True, eq=False)
class Event:
    """What a role had issued, and seen of others, when the event was recorded."""

    role: Role
    clock: Clock


@dataclass(frozen=True)
class Access:
    """One piece of work that touched some bytes."""

    role: Role
    time: int
    writes: bool
    what: str
    begin: int
    end: int


@dataclass(eq=False)
class LoggingStreams(Streams):
    """Implements ``Streams``; every call is in ``log`` and every unordered pair of accesses in ``races``.

    Args:
        dropped: waits of this edge are not carried out: a schedule with a hole, for testing the detector.
    """

    dropped: Edge | None = None
    log: list[str] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    edges: dict[Edge, int] = field(default_factory=dict)
    _clocks: dict[Role, Clock] = field(default_factory=lambda: {role: dict.fromkeys(Role, 0) for role in Role})
    _current: Role = Role.COMPUTE
    _accesses: list[Access] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    @contextmanager
    def on(self, role: Role) -> Iterator[None]:
        previous, self._current = self._current, role
        try:
            yield
        finally:
            self._current = previous

    def record(self, role: Role, again: Event | None = None) -> Event:
        self.log.append(f"record {role.value}")
        return Event(role, dict(self._clocks[role]))

    def wait(self, edge: Edge, event: Event | None) -> None:
        if event is None:
            return
        producer, consumer = Role(edge.value[0]), Role(edge.value[1])
        assert isinstance(event, Event) and event.role is producer, f"{edge.name} waits for the {producer.value} stream"
        self.log.append(f"wait {edge.name}")
        self.edges[edge] = self.edges.get(edge, 0) + 1
        if edge is not self.dropped:
            own = self._clocks[consumer]
            for role, time in event.clock.items():
                own[role] = max(own[role], time)

    def work(self, what: str, *, reads: tuple[torch.Tensor, ...] = (), writes: tuple[torch.Tensor, ...] = ()) -> None:
        """Log work of the current role on these tensors' bytes."""
        clock = self._clocks[self._current]
        clock[self._current] += 1
        self.log.append(what)
        for tensors, is_write in ((reads, False), (writes, True)):
            for tensor in tensors:
                begin = tensor.data_ptr()
                if begin and tensor.numel():
                    self._access(
                        Access(self._current, clock[self._current], is_write, what, begin, begin + _nbytes(tensor))
                    )

    def _access(self, access: Access) -> None:
        clock = self._clocks[access.role]
        kept = []
        for earlier in self._accesses:
            if earlier.end <= access.begin or access.end <= earlier.begin or not (earlier.writes or access.writes):
                kept.append(earlier)
                continue
            if clock[earlier.role] < earlier.time:
                self.races.append(
                    f"{access.what} on {access.role.value} may overtake {earlier.what} on {earlier.role.value}"
                )
            covered = access.writes and access.begin <= earlier.begin and earlier.end <= access.end
            if not covered:  # whoever is ordered after the new write is ordered after what it covers
                kept.append(earlier)
        self._accesses = [*kept, access]


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
