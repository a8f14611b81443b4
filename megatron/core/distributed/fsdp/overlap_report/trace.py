"""A trace of torch's profiler as work: what ran when, for which unit, in which direction, and who launched it when.

The engine marks what it does with the unit's name (``runtime/nvtx.py``). A kernel belongs to what the host was in when it launched
it: a mark of the engine, or a node of the backward, which has the sequence number of the operator whose gradient it computes;
so backward is told apart by unit also where no mark can be, as between the last layer's backward and the embedding's.
"""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.core.distributed.fsdp.overlap_report.intervals import Interval, gaps

COMPUTE, GATHER, REDUCE, OTHER = "compute", "gather", "reduce", "other"
LANES = (COMPUTE, GATHER, REDUCE, OTHER)
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
OUTSIDE = "outside of units"

_COPY, _COPY_IN_GRAPH, _SET = "Memcpy DtoD", "memcpy32_post", "Memset"
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_OPERATOR = ("cpu_op", "user_annotation")
_CALL = ("cuda_runtime", "cuda_driver")
_MARK = re.compile(r"^fsdp\.(gather|sync|reduce|update|forward|backward) (.*)$")
_LANE_OF_ACT = {"gather": GATHER, "sync": GATHER, "reduce": REDUCE, "update": COMPUTE}
_EVALUATE = "autograd::engine::evaluate_function"
_COMMUNICATION = re.compile(r"^(nccl(Dev|Symk|Kernel)|Memcpy (PtoP|HtoD|DtoH))|symmetric_memory|barrier_kernel")
_HOST_COMMUNICATION = re.compile(r"^(c10d::|record_param_comms|gloo:|nccl:)")
_LAUNCHES = re.compile(r"^cu(da)?(Launch|GraphLaunch|Memcpy|Memset)")
_OPTIMIZER_STEP = "Optimizer.step#"
_NO_WORK = ("ProfilerStep#", _OPTIMIZER_STEP, "Optimizer.zero_grad#", _EVALUATE)
_LOOK_AHEAD = 64
_LAST = chr(0x10FFFF)  # sorts behind every name


@dataclass(frozen=True, slots=True)
class Work:
    """Work on the device, or of a host without one; times are microseconds of the trace's clock.

    Attributes:
        lane: one of ``LANES``.
        unit, direction: what it was for.
        launched: when the host began to launch it.
        number: of its launch; launches are numbered in their order. A CUDA graph is one launch.
        node: its number in the graph, where the profiler tells it; else 0.
        size: bytes of a copy, grid of a kernel: with the name what tells it from others.
    """

    begin: float
    end: float
    lane: str
    unit: str
    direction: str
    name: str
    launched: float
    number: int = 0
    node: int = 0
    size: str = ""


@dataclass
class Trace:
    """What a trace says.

    Attributes:
        works: in the order of their launches.
        calls: times of the host in calls that launch work on the device.
        phases: (begin, direction) where the host's direction changes, in order.
    """

    works: list[Work] = field(default_factory=list)
    calls: list[tuple[float, float]] = field(default_factory=list)
    phases: list[tuple[float, str]] = field(default_factory=list)

    def direction_at(self, time: float) -> str:
        """Return the direction in which the host was."""
        return _latest(self.phases, time) or FORWARD


@dataclass(slots=True)
class _HostEvent:
    begin: float
    end: float
    name: str
    act: str = ""  # of a mark
    unit: str = ""
    forward_number: int = -1  # sequence number of an operator
    node_number: int = -1  # of the operator whose gradient this node computes
    correlation: int = -1  # of a call that launches


