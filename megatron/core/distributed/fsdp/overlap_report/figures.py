"""What a step's time went to, for each unit and direction.

Each moment of a step is one of four: compute runs; or communication runs and no compute (exposed); or neither runs, and the
host has not yet launched the compute that comes next (host); or it has, and the device has not begun it (latency). So the
four add up to the step. What is not compute counts for the unit and direction whose compute comes next, since that is who waited.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron.core.distributed.fsdp.overlap_report.intervals import Interval, common, gaps, length, union, without
from megatron.core.distributed.fsdp.overlap_report.trace import COMPUTE, GATHER, LANES, OTHER, OUTSIDE, REDUCE, Work

END = "end of the step"
_NUM_GRAINS = 4000  # parts of the step, of which none is shown divided


@dataclass
class Row:
    """A unit in one direction; times are milliseconds.

    Attributes:
        compute: in which its compute ran.
        gather, reduce: in which its own all-gathers and reductions ran, hidden or not.
        exposed: before its compute, in which communication ran and no compute; by what ran in ``exposed_to``.
        host: before its compute, in which nothing ran since the host had not launched it.
        latency: before its compute, in which nothing ran although it was launched.
        gather_nbytes, reduce_nbytes: bytes that other ranks sent to this one for it.
    """

    unit: str
    direction: str
    compute: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    exposed: float = 0.0
    exposed_to: dict[str, float] = field(default_factory=lambda: dict.fromkeys((GATHER, REDUCE, OTHER), 0.0))
    host: float = 0.0
    latency: float = 0.0
    gather_nbytes: int = 0
    reduce_nbytes: int = 0

    @property
    def wait(self) -> float:
        """Milliseconds in which nothing computed before its compute."""
        return self.exposed + self.host + self.latency

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON, with bandwidths in GB/s; None where nothing was sent or no time was seen."""
        bandwidths = {
            f"{what}_gbps": nbytes / ms / 1e6 if nbytes and ms else None
            for what, nbytes, ms in (
                (GATHER, self.gather_nbytes, self.gather),
                (REDUCE, self.reduce_nbytes, self.reduce),
            )
        }
        return {**asdict(self), "wait": self.wait, **bandwidths}


@dataclass
class Figures:
    """What a step's time went to.

    Attributes:
        step: milliseconds of the step.
        totals: milliseconds of compute, exposed, host and latency, which add up to ``step``, of each lane of communication, and
            ``wait``, the sum of all but compute.
        rows: one for each unit and direction, in the order of their first work.
        blocks: for each lane [begin, end, index of its row] in milliseconds from the step's begin; work of one row that follows
            closely is one block.
        idle: [begin, end, "exposed" | "host" | "latency", index of the row that waited], likewise.
        calls: [begin, end] of the host's calls that launch work on the device, likewise.
    """

    step: float
    totals: dict[str, float]
    rows: list[Row]
    blocks: dict[str, list[tuple[float, float, int]]]
    idle: list[tuple[float, float, str, int]]
    calls: list[Interval]


Nbytes = Mapping[tuple[str, str, str], int]
"""Bytes received for ("gather" | "reduce", unit, direction)."""


def find_figures(
    works: Sequence[Work], window: Interval, *, nbytes: Nbytes | None = None, calls: Iterable[Interval] = ()
) -> Figures:
    """Divide a step's time.

    Args:
        works: what ran; only what lies in the window counts.
        window: begin and end of the step, in microseconds of the trace's clock.
        nbytes: that other ranks sent to this one.
        calls: of the host that launch work, likewise in microseconds.

    Ranks: pure; each its own.
    """
    clipped = sorted(_clipped(works, window), key=lambda work: work.begin)
    index_of: dict[tuple[str, str], int] = {}
    times: dict[tuple[str, int], list[Interval]] = defaultdict(list)
    for work in clipped:
        index = index_of.setdefault((work.unit, work.direction), len(index_of))
        times[work.lane, index].append((work.begin, work.end))
    rows = [Row(unit, direction) for unit, direction in index_of]
    for (lane, index), of_row in times.items():
        if lane != OTHER:
            setattr(rows[index], lane, length(of_row) / 1e3)
    for row in rows:
        row.gather_nbytes = (nbytes or {}).get((GATHER, row.unit, row.direction), 0)
        row.reduce_nbytes = (nbytes or {}).get((REDUCE, row.unit, row.direction), 0)
    of_lane = {lane: [each for (own, _), many in times.items() if own == lane for each in many] for lane in LANES}
    grain = (window[1] - window[0]) / _NUM_GRAINS
    idle = _Idle(clipped, of_lane, window, rows, index_of, grain)
    waits = {kind: sum(getattr(row, kind) for row in rows) for kind in ("exposed", "host", "latency")}
    totals = {
        **{lane: length(many) / 1e3 for lane, many in of_lane.items()},
        **waits,
        "wait": sum(waits.values()),
    }
    return Figures(
        step=(window[1] - window[0]) / 1e3,
        totals=totals,
        rows=rows,
        blocks={lane: _blocks(times, lane, window, grain) for lane in LANES},
        idle=idle.found,
        calls=[_relative(each, window) for each in _joined(_inside(calls, window), grain)],
    )


