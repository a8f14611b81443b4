"""Which tensors of a unit share a flat buffer, and which have their rows cut, so that little of it is padding.

Few buffers are few collectives, whole rows are simple DTensors; padding is memory and traffic on every rank. So: whole
rows in one buffer if that keeps to a budget; else in more buffers; and only where no choice of buffers does, rows are
cut, as coarsely as the budget allows. [Note: what rows cost] in DESIGN.md.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout, TensorSlot, least_segment_of, pack_rows

# Partitions are searched over this many kinds of tensors at most (Bell(7) = 877); smaller kinds go together.
_MAX_KINDS = 7
# Partitions of one size that are really packed, best bound first, before the search goes on to more buffers.
_MAX_TRIALS = 24

# Indices of the tensors of one buffer, ascending.
_Members = tuple[int, ...]


@dataclass(frozen=True)
class RowGroup:
    """Tensors that share a buffer: which ones, by index, ascending; and their layout, in this order."""

    members: tuple[int, ...]
    layout: FlatLayout


def group_by_rows(
    shapes: Sequence[torch.Size],
    *,
    num_ranks: int,
    alignment: int = 64,
    max_padding: float = 0.02,
    least_numel_to_cut: int = 2**20,
) -> list[RowGroup]:
    """Lay tensors out in the fewest buffers that together keep to a budget of padding.

    Row sizes are kept together first; where that does not keep the budget, tensors of one shape may also move to the
    buffer of another row size, to fill its tail; where that does not either, the rows of tensors larger than what a rank
    holds are cut into equal parts (``TensorSlot.row_parts``): into the fewest for which the budget is kept. The search is
    bounded, so a better partition may exist.

    Args:
        shapes: [T] shapes of the tensors, in parameter order.
        num_ranks: ranks that share each buffer evenly.
        alignment: elements, as for ``pack_rows``.
        max_padding: padding elements allowed for each used one, over all buffers together. ``alignment`` elements for
            each tensor and two for each rank are always allowed, so that tiny units stay in one buffer.
        least_numel_to_cut: tensors of fewer elements together keep whole rows: what they lose is little, and whole rows are
            simpler to work with.

    Returns:
        The buffers, ordered by their first tensor; where nothing that was tried keeps the budget, those of the least
        padding.

    Raises:
        ValueError: ``num_ranks`` or ``alignment`` is not positive.

    Ranks: pure; every rank computes the same answer.
    """
    return list(_groups(tuple(map(torch.Size, shapes)), num_ranks, alignment, max_padding, least_numel_to_cut))


# The layers of a model have the same shapes.
@functools.lru_cache(maxsize=256)
def _groups(
    shapes: tuple[torch.Size, ...], num_ranks: int, alignment: int, max_padding: float, least_numel_to_cut: int
) -> tuple[RowGroup, ...]:
    whole = _Cut([TensorSlot(shape, 0) for shape in shapes], num_ranks, alignment)
    allowed = max(max_padding * whole.used_numel, alignment * (2 * num_ranks + len(shapes)))
    cut, partition = whole, whole.best_partition(allowed)
    if whole.padding(partition) > allowed and num_ranks > 1 and whole.used_numel >= least_numel_to_cut:
        for finer in _finer_cuts(whole):
            found = finer.best_partition(allowed, at_most=allowed)
            if finer.padding(found) < cut.padding(partition):
                cut, partition = finer, found
            if cut.padding(partition) <= allowed:
                cut = _without_needless_parts(cut, partition, allowed)
                break
    return tuple(RowGroup(members, cut.layout(members)) for members in partition if members)


class _Cut:
    """Tensors whose rows are cut in one way, and the partitions of these into buffers.

    Args:
        slots: [T] shapes and row parts; their starts do not matter.
    """

    def __init__(self, slots: Sequence[TensorSlot], num_ranks: int, alignment: int) -> None:
        self.slots, self.num_ranks, self.alignment = list(slots), num_ranks, alignment
        self.used_numel = sum(slot.numel for slot in slots)
        self._layouts: dict[_Members, FlatLayout] = {}
        self._bounds: dict[_Members, int] = {}

    def with_parts(self, row_parts: Sequence[int]) -> _Cut:
        """The same tensors, their rows cut into so many parts [T]."""
        slots = [TensorSlot(slot.shape, 0, parts) for slot, parts in zip(self.slots, row_parts, strict=True)]
        return _Cut(slots, self.num_ranks, self.alignment)

    def layout(self, members: _Members) -> FlatLayout:
        if members not in self._layouts:
            slots = [self.slots[index] for index in members]
            self._layouts[members] = pack_rows(
                [slot.shape for slot in slots],
                num_ranks=self.num_ranks,
                alignment=self.alignment,
                row_parts=[slot.row_parts for slot in slots],
            )
        return self._layouts[members]

    def padding(self, partition: Sequence[_Members]) -> int:
        """Padding elements of all buffers together."""
        return sum(self.layout(members).padding_numel for members in partition)

    def best_partition(self, allowed: float, *, at_most: float = math.inf) -> list[_Members]:
        """The first, from one buffer up, whose padding is allowed; else that of the least padding.

        Args:
            at_most: partitions that must have more padding than that are not tried.
        """
        by_row = self._kinds(lambda slot: slot.row_numel)
        by_shape = self._kinds(lambda slot: tuple(slot.shape))
        best: list[_Members] = [tuple(range(len(self.slots)))]
        least = self.padding(best)
        for num_groups in range(2, max(len(by_row), len(by_shape)) + 1):
            for kinds in (by_row, by_shape):
                if least <= allowed:
                    return best
                for partition in self._partitions(kinds, num_groups, at_most)[:_MAX_TRIALS]:
                    padding = self.padding(partition)
                    if padding < least:
                        best, least = partition, padding
        return best

    def _kinds(self, key: Callable[[TensorSlot], Hashable]) -> list[list[int]]:
        """Indices of the tensors, put together by a key: the largest kinds, and the rest as one."""
        found: dict[Hashable, list[int]] = defaultdict(list)
        for index, slot in enumerate(self.slots):
            found[key(slot)].append(index)
        by_size = sorted(found.values(), key=lambda members: -sum(self.slots[index].numel for index in members))
        rest = [index for members in by_size[_MAX_KINDS - 1 :] for index in members]
        return by_size[: _MAX_KINDS - 1] + ([rest] if rest else [])

    def _partitions(self, kinds: list[list[int]], num_groups: int, at_most: float) -> list[list[_Members]]:
        """All partitions of the kinds into so many buffers, the one of least possible padding first."""
        found = []
        for groups in _partitions(len(kinds), num_groups):
            partition = sorted(tuple(sorted(index for kind in group for index in kinds[kind])) for group in groups)
            bound = sum(map(self._least_numel, partition))
            if bound - self.used_numel <= at_most:
                found.append((bound, partition))
        return [partition for _, partition in sorted(found)]

    def _least_numel(self, members: _Members) -> int:
        if members not in self._bounds:
            slots = [self.slots[index] for index in members]
            least = least_segment_of(slots, num_ranks=self.num_ranks, alignment=self.alignment)
            self._bounds[members] = self.num_ranks * least
        return self._bounds[members]


def _partitions(num_items: int, num_groups: int) -> Iterator[list[list[int]]]:
    """Each way to put items 0..num_items-1 into exactly ``num_groups`` groups, once."""

    def place(item: int, groups: list[list[int]]) -> Iterator[list[list[int]]]:
        if num_groups - len(groups) > num_items - item:
            return
        if item == num_items:
            yield groups
            return
        for at, group in enumerate(groups):
            yield from place(item + 1, [*groups[:at], [*group, item], *groups[at + 1 :]])
        if len(groups) < num_groups:
            yield from place(item + 1, [*groups, [item]])

    return place(0, [])


def _finer_cuts(whole: _Cut) -> Iterator[_Cut]:
    """The tensors with their rows cut so that none is longer than a limit, for shorter and shorter limits.

    Only tensors larger than what a rank holds, which must cross a boundary, are cut.
    """
    crossing = [index for index, slot in enumerate(whole.slots) if slot.numel * whole.num_ranks > whole.used_numel]
    choices = {index: _row_parts(whole.slots[index].shape, whole.alignment) for index in crossing}
    lengths = {length for of_tensor in choices.values() for length in of_tensor.values()}
    before = [1] * len(whole.slots)
    for limit in sorted(lengths, reverse=True):
        row_parts = [1] * len(whole.slots)
        for index, of_tensor in choices.items():
            short = [parts for parts, length in of_tensor.items() if length <= limit]
            row_parts[index] = short[0] if short else max(of_tensor)
        if row_parts != before:
            yield whole.with_parts(row_parts)
        before = row_parts


@functools.lru_cache(maxsize=256)
def _row_parts(shape: torch.Size, alignment: int) -> dict[int, int]:
    """The numbers of parts that a row may have, ascending, and the elements between two places where it can be cut then.

    Such places are multiples of the alignment, so more parts are listed only where they bring them closer.
    """
    row_numel = math.prod(shape[1:])
    found = {1: math.lcm(row_numel, alignment)}
    for parts in _divisors(shape[1]) if row_numel and len(shape) > 1 else ():
        length = math.lcm(row_numel // parts, alignment)
        if length < min(found.values()):
            found[parts] = length
    return found


def _divisors(number: int) -> list[int]:
    """Ascending; of a positive number."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _without_needless_parts(cut: _Cut, partition: Sequence[_Members], allowed: float) -> _Cut:
    """The same buffers, with each shape's rows in the fewest parts for which their padding is allowed."""
    for shape in dict.fromkeys(slot.shape for slot in cut.slots if slot.row_parts > 1):
        for parts in _row_parts(shape, cut.alignment):
            fewer = cut.with_parts(
                [min(slot.row_parts, parts) if slot.shape == shape else slot.row_parts for slot in cut.slots]
            )
            if fewer.padding(partition) <= allowed:
                cut = fewer
                break
    return cut