def read_events(events: Iterable[dict[str, Any]], *, is_cuda: bool) -> Trace:
    """Read a trace's events, in Chrome's format.

    Args:
        is_cuda: work is what ran on the device; otherwise it is what the host's threads did.
    """
    threads: dict[Any, list[_HostEvent]] = defaultdict(list)
    on_device: list[dict[str, Any]] = []
    trace = Trace()
    for event in events:
        if event.get("ph") != "X":
            continue
        category = event.get("cat")
        if category in _DEVICE:
            on_device.append(event)
        elif category in _OPERATOR or category in _CALL:
            threads[event["tid"]].append(_host_event(event))
            if category in _CALL and _LAUNCHES.match(event["name"]):
                trace.calls.append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    for thread in threads.values():
        thread.sort(key=lambda each: (each.begin, -each.end))
    reader = _HostReader(threads, trace)
    if is_cuda:
        trace.works = [_device_work(event, reader) for event in on_device]
    else:
        trace.works = reader.host_works()
    trace.works.sort(key=lambda work: (work.number, work.node, work.launched, work.begin))
    return trace


def _host_event(event: dict[str, Any]) -> _HostEvent:
    name, args = str(event["name"]), event.get("args", {})
    found = _HostEvent(float(event["ts"]), float(event["ts"]) + float(event["dur"]), name)
    if mark := _MARK.match(name):
        found.act, found.unit = mark[1], mark[2]
    elif event["cat"] in _CALL:
        found.correlation = int(args.get("correlation", -1))
    elif "Sequence number" in args:
        number = int(args["Sequence number"])
        if args.get("Fwd thread id", 0):
            found.node_number = number
        else:
            found.forward_number = number
    return found


@dataclass(frozen=True, slots=True)
class Launch:
    """When the host launched something, and what for; the lane is empty where only the kernel's name tells it."""

    time: float
    lane: str
    unit: str
    direction: str