def _clipped(works: Iterable[Work], window: Interval) -> Iterable[Work]:
    for work in works:
        begin, end = max(work.begin, window[0]), min(work.end, window[1])
        if end > begin:
            yield replace(work, begin=begin, end=end)


class _Idle:
    """Divides the times without compute, and gives each to the row that waited.

    Attributes:
        found: as ``Figures.idle``.
    """

    def __init__(
        self,
        works: Sequence[Work],
        of_lane: Mapping[str, Sequence[Interval]],
        window: Interval,
        rows: list[Row],
        index_of: dict[tuple[str, str], int],
        grain: float,
    ) -> None:
        self.found: list[tuple[float, float, str, int]] = []
        self._window, self._rows, self._grain = window, rows, grain
        compute = [work for work in works if work.lane == COMPUTE]
        begins = [work.begin for work in compute]
        gathers, reductions, others = (union(of_lane[lane]) for lane in (GATHER, REDUCE, OTHER))
        for gap in gaps(union(of_lane[COMPUTE]), window):
            at = bisect.bisect_left(begins, gap[1])
            if at < len(compute):
                index, launched = index_of[compute[at].unit, compute[at].direction], compute[at].launched
            else:
                index, launched = self._end(index_of), gap[1]
            row = rows[index]
            gathering = common([gap], _near(gathers, gap))
            reducing = without(common([gap], _near(reductions, gap)), gathering)
            other = without(common([gap], _near(others, gap)), [*gathering, *reducing])
            for kind, part in ((GATHER, gathering), (REDUCE, reducing), (OTHER, other)):
                row.exposed_to[kind] += length(part) / 1e3
            exposed = union([*gathering, *reducing, *other])
            quiet = gaps(exposed, gap)
            late = common(quiet, [(gap[0], launched)]) if launched > gap[0] else []
            self._add("exposed", exposed, index)
            self._add("host", late, index)
            self._add("latency", without(quiet, late), index)

    def _end(self, index_of: dict[tuple[str, str], int]) -> int:
        index = index_of.setdefault((OUTSIDE, END), len(self._rows))
        if index == len(self._rows):
            self._rows.append(Row(OUTSIDE, END))
        return index

    def _add(self, kind: str, parts: Sequence[Interval], index: int) -> None:
        row = self._rows[index]
        setattr(row, kind, getattr(row, kind) + length(parts) / 1e3)
        for part in parts:
            if part[1] - part[0] >= self._grain:
                self.found.append((*_relative(part, self._window), kind, index))


def _near(intervals: Sequence[Interval], gap: Interval) -> Sequence[Interval]:
    """Return those of disjoint intervals in order that may touch the gap."""
    first = max(0, bisect.bisect_left(intervals, (gap[0], 0.0)) - 1)
    return intervals[first : bisect.bisect_right(intervals, (gap[1], 0.0))]


def _inside(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    return union(
        (max(begin, window[0]), min(end, window[1]))
        for begin, end in intervals
        if begin < window[1] and end > window[0]
    )


def _joined(intervals: Sequence[Interval], grain: float) -> list[Interval]:
    joined: list[Interval] = []
    for begin, end in intervals:
        if joined and begin - joined[-1][1] <= grain:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _blocks(
    times: Mapping[tuple[str, int], Sequence[Interval]], lane: str, window: Interval, grain: float
) -> list[tuple[float, float, int]]:
    found = [
        (*_relative(each, window), index)
        for (own, index), many in times.items()
        if own == lane
        for each in _joined(union(many), grain)
    ]
    return sorted(found)


def _relative(interval: Interval, window: Interval) -> Interval:
    """Return the interval in milliseconds from the window's begin."""
    return round((interval[0] - window[0]) / 1e3, 4), round((interval[1] - window[0]) / 1e3, 4)
