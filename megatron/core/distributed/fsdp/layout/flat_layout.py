"""Flat buffers that ranks share in equal segments: where each tensor lies, and which of its rows each rank owns.

The boundaries between segments fall between granules (granule.py) of every tensor. A tensor that crosses two or more
boundaries needs a segment that is a multiple of its granule; one that crosses a single boundary only needs the right
start; one inside a segment needs nothing. So the segment is a multiple of the granules of the *large* tensors alone, which
is far less than the lowest common multiple of all.

Which tensors share a buffer, and which have their rows cut, is decided in row_groups.py.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import torch

from megatron.core.distributed.fsdp.layout.granule import Granule, check_row_parts

# A segment that first fit overruns grows by this share of the overrun, and faster after so many trials.
_OVERRUN_SHARE = 4
_FINE_TRIALS = 32


@dataclass(frozen=True, kw_only=True)
class PaddingPolicy:
    """What padding is accepted, and for what.

    Padding is what segments of equal size, cut between granules, leave empty. Every rank pays for it in memory and
    traffic, so the budget is small; fewer buffers (fewer collectives) and whole rows (simpler DTensors) are worth that
    much and no more. [Note: what rows cost].
    """

    alignment: int = 64
    """Elements that starts and segments are a multiple of: 128 bytes of bf16, which vectorised kernels and copies like."""

    alignment_worth: float = 1.01
    """A smaller alignment is taken where a buffer would be larger than this factor without it: starts that are not
    aligned cost less than 1 % of all traffic."""

    max_fraction: float = 0.02
    """Padding elements for each used one, over all buffers of the tensors together: the budget of the design."""

    least_numel_to_cut: int = 2**20
    """Tensors of fewer elements together keep whole rows whatever that costs: what they lose is a megabyte or two."""

    def allowed(self, used_numel: int, num_tensors: int, num_ranks: int) -> float:
        """Return the padding elements that tensors of ``used_numel`` elements may have together.

        The alignment of each tensor, and two of each rank, is always allowed, so that tiny units stay in one buffer.
        """
        return max(self.max_fraction * used_numel, self.alignment * (2 * num_ranks + num_tensors))


@dataclass(frozen=True)
class TensorSlot:
    """A tensor's place in the full buffer: ``shape`` from element ``start`` on, contiguous, cut between granules.

    Raises:
        ValueError: ``granule`` is parts of rows that do not divide dim 1.
    """

    shape: torch.Size
    start: int
    granule: Granule = Granule.row()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        check_row_parts(self.shape, self.row_parts)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_parts(self) -> int:
        """Equal parts that each row [C, ...] of the tensor is cut into along dim 1; 1 where rows are whole."""
        return self.granule.num_parts

    @property
    def cut_shape(self) -> torch.Size:
        """The view of the tensor whose rows a rank owns: its own shape, or [R * row_parts, C / row_parts, ...]."""
        if self.row_parts == 1:
            return self.shape
        return torch.Size((self.rows, self.shape[1] // self.row_parts, *self.shape[2:]))

    @property
    def rows(self) -> int:
        """Rows of ``cut_shape``; 1 for a tensor without dimensions."""
        return self.shape[0] * self.row_parts if len(self.shape) > 0 else 1

    @property
    def row_numel(self) -> int:
        """Elements of a row of ``cut_shape``: 1 for tensors of 0 and 1 dimensions, 0 where a later dimension is 0."""
        return math.prod(self.shape[1:]) // self.row_parts

    @property
    def granule_numel(self) -> int:
        """Elements of a granule: cuts are multiples of it, from ``start`` on."""
        return self.granule.numel(self.shape)


@dataclass(frozen=True)
class FlatLayout:
    """Tensors in a buffer of ``num_ranks`` segments of ``segment_numel`` elements; rank k owns segment k.

    Every boundary between segments falls between granules of every tensor, and tensors do not overlap.

    Raises:
        ValueError: the slots break one of these rules, or rows are cut into parts though one rank owns everything.
    """

    slots: tuple[TensorSlot, ...]
    num_ranks: int
    segment_numel: int

    def __post_init__(self) -> None:
        # Nothing cuts the buffer: parts of rows would only complicate its DTensors.
        if self.num_ranks == 1 and any(slot.row_parts > 1 for slot in self.slots):
            raise ValueError(
                "row_parts must be 1 where one rank owns the buffer, which nothing cuts; take Granule.row()"
            )
        for index, slot in enumerate(self.slots):
            if not _cuts_fall_between_granules(slot, self.segment_numel):
                raise ValueError(
                    f"every rank boundary must fall between granules ({slot.granule}), got tensor {index} of shape "
                    f"{list(slot.shape)} at {slot.start} with segments of {self.segment_numel}; make layouts with pack_rows"
                )
        filled = sorted((slot.start, slot.start + slot.numel) for slot in self.slots if slot.numel)
        # Shifted by one, so that each tensor's end is compared with the next one's start, and the last one's with the buffer's end.
        ends = [0, *(end for _, end in filled)]
        starts = [*(start for start, _ in filled), self.total_numel]
        if any(end > start for end, start in zip(ends, starts, strict=True)):
            raise ValueError(
                f"tensors must not overlap and must lie in [0, {self.total_numel}), got the ranges {filled}; "
                "make layouts with pack_rows"
            )

    # By these names Megatron-FSDP's ``GlobalLayout`` is asked.
    @property
    def tensor_shapes(self) -> tuple[torch.Size, ...]:
        """[T] the tensors' shapes."""
        return tuple(slot.shape for slot in self.slots)

    @property
    def tensor_to_offset(self) -> tuple[int, ...]:
        """[T] the elements where they begin."""
        return tuple(slot.start for slot in self.slots)

    @property
    def total_numel(self) -> int:
        """Elements of the full buffer, with padding."""
        return self.num_ranks * self.segment_numel

    size = total_numel

    @cached_property
    def used_numel(self) -> int:
        """Elements of the tensors."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padding_numel(self) -> int:
        """Elements of the full buffer that belong to no tensor; ``padding_by_granule`` says what they are for."""
        return self.total_numel - self.used_numel


def rows_before(position: int, *, start: int, row_numel: int, num_rows: int) -> int:
    """Count the rows that begin before element ``position`` of the full buffer, of a tensor that begins at ``start``.

    Rows without elements all begin at ``start``, so the rank whose segment holds ``start`` owns them.
    """
    # A division by 0 otherwise, and each row must belong to exactly one rank.
    if row_numel == 0:
        return num_rows if position > start else 0
    return min(max(-((start - position) // row_numel), 0), num_rows)


def pack_rows(
    shapes: Sequence[torch.Size],
    *,
    num_ranks: int,
    alignment: int = PaddingPolicy.alignment,
    granules: Sequence[Granule] | None = None,
) -> FlatLayout:
    """Place tensors in one flat buffer of little padding so that every rank boundary falls between granules.

    Args:
        shapes: [T] shapes of the tensors, in parameter order; any dimensions, 0 and empty ones too.
        num_ranks: ranks that share the buffer evenly.
        alignment: elements; segments and starts are multiples of it. Where that would make the buffer more than 1 %
            larger (many rows that are no multiple of it), the largest alignment/2^k that does not is taken instead.
        granules: [T] the smallest piece of each tensor that stays on one rank; rows when None.

    Returns:
        The layout, its slots in the order of ``shapes``.

    Raises:
        ValueError: ``num_ranks`` or ``alignment`` is not positive; a granule does not fit its tensor; ``num_ranks`` is 1
            and a granule is a part of a row.

    Ranks: pure; every rank computes the same answer.
    Source: ZeRO (arXiv:1910.02054) section 5 for the flat partition; the rule of granules is ours.
    """
    if num_ranks < 1 or alignment < 1:
        raise ValueError(f"num_ranks and alignment must be positive, got {num_ranks} and {alignment}")
    cuts = [Granule.row()] * len(shapes) if granules is None else granules
    slots = [TensorSlot(torch.Size(shape), 0, granule) for shape, granule in zip(shapes, cuts, strict=True)]
    if not slots:
        return FlatLayout((), num_ranks, 0)
    least_segment = least_segment_of(slots, num_ranks=num_ranks, alignment=1)
    # A few elements of alignment for each tensor and rank are not worth an unaligned start.
    allowed = max(
        PaddingPolicy.alignment_worth * least_segment, least_segment + alignment * (2 + len(slots) / num_ranks)
    )
    best = _pack_aligned(slots, num_ranks, alignment)
    while alignment > 1 and best.segment_numel > allowed:
        alignment = alignment // 2 if alignment % 2 == 0 else 1
        layout = _pack_aligned(slots, num_ranks, alignment)
        # Only a clear gain: starts that are less aligned make copies and kernels slower in each step.
        if layout.segment_numel * PaddingPolicy.alignment_worth < best.segment_numel:
            best = layout
    return best


def _cuts_fall_between_granules(slot: TensorSlot, segment: int) -> bool:
    """Return whether no multiple of ``segment`` lies inside a granule of the tensor."""
    end, granule = slot.start + slot.numel, slot.granule_numel
    if slot.numel == 0 or segment == 0:
        return True  # a filled tensor in empty segments fails the range rule
    # The first boundary behind the start. One that falls on the start cuts nothing.
    first = (slot.start // segment + 1) * segment
    if first >= end:
        return True
    return (first - slot.start) % granule == 0 and (first + segment >= end or segment % granule == 0)


def _kinds(slots: Sequence[TensorSlot]) -> dict[tuple[int, int], int]:
    """Count the tensors that have elements by (numel, granule_numel)."""
    # Tensors without elements rule nothing out.
    return Counter((slot.numel, slot.granule_numel) for slot in slots if slot.numel)


def least_segment_of(slots: Sequence[TensorSlot], *, num_ranks: int, alignment: int) -> int:
    """Return the least segment that holds the tensors and that none of them rules out by itself; starts do not matter."""
    kinds = _kinds(slots)
    aligned_numel = sum(_round_up(numel, alignment) * number for (numel, _), number in kinds.items())
    return _next_segment(kinds, alignment, at_least=max(-(-aligned_numel // num_ranks), alignment))


def _next_segment(kinds: dict[tuple[int, int], int], alignment: int, *, at_least: int) -> int:
    """Return the least segment from ``at_least`` on that no tensor rules out by its size and granule alone.

    A tensor of more than two segments crosses two boundaries, so its granule must divide the segment. One of more than
    one segment crosses at least one boundary: its granule divides the segment or its start can be chosen.
    """
    # A start that is aligned and a cut between granules together need a multiple of both.
    granules = [(numel, math.lcm(granule, alignment)) for numel, granule in kinds]
    segment = at_least
    while True:
        step = math.lcm(alignment, *(granule for numel, granule in granules if numel > 2 * segment))
        if segment % step == 0:
            least = max((_least_crossed_once(numel, granule, segment) for numel, granule in granules), default=segment)
            if least == segment:
                return segment
            segment = least
            continue
        # Past half a tensor's size its granule no longer has to divide the segment, and the step may shrink.
        halves = [-(-numel // 2) for numel, _ in granules if numel > 2 * segment]
        segment = min([_round_up(segment, step), *halves])


def _least_crossed_once(numel: int, granule: int, segment: int) -> int:
    """Return the least segment from ``segment`` on that holds the tensor, or at most cuts it once, between granules.

    Before that boundary there is room for whole granules only, and the rest must fit after it.
    """
    if numel <= segment or segment % granule == 0:
        return segment
    # Either the segment grows until what is behind the boundary fits, or until one more granule fits in front of it.
    in_front = segment // granule * granule
    return min(max(segment, numel - in_front), in_front + granule)


def _pack_aligned(slots: Sequence[TensorSlot], num_ranks: int, alignment: int) -> FlatLayout:
    """Pack by first fit into the least segment that holds all; starts and segment are multiples of ``alignment``."""
    kinds = _kinds(slots)
    filled = [index for index, slot in enumerate(slots) if slot.numel]
    # Large granules first, since they are the hardest to place; single elements last, which fit anywhere.
    # Ties keep the order of parameters (the sort is stable): ranks must place tensors the same.
    filled.sort(key=lambda index: (-slots[index].granule_numel, -slots[index].numel))
    segment = least_segment_of(slots, num_ranks=num_ranks, alignment=alignment)
    for trial in count():
        # The larger first: what crosses boundaries wants the long free stretch, what does not fills the gaps.
        order = sorted(filled, key=lambda index: slots[index].numel <= segment)
        starts, end = _place(slots, order, segment, alignment)
        if end <= num_ranks * segment:
            break
        # A part of the overrun: gaps close as segments grow, so the whole of it would be too much.
        step = max(1, (end - num_ranks * segment) // (_OVERRUN_SHARE * num_ranks))
        coarse = segment // 256 if trial > _FINE_TRIALS else 0
        segment = _next_segment(kinds, alignment, at_least=segment + max(step, coarse))
    placed = tuple(replace(slot, start=start) for slot, start in zip(slots, starts, strict=True))
    return FlatLayout(placed, num_ranks, segment)


def _place(slots: Sequence[TensorSlot], order: list[int], segment: int, alignment: int) -> tuple[list[int], int]:
    """Place tensors by first fit in this order, as if the buffer had no end; return their starts [T] and the end."""
    starts = [0] * len(slots)
    gaps: list[tuple[int, int]] = []
    end = 0
    for index in order:
        numel, granule = slots[index].numel, math.lcm(slots[index].granule_numel, alignment)
        for at, (gap_begin, gap_end) in enumerate(gaps):
            if gap_end - gap_begin < numel:
                continue
            start = _first_start(gap_begin, numel, granule, segment, alignment)
            if start + numel <= gap_end:
                pieces = ((gap_begin, start), (start + numel, gap_end))
                gaps[at : at + 1] = [(begin, stop) for begin, stop in pieces if stop > begin]
                break
        else:
            start = _first_start(end, numel, granule, segment, alignment)
            if start > end:
                gaps.append((end, start))
            end = start + numel
        starts[index] = start
    return starts, end


def _first_start(position: int, numel: int, granule: int, segment: int, alignment: int) -> int:
    """Return the least aligned start from ``position`` on at which no boundary cuts a granule.

    ``granule`` is the least multiple of the tensor's that keeps the alignment. One of four starts does, since the segment
    comes from ``_next_segment``: in this segment, across its end, in the next one, or across the end of that.
    """
    start = _round_up(position, alignment)
    for boundary in ((start // segment + 1) * segment, (start // segment + 2) * segment):
        # A start before this segment was ruled out in the last round.
        start = max(start, boundary - segment)
        if start + numel <= boundary:
            return start
        crossing = boundary - (boundary - start) // granule * granule
        if crossing < boundary and (segment % granule == 0 or crossing + numel <= boundary + segment):
            return crossing
    raise AssertionError(f"a tensor of {numel} elements in granules of {granule} does not fit segments of {segment}")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@functools.lru_cache(maxsize=256)  # the layers of a model have the same layouts
def padding_by_granule(layout: FlatLayout) -> Mapping[str, int]:
    """Return the layout's padding elements, which add up to ``padding_numel``, by what tensors are cut between.

    The tensors of the largest granule are packed again as if they could be cut anywhere, and what that saves is their
    share; then those of the next granule, and so on. What is left is for "alignment".

    Ranks: pure.
    """
    members: dict[Granule, list[int]] = defaultdict(list)
    for index, slot in sorted(enumerate(layout.slots), key=lambda item: -item[1].granule_numel):
        members[slot.granule].append(index)
    shapes, granules = [slot.shape for slot in layout.slots], [slot.granule for slot in layout.slots]
    left, found = layout.padding_numel, {}
    for granule, indices in members.items():
        for index in indices:
            # As a vector a tensor can be cut at each element.
            shapes[index], granules[index] = torch.Size((layout.slots[index].numel,)), Granule.row()
        # First fit may do worse with tensors that are easier to place.
        least = min(left, pack_rows(shapes, num_ranks=layout.num_ranks, granules=granules).padding_numel)
        found[str(granule)], left = left - least, least
    return {**found, "alignment": left}