class _HostReader:
    """Finds for each moment of the host's threads what it was for."""

    def __init__(self, threads: dict[Any, list[_HostEvent]], trace: Trace) -> None:
        self._threads, self._trace = threads, trace
        self._unit_of_number: dict[int, str] = {}
        self._recomputed: dict[int, str] = {}  # units of operators that a backward ran again
        self._begun_backwards: list[tuple[float, str]] = []
        self._launches: dict[int, Launch] = {}
        self._find_phases()
        for thread in threads.values():
            for event, stack in _walk(thread):
                if event.forward_number >= 0 and _nodes(stack):
                    self._recomputed[event.forward_number] = self._context(event.begin, stack).unit
                if event.correlation >= 0:
                    self._launches[event.correlation] = self._context(event.begin, stack)

        # Threads that only ask whether events have fired number their calls in between, too.
        launching = [thread for thread in threads.values() if any(_LAUNCHES.match(event.name) for event in thread)]
        self._calls = sorted(
            (event.correlation, event.begin) for each in launching for event in each if event.correlation >= 0
        )
        self._acts = sorted(
            (event.begin, event.end, event.act, event.unit)
            for each in threads.values()
            for event in each
            if event.act in _LANE_OF_ACT
        )

    def launch(self, correlation: int, begin: float) -> Launch:
        """Return the launch of the work with this number, which began on the device at ``begin``.

        Profilers leave out some calls of the driver (copies that were prepared). Calls are numbered in their order, so
        such a one lies between its neighbours, and belongs to the engine's act that does.
        """
        known = self._launches.get(correlation)
        if known is not None:
            return known
        at = bisect.bisect_left(self._calls, (correlation, 0.0))
        if not at:
            return Launch(begin, "", OUTSIDE, FORWARD)
        after = self._calls[at - 1][1]
        before = self._calls[at][1] if at < len(self._calls) else begin
        latest = bisect.bisect_left(self._acts, (before, 0.0, "", "")) - 1
        if latest >= 0 and self._acts[latest][1] > after:
            time, _, act, unit = self._acts[latest]
            return self._context(time, [_HostEvent(time, time, "", act=act, unit=unit)])
        return replace(self._launches[self._calls[at - 1][0]], time=after)

    def _find_phases(self) -> None:
        """Find where forward, backward and update begin, and the units of forward's operators."""
        changes: list[tuple[float, str]] = []
        ends: list[float] = []
        for thread in self._threads.values():
            for event, stack in _walk(thread):
                if event.name.startswith(_EVALUATE):
                    changes.append((event.begin, BACKWARD))
                    ends.append(event.end)
                elif event.act == "backward":
                    self._begun_backwards.append((event.begin, event.unit))
                elif any(each.name.startswith(_EVALUATE) for each in stack):
                    continue
                elif event.act == "forward":
                    changes.append((event.begin, FORWARD))
                elif event.name.startswith(_OPTIMIZER_STEP):
                    changes.append((event.begin, UPDATE))
                elif event.forward_number >= 0:
                    unit = next((each.unit for each in reversed(stack) if each.act == "forward"), OUTSIDE)
                    self._unit_of_number[event.forward_number] = unit
        self._begun_backwards.sort()
        if ends and not any(begin > max(ends) and direction == FORWARD for begin, direction in changes):
            changes.append((max(ends), UPDATE))
        for begin, direction in sorted(changes):
            if not self._trace.phases or self._trace.phases[-1][1] != direction:
                self._trace.phases.append((begin, direction))

    def _context(self, time: float, stack: Sequence[_HostEvent]) -> Launch:
        lane, unit = "", ""
        for event in reversed(stack):
            if event.act in _LANE_OF_ACT:
                lane, unit = _LANE_OF_ACT[event.act], event.unit
                if event.act == "update":
                    return Launch(time, lane, unit, UPDATE)
                break
            if event.act == "forward":
                unit = event.unit
                break
        direction = self._trace.direction_at(time)
        nodes = _nodes(stack)
        if nodes:
            direction = BACKWARD
            unit = unit or self._unit_of_nodes(nodes, time)
        if direction == BACKWARD:
            unit = unit or _latest(self._begun_backwards, time)
        if lane == GATHER and direction == UPDATE:  # of the next step's first units
            direction = FORWARD
        elif lane == REDUCE:
            direction = BACKWARD
        if not lane and any(_HOST_COMMUNICATION.match(each.name) for each in stack):
            lane = OTHER
        return Launch(time, lane, unit or OUTSIDE, direction)

    def _unit_of_nodes(self, nodes: Sequence[_HostEvent], time: float) -> str:
        """Return the unit of work within nodes of the backward, outermost first.

        A node that computes forward again, of one unit or several, has begun their backwards, and holds the nodes of what
        it has computed again.
        """
        outer, inner = nodes[0], nodes[-1]
        if inner is not outer and inner.node_number in self._recomputed:
            return self._recomputed[inner.node_number]
        index = bisect.bisect_right(self._begun_backwards, (time, _LAST))
        if index and self._begun_backwards[index - 1][0] >= outer.begin:
            return self._begun_backwards[index - 1][1]
        return self._unit_of_number.get(outer.node_number, "")

    def host_works(self) -> list[Work]:
        """Return the time of threads in operators and in the engine's acts as work, disjoint in each thread."""
        works: list[Work] = []
        for thread in self._threads.values():
            if any(event.act for event in thread):
                works += self._works_of(thread)
        return works

    def _works_of(self, thread: Sequence[_HostEvent]) -> Iterable[Work]:
        stacks: list[list[_HostEvent]] = []
        inner: dict[int, list[Interval]] = defaultdict(list)
        for event, stack in _walk(thread):
            stacks.append([*stack, event])
            if stack:
                inner[id(stack[-1])].append((event.begin, event.end))
        for stack in stacks:
            event = stack[-1]
            for begin, end in gaps(inner[id(event)], (event.begin, event.end)) if _is_work(stack) else ():
                context = self._context(begin, stack)
                yield Work(begin, end, context.lane or COMPUTE, context.unit, context.direction, event.name, begin)


def _nodes(stack: Sequence[_HostEvent]) -> list[_HostEvent]:
    return [each for each in stack if each.node_number >= 0]


def _is_work(stack: Sequence[_HostEvent]) -> bool:
    return any(event.act in _LANE_OF_ACT or (not event.act and not event.name.startswith(_NO_WORK)) for event in stack)


def _walk(thread: Sequence[_HostEvent]) -> Iterable[tuple[_HostEvent, list[_HostEvent]]]:
    """Yield (event, events that enclose it, outermost first); the list is reused."""
    stack: list[_HostEvent] = []
    for event in thread:
        while stack and stack[-1].end <= event.begin:
            stack.pop()
        yield event, stack
        if event.correlation < 0:
            stack.append(event)


