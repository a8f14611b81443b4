"""What a step's time went to, for each unit and direction.

Each moment of a step is one of four: compute runs; or communication runs and no compute (exposed); or neither runs, and the
host has not yet launched the compute that comes next (host); or it has, and the device has not begun it (latency). So the
four add up to the step. What is not compute counts for the unit and direction whose compute comes next, since that is who waited.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    nbytes = nbytes or {}
    clipped = sorted(_clipped(works, window), key=lambda work: work.begin)
    index_of: dict[tuple[str, str], int] = {}
    times: dict[tuple[str, int], list[Interval]] = defaultdict(list)
    for work in clipped:
        index = index_of.setdefault((work.unit, work.direction), len(index_of))
        times[work.lane, index].append((work.begin, work.end))
    of_lane = {lane: [each for (own, _), many in times.items() if own == lane for each in many] for lane in LANES}
    # What is not compute, and for each such gap the row whose compute ends it, and when that was launched.
    idle = gaps(union(of_lane[COMPUTE]), window)
    end_of_step = Work(window[1], window[1], COMPUTE, OUTSIDE, END, "", launched=window[1])
    compute = [*(work for work in clipped if work.lane == COMPUTE), end_of_step]
    begins = [work.begin for work in compute]
    ends = [compute[bisect.bisect_left(begins, end)] for _, end in idle]
    waiting = [index_of.setdefault((work.unit, work.direction), len(index_of)) for work in ends]
    rows = [
        Row(*key, gather_nbytes=nbytes.get((GATHER, *key), 0), reduce_nbytes=nbytes.get((REDUCE, *key), 0))
        for key in index_of
    ]
    for (lane, index), of_row in times.items():
        if lane != OTHER:
            setattr(rows[index], lane, length(of_row) / 1e3)

    def in_rows(parts: Sequence[Interval]) -> Iterator[tuple[Interval, int]]:
        for part in parts:
            yield part, waiting[bisect.bisect_right(idle, (part[0], math.inf)) - 1]

    # Each moment counts once: for a gather first, then for a reduction.
    exposed: list[Interval] = []
    for lane in (GATHER, REDUCE, OTHER):
        exposed_to = without(common(idle, of_lane[lane]), exposed)
        exposed = union([*exposed, *exposed_to])
        for (begin, end), index in in_rows(exposed_to):
            rows[index].exposed_to[lane] += (end - begin) / 1e3
    not_launched = [(begin, min(work.launched, end)) for (begin, end), work in zip(idle, ends, strict=True)]
    late = without(common(idle, not_launched), exposed)
    waits = {"exposed": exposed, "host": late, "latency": without(idle, [*exposed, *late])}
    grain = (window[1] - window[0]) / _NUM_GRAINS
    shown: list[tuple[float, float, str, int]] = []
    for kind, parts in waits.items():
        for part, index in in_rows(parts):
            setattr(rows[index], kind, getattr(rows[index], kind) + (part[1] - part[0]) / 1e3)
            if part[1] - part[0] >= grain:
                shown.append((*_relative(part, window), kind, index))
    totals = {name: length(parts) / 1e3 for name, parts in (of_lane | waits).items()}
    blocks: dict[str, list[tuple[float, float, int]]] = {lane: [] for lane in LANES}
    for (lane, index), of_row in times.items():
        blocks[lane] += [(*_relative(each, window), index) for each in union(of_row, grain)]
    return Figures(
        step=(window[1] - window[0]) / 1e3,
        totals=totals | {"wait": sum(totals[kind] for kind in waits)},
        rows=rows,
        blocks={lane: sorted(of_lane) for lane, of_lane in blocks.items()},
        idle=sorted(shown),
        calls=[_relative(each, window) for each in union(common(calls, [window]), grain)],
    )


def _clipped(works: Iterable[Work], window: Interval) -> Iterable[Work]:
    for work in works:
        begin, end = max(work.begin, window[0]), min(work.end, window[1])
        if end > begin:
            yield replace(work, begin=begin, end=end)


def _relative(interval: Interval, window: Interval) -> Interval:
    """Return the interval in milliseconds from the window's begin."""
    return round((interval[0] - window[0]) / 1e3, 4), round((interval[1] - window[0]) / 1e3, 4)
