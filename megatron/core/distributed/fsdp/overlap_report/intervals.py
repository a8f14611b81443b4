"""Times as intervals: what they cover, where they overlap, and what lies between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""Begin and end, in one unit of time."""


def union(intervals: Iterable[Interval], slack: float = 0.0) -> list[Interval]:
    """Return the same times as disjoint intervals in order; gaps up to ``slack`` are closed."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start - merged[-1][1] <= slack:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return the time that the intervals cover, overlaps once."""
    return sum(end - start for start, end in union(intervals))


def common(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """Return the times that both cover, in order."""
    a, b = union(first), union(second)
    found: list[Interval] = []
    i, j = 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if end > start:
            found.append((start, end))
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return found


def overlap(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Return how much time both cover."""
    return sum(end - start for start, end in common(first, second))


def gaps(covered: Sequence[Interval], window: Interval) -> list[Interval]:
    """Return the times of the window that disjoint intervals in order leave, in order."""
    ends = [window[0], *(end for _, end in covered)]
    begins = [*(start for start, _ in covered), window[1]]
    clipped = ((max(end, window[0]), min(start, window[1])) for end, start in zip(ends, begins, strict=True))
    return [(start, end) for start, end in clipped if end > start]


def without(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """Return the times that the first cover and the second do not, in order."""
    return common(first, gaps(union(second), (-math.inf, math.inf)))