def _device_work(event: dict[str, Any], reader: _HostReader) -> Work:
    name, args, begin = str(event["name"]), event.get("args", {}), float(event["ts"])
    launch = reader.launch(int(args.get("correlation", -1)), begin)
    return Work(
        begin=begin,
        end=begin + float(event["dur"]),
        lane=launch.lane or (OTHER if _COMMUNICATION.search(name) else COMPUTE),
        unit=launch.unit,
        direction=launch.direction,
        name=name,
        launched=launch.time,
        number=int(args.get("correlation", 0)),
        node=int(args.get("graph node id", 0)),
        size=str(args.get("bytes", args.get("grid", ""))),
    )


def _latest(changes: Sequence[tuple[float, str]], time: float) -> str:
    index = bisect.bisect_right(changes, (time, _LAST))
    return changes[index - 1][1] if index else ""


def transfer(known: Sequence[Work], works: Sequence[Work]) -> tuple[list[Work], float]:
    """Give works the lanes, units and directions of the same works of another step.

    Both steps launch the same kernels in the same order, or nearly so; a CUDA graph numbers its kernels in the order in
    which they were captured, and where it does not say its numbers, the kernels of one name keep their order.

    Returns:
        The works, and the share of their time that has found its like.
    """
    in_order = _align([_key(work) for work in known], [_key(work) for work in works])
    pairs = max(in_order, _align_by_name(known, works, {}), key=len)
    pairs |= _align_by_name(known, works, pairs)
    found: list[Work] = []
    for index, work in enumerate(works):
        if index in pairs:
            of = known[pairs[index]]
            found.append(replace(work, lane=of.lane, unit=of.unit, direction=of.direction))
        else:
            found.append(replace(work, unit=OUTSIDE, direction=found[-1].direction if found else FORWARD))
    time = sum(work.end - work.begin for work in works)
    told = sum(works[index].end - works[index].begin for index in pairs)
    return found, told / time if time else 1.0


def _key(work: Work) -> str:
    # A graph runs small copies between buffers of a device as a kernel with a block for each KiB, and has no names for memory.
    if work.name == _COPY_IN_GRAPH:
        return f"copy {work.size}"
    if work.name.startswith(_COPY) and work.size.isdigit():
        return f"copy [{-(-int(work.size) // 1024)}, 1, 1]"
    return f"{work.name.partition('(')[0] if work.name.startswith(_SET) else work.name} {work.size}"


def _align(known: Sequence[str], names: Sequence[str]) -> dict[int, int]:
    """Return {index in names: index in known} of one pass that skips what one of them lacks."""
    pairs: dict[int, int] = {}
    i = j = 0
    while i < len(known) and j < len(names):
        if known[i] == names[j]:
            pairs[j] = i
            i, j = i + 1, j + 1
            continue
        skips = ((total - k, k) for total in range(1, _LOOK_AHEAD) for k in range(total + 1))
        for skip_known, skip in skips:
            first, second = known[i + skip_known : i + skip_known + 3], names[j + skip : j + skip + 3]
            if first and list(first) == list(second):
                i, j = i + skip_known, j + skip
                break
        else:
            i, j = i + 1, j + 1
    return pairs


def _align_by_name(known: Sequence[Work], works: Sequence[Work], pairs: Mapping[int, int]) -> dict[int, int]:
    """Return pairs of works that are in none of ``pairs``, where as many of a name are left in both, in the order of their times."""
    of_name, own = _left_by_name(known, set(pairs.values())), _left_by_name(works, pairs)
    return {
        index: of
        for name, indices in own.items()
        if len(indices) == len(of_name[name])
        for index, of in zip(indices, of_name[name], strict=True)
    }


def _left_by_name(works: Sequence[Work], taken: Collection[int]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for index in sorted(set(range(len(works))).difference(taken), key=lambda each: (works[each].begin, each)):
        found[_key(works[index])].append(index)
    return found
