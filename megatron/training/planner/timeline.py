"""When the operations of a step run on a device's streams, from how long each takes and what waits for what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.distributed.fsdp.planning import Edge, Role, Streams
from megatron.training.planner.hollow import Operation, Recording


class Microbatch(NamedTuple):
    """The forward of a microbatch begins."""

    number: int


class Event(NamedTuple):
    """A stream has come so far."""

    number: int
    stream: str


class Wait(NamedTuple):
    """A stream waits for an event, across an edge of the engine's schedule."""

    stream: str
    event: int
    edge: str


STEP_END = object()
_COMPUTE = Role.COMPUTE.value


class RecordingStreams(Streams):
    """The engine's streams, which write down what is issued on them."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording
        self._count = 0

    @contextmanager
    def on(self, role: Role) -> Iterator[None]:
        before, self._recording.stream = self._recording.stream, role.value
        try:
            yield
        finally:
            self._recording.stream = before

    def record(self, role: Role, again: Any = None) -> int:
        self._count += 1
        if self._recording.at_event is not None:
            self._recording.at_event()
        if self._recording.is_on:
            self._recording.entries.append(Event(self._count, role.value))
        return self._count

    def wait(self, edge: Edge, event: Any) -> None:
        if event is not None and self._recording.is_on:
            self._recording.entries.append(Wait(edge.consumer.value, event, edge.name))


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step's time on one rank, in seconds.

    Attributes:
        total: from the end of the compute stream in the step before to its end or that of the host, whichever is later; the sum
            of ``compute``, ``contention``, ``exposed`` and ``host``.
        compute: sum of what runs on the compute stream, without what communication beside it costs.
        contention: what communication beside it adds to that.
        exposed: the compute stream waits for communication.
        waits_by_edge: the same, by edge of the engine's schedule.
        host: the compute stream waits for the host to launch, and what the host takes after the last operation.
        communication: sums by stream of what travels, hidden or not.
        nbytes: bytes of full buffers by (stream, number of ranks).
        microbatch: what one more microbatch takes; 0 where the step has one.
    """

    total: float
    microbatch: float
    compute: float
    contention: float
    exposed: float
    waits_by_edge: dict[str, float]
    host: float
    communication: dict[str, float]
    nbytes: dict[tuple[str, int], int]


def run_timeline(
    entries: list[Any],
    *,
    seconds: Callable[[Operation], float],
    host_seconds: Callable[[Operation], float],
    contention: float,
    repeats_after: int = 1,
) -> StepTime:
    """Place the operations of two steps on their streams, and return the time of the second one.

    The first is there for what runs from one step into the next: updates beside the forward, the first all-gathers.

    Args:
        entries: of a ``Recording``, with ``STEP_END`` between the steps.
        seconds: how long an operation takes on the device, alone.
        host_seconds: how long the host takes to launch it.
        contention: share by which computation is longer while something travels.
        repeats_after: so many microbatches after each other, the last ones take as long as all further ones; 0: none do so.
    """
    device = _Device(contention)
    for entry in entries:
        if entry is STEP_END:
            device.begin_step()
        elif isinstance(entry, Event):
            device.fired[entry.number] = device.free[entry.stream]
        elif isinstance(entry, Wait):
            device.wait(entry)
        elif isinstance(entry, Microbatch):
            device.microbatches.append(max(device.host, device.free[_COMPUTE]))
        else:
            device.run(entry, seconds(entry), host_seconds(entry))
    return device.step_time(repeats_after)


@dataclass
class _Span:
    """When an operation beside compute runs."""

    stream: str
    begin: float
    end: float
    is_kernel: bool


