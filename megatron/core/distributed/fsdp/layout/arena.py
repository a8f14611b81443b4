"""Addresses of buffers in one allocation, such that buffers alive together share none.

A buffer that is alive several times (gathered in forward and again in backward) keeps one offset for all of them, so
that views which autograd saved stay valid and CUDA graphs replay. Finding the least arena is dynamic storage
allocation, which is NP-hard. A few greedy orders are tried, each repaired a few times, and the best is taken.

See [Note: the plan].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter

# Times that each greedy order is tried again with the owners at the arena's top moved to its front.
_REPAIRS = 12
_Gap = tuple[float, int]  # bytes, and the offset where they begin


@dataclass(frozen=True)
class LiveRange:
    """The ticks [begin, end) in which the buffer of ``owner`` is alive.

    Raises:
        ValueError: the range is empty or the owner negative.
    """

    owner: int
    begin: int
    end: int

    def __post_init__(self) -> None:
        if self.begin >= self.end or self.owner < 0:
            raise ValueError(f"a live range needs begin < end and an owner of 0 or more, got {self}")


@dataclass(frozen=True)
class ArenaPlan:
    """One offset for each owner in an allocation.

    Args:
        offsets: [N] in bytes.
        nbytes: of the allocation.
        overlapping: [N] other owners whose addresses intersect those of owner i, ascending. They are never alive together
            with it; writing one overwrites the others.
    """

    offsets: tuple[int, ...]
    nbytes: int
    overlapping: tuple[tuple[int, ...], ...]


def plan_arena(nbytes: Sequence[int], ranges: Sequence[LiveRange], *, alignment: int = 512) -> ArenaPlan:
    """Give each owner one offset such that owners alive together share no address, in little memory.

    Args:
        nbytes: [N] bytes of each owner.
        ranges: when owners are alive; an owner may have several ranges, or none (then it may share any address).
        alignment: bytes; offsets and the arena are multiples of it.

    Returns:
        The plan, N offsets; at least ``peak_live_nbytes`` large and equal to it where the greedy orders find that.

    Raises:
        ValueError: a range names no owner, a size is negative, or ``alignment`` is not positive.

    Ranks: pure; every rank computes the same answer.
    Source: greedy by size (Pisarchyk and Lee, arXiv:2001.03288, section 5) and first fit by time, the better of both.
    """
    sizes = _aligned_sizes(nbytes, ranges, alignment)
    conflicts = _alive_together(len(sizes), ranges)
    peak = peak_live_nbytes(nbytes, ranges, alignment=alignment)
    best, least = [0] * len(sizes), sum(sizes) + 1
    fits: list[Callable[[list[_Gap]], _Gap]] = [
        itemgetter(0),
        min,
    ]  # the first gap that is large enough, or the smallest
    for key, fit in product(_orders(sizes, ranges), fits):
        order = sorted(range(len(sizes)), key=key)
        # The same on all ranks: no clock and no random order ends the search, since addresses are part of what ranks share.
        for _ in range(_REPAIRS):
            offsets = _place(sizes, conflicts, order, fit)
            ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
            total = max(ends, default=0)
            # Strictly less, so that the first of equal results wins on each rank.
            if total < least:
                best, least = offsets, total
            # No arena is smaller than what is alive at one time.
            if least == peak:
                return ArenaPlan(tuple(best), least, _sharing_addresses(best, sizes))
            # Owners at the top were placed too late to find room: they come first next time (the sort is stable).
            order.sort(key=lambda owner: ends[owner] < total)
    return ArenaPlan(tuple(best), least, _sharing_addresses(best, sizes))


def peak_live_nbytes(nbytes: Sequence[int], ranges: Sequence[LiveRange], *, alignment: int = 512) -> int:
    """Return the largest sum, over all ticks, of the aligned sizes of the owners alive: no arena can be smaller."""
    sizes = _aligned_sizes(nbytes, ranges, alignment)
    live = [sum(sizes[owner] for owner in alive) for _, alive in _begins(ranges)]
    return max([*live, *sizes], default=0)


def _aligned_sizes(nbytes: Sequence[int], ranges: Sequence[LiveRange], alignment: int) -> list[int]:
    if alignment < 1 or any(size < 0 for size in nbytes):
        raise ValueError(f"alignment must be positive and sizes 0 or more, got {alignment} and {list(nbytes)}")
    unknown = sorted({live.owner for live in ranges if live.owner >= len(nbytes)})
    if unknown:
        raise ValueError(f"live ranges must name owners below {len(nbytes)}, got {unknown}; give each owner a size")
    return [-(-size // alignment) * alignment for size in nbytes]


def _begins(ranges: Sequence[LiveRange]) -> Iterator[tuple[int, Collection[int]]]:
    """Yield (owner, the owners alive then, it among them) for each begin of a range, in the order of time."""
    alive: Counter[int] = Counter()
    begins = [(live.begin, 1, live.owner) for live in ranges]
    ends = [(live.end, -1, live.owner) for live in ranges]
    # A buffer that is alive twice at a time (two graphs) is counted twice, and ends with the last of them.
    for _, change, owner in sorted(begins + ends):  # ends come first within a tick
        alive[owner] += change
        if alive[owner] == 0:
            del alive[owner]
        if change > 0:
            yield owner, alive


def _alive_together(num_owners: int, ranges: Sequence[LiveRange]) -> list[set[int]]:
    """Return the owners [N] that are alive at some tick at which owner i is."""
    conflicts: list[set[int]] = [set() for _ in range(num_owners)]
    for owner, alive in _begins(ranges):
        for other in alive:
            if other != owner:
                conflicts[owner].add(other)
                conflicts[other].add(owner)
    return conflicts


def _orders(sizes: list[int], ranges: Sequence[LiveRange]) -> list[Callable[[int], tuple[int, ...]]]:
    """Return sort keys for the order in which owners are placed: by size, by first use, by bytes times ticks."""
    # Owners without a range keep 0: they conflict with nobody, so their place does not matter.
    first = [0] * len(sizes)
    ticks = [0] * len(sizes)
    # From the last to the first, so that the first range's begin remains.
    for live in sorted(ranges, key=lambda live: -live.begin):
        first[live.owner] = live.begin
        ticks[live.owner] += live.end - live.begin
    return [
        lambda owner: (-sizes[owner], first[owner], owner),
        lambda owner: (first[owner], -sizes[owner], owner),
        lambda owner: (-sizes[owner] * ticks[owner], first[owner], owner),
    ]


def _place(
    sizes: list[int], conflicts: list[set[int]], order: list[int], fit: Callable[[list[_Gap]], _Gap]
) -> list[int]:
    """Place owners in this order and return their offsets [N].

    ``fit`` chooses among the gaps between those that are alive together with the owner and placed already.
    """
    offsets = [0] * len(sizes)
    placed = [False] * len(sizes)
    for owner in order:
        if sizes[owner] == 0:
            continue
        taken = sorted((offsets[other], offsets[other] + sizes[other]) for other in conflicts[owner] if placed[other])
        offsets[owner] = fit(_gaps(taken, sizes[owner]))[1]
        placed[owner] = True
    return offsets


def _gaps(taken: list[tuple[int, int]], size: int) -> list[_Gap]:
    """Return the gaps of at least ``size`` bytes between ranges in ``taken``, which is sorted; last the endless one behind them."""
    gaps: list[_Gap] = []
    offset = 0
    for begin, end in taken:
        if begin - offset >= size:
            gaps.append((begin - offset, offset))
        offset = max(offset, end)
    return [*gaps, (math.inf, offset)]


def _sharing_addresses(offsets: list[int], sizes: list[int]) -> tuple[tuple[int, ...], ...]:
    """Return the other owners [N] whose bytes intersect those of owner i, ascending."""
    sharing: list[list[int]] = [[] for _ in offsets]
    filled = sorted((offsets[owner], owner) for owner in range(len(offsets)) if sizes[owner])
    for at, (offset, owner) in enumerate(filled):
        for other_offset, other in filled[at + 1 :]:
            # Sorted by offset: nothing behind it overlaps either.
            if other_offset >= offset + sizes[owner]:
                break
            sharing[owner].append(other)
            sharing[other].append(owner)
    return tuple(tuple(sorted(others)) for others in sharing)