class _Device:
    """The streams of a device and its host, as they are filled.

    Args:
        contention: as of ``run_timeline``.

    Attributes:
        host: when the host is free, in seconds.
        free: when each stream is.
        fired: when events fired.
        microbatches: when the forwards of this step's microbatches began.
    """

    def __init__(self, contention: float) -> None:
        self.contention, self.host = contention, 0.0
        self.free: defaultdict[str, float] = defaultdict(float)
        self.fired: dict[int, float] = {}
        self._beside: list[_Span] = []
        self.begin_step()

    def begin_step(self) -> None:
        """Count from here on."""
        # An update beside the next forward is that step's.
        self._compute_begin = self.free[_COMPUTE]
        self.microbatches: list[float] = []
        self.compute = self.slowed = self.exposed = self.host_waits = 0.0
        self.by_edge: defaultdict[str, float] = defaultdict(float)
        self.communication: defaultdict[str, float] = defaultdict(float)
        self.nbytes: defaultdict[tuple[str, int], int] = defaultdict(int)

    def wait(self, wait: Wait) -> None:
        """Let a stream wait for an event."""
        time, now = self.fired.get(wait.event, 0.0), self.free[wait.stream]
        if wait.stream == _COMPUTE:
            # Until the host comes here, the stream would have nothing to do without the wait either.
            exposed = max(0.0, time - max(now, self.host))
            self.exposed += exposed
            self.by_edge[wait.edge] += exposed
            self.host_waits += max(0.0, min(time, self.host) - now)
        self.free[wait.stream] = max(now, time)

    def run(self, operation: Operation, duration: float, host: float) -> None:
        """Launch an operation and run it on its stream."""
        self.host += host
        now = self.free[operation.stream]
        begin = max(self.host, now)
        if operation.group_size:
            self.communication[operation.stream] += duration
            self.nbytes[operation.stream, operation.group_size] += operation.nbytes
        if operation.stream != _COMPUTE:
            self._run_beside(operation, begin, duration)
            return
        self.host_waits += begin - now
        if operation.group_size:
            self.exposed += duration
            self.by_edge["model's collectives"] += duration
        else:
            slowed = self._slowed(begin, begin + duration)
            self.compute, self.slowed = self.compute + duration, self.slowed + slowed
            duration += slowed
        self.free[_COMPUTE] = begin + duration

    def _run_beside(self, operation: Operation, begin: float, duration: float) -> None:
        """Place an operation of another stream, beside what compute was given before and will be given later."""
        span = _Span(operation.stream, begin, begin + duration, is_kernel=not operation.group_size)
        self.free[operation.stream] = span.end
        self._beside.append(span)
        computed = self.free[_COMPUTE]
        if begin < computed:
            slowed = self._share(span, begin, min(duration, computed - begin))
            self.slowed, self.free[_COMPUTE] = self.slowed + slowed, computed + slowed

    def _slowed(self, begin: float, end: float) -> float:
        """Return by how much work between two times is longer for what runs beside it."""
        computed, slowed = self.free[_COMPUTE], 0.0
        self._beside = [span for span in self._beside if span.end > computed]
        for span in list(self._beside):
            overlap = min(end, span.end) - max(begin, span.begin)
            if overlap > 0:
                slowed += self._share(span, max(begin, span.begin), overlap)
        return slowed

    def _share(self, span: _Span, begin: float, overlap: float) -> float:
        """Let computation and another operation run beside each other for so long; return what that costs computation.

        Kernels take turns, so each is as much longer as the other one runs meanwhile. A collective takes few of the processors.
        """
        if not span.is_kernel:
            return overlap * self.contention
        for other in self._beside:
            if other.stream == span.stream and other.begin > span.begin:
                other.begin, other.end = other.begin + overlap, other.end + overlap
        span.end += overlap
        self.free[span.stream] += overlap
        return overlap

    def step_time(self, repeats_after: int) -> StepTime:
        """Return the time of the step that has ended."""
        end, begins = max(self.host, self.free[_COMPUTE]), self.microbatches
        total = end - self._compute_begin
        if 0 < repeats_after < len(begins):
            microbatch = (begins[-1] - begins[-1 - repeats_after]) / repeats_after
        else:
            microbatch = total / len(begins) if len(begins) > 1 else 0.0
        return StepTime(
            total=total,
            microbatch=microbatch,
            compute=self.compute,
            contention=self.slowed,
            exposed=self.exposed,
            waits_by_edge={edge: time for edge, time in self.by_edge.items() if time},
            host=self.host_waits + end - self.free[_COMPUTE],
            communication=dict(self.communication),
            nbytes=dict(self.nbytes),
        )
