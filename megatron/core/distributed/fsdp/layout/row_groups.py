"""Which tensors of a unit share a flat buffer, and which have their rows cut, so that little of it is padding.

Few buffers are few collectives, and whole rows are simple DTensors. So the first of these is taken that keeps the budget of
``PaddingPolicy``: whole rows in one buffer, whole rows in several buffers, parts of rows, as large as the budget allows.
A tensor that asks for a granule keeps it in all of them. [Note: what rows cost].
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from megatron.core.distributed.fsdp.layout.flat_layout import (
    FlatLayout,
    PaddingPolicy,
    TensorSlot,
    least_segment_of,
    pack_rows,
)
from megatron.core.distributed.fsdp.layout.granule import Granule

# Partitions are searched over this many kinds of tensors at most (Bell(7) = 877); smaller kinds go together.
_MAX_KINDS = 7
# Partitions of one size that are really packed, best bound first, before the search goes on to more buffers.
_MAX_TRIALS = 24

# Indices of the tensors of one buffer, ascending.
_Buffer = tuple[int, ...]


@dataclass(frozen=True)
class RowGroup:
    """Tensors that share a buffer: their indices, ascending, and their layout, in this order."""

    members: tuple[int, ...]
    layout: FlatLayout


def group_by_rows(
    shapes: Sequence[torch.Size],
    *,
    num_ranks: int,
    granules: Sequence[Granule | None] | None = None,
    policy: PaddingPolicy | None = None,
) -> list[RowGroup]:
    """Lay tensors out in the fewest buffers that together keep to a budget of padding.

    Tensors of one row size stay together first. Where that does not keep the budget, tensors of one shape may also move to
    the buffer of another row size, to fill its tail. Where that does not either, the rows of tensors larger than what a
    rank holds are cut into equal parts: into the fewest that keep the budget. The search is bounded, so a better
    partition may exist.

    Args:
        shapes: [T] shapes of the tensors, in parameter order.
        num_ranks: ranks that share each buffer evenly.
        granules: [T] what each tensor asks for; None for a row, which may be cut into parts. What the tensors that ask
            need by themselves is not held against the budget of the others.
        policy: the budget; the default one when None.

    Returns:
        The buffers, ordered by their first tensor; where nothing that was tried keeps the budget, those of the least
        padding.

    Raises:
        ValueError: ``num_ranks`` or the alignment is not positive; a granule does not fit its tensor.

    Ranks: pure; every rank computes the same answer.
    """
    asked = (None,) * len(shapes) if granules is None else tuple(granules)
    return list(_groups(tuple(map(torch.Size, shapes)), asked, num_ranks, policy or PaddingPolicy()))


# The layers of a model have the same shapes.
@functools.lru_cache(maxsize=256)
def _groups(
    shapes: tuple[torch.Size, ...], asked: tuple[Granule | None, ...], num_ranks: int, policy: PaddingPolicy
) -> tuple[RowGroup, ...]:
    slots = [TensorSlot(shape, 0, granule or Granule.row()) for shape, granule in zip(shapes, asked, strict=True)]
    if num_ranks == 1:  # nothing is cut
        slots = [replace(slot, granule=Granule.row()) for slot in slots]
    free = [index for index, granule in enumerate(asked) if granule is None]
    whole = _Candidate(slots, num_ranks, policy)
    # What users ask for is theirs to pay: it must not force the other tensors into parts of rows.
    allowed = max(whole.allowed, _allowed_with_asked(whole, free))
    best, partition = whole, whole.best_partition(allowed)
    if whole.padding(partition) > allowed and num_ranks > 1 and whole.used_numel >= policy.least_numel_to_cut:
        for finer in _finer_cuts(whole, free):
            found = finer.best_partition(allowed, at_most=allowed)
            if finer.padding(found) < best.padding(partition):
                best, partition = finer, found
            if best.padding(partition) <= allowed:
                # Fewer parts are simpler DTensors, and a limit on lengths cuts some tensors more than the budget needs.
                best = _without_needless_parts(best, free, partition, allowed)
                break
    return tuple(RowGroup(buffer, best.layout(buffer)) for buffer in partition if buffer)


class _Candidate:
    """Tensors with one choice of granules, and the partitions of these tensors into buffers.

    Args:
        slots: [T] shapes and granules; their starts do not matter.
    """

    def __init__(self, slots: Sequence[TensorSlot], num_ranks: int, policy: PaddingPolicy) -> None:
        self.slots, self.num_ranks, self.policy = list(slots), num_ranks, policy
        self.used_numel = sum(slot.numel for slot in slots)
        self._layouts: dict[_Buffer, FlatLayout] = {}
        self._bounds: dict[_Buffer, int] = {}

    @property
    def allowed(self) -> float:
        """Padding elements that the policy allows all buffers together."""
        return self.policy.allowed(self.used_numel, len(self.slots), self.num_ranks)

    def with_parts(self, parts: Mapping[int, int]) -> _Candidate:
        """Return the same tensors with the rows of some, by index, cut into so many parts."""
        slots = [
            replace(slot, granule=Granule.row_parts(parts[index])) if index in parts else slot
            for index, slot in enumerate(self.slots)
        ]
        return _Candidate(slots, self.num_ranks, self.policy)

    def of(self, indices: Sequence[int]) -> _Candidate:
        """Return these tensors alone."""
        return _Candidate([self.slots[index] for index in indices], self.num_ranks, self.policy)

    def layout(self, buffer: _Buffer) -> FlatLayout:
        """Lay out one buffer."""
        if buffer not in self._layouts:
            slots = [self.slots[index] for index in buffer]
            self._layouts[buffer] = pack_rows(
                [slot.shape for slot in slots],
                num_ranks=self.num_ranks,
                alignment=self.policy.alignment,
                granules=[slot.granule for slot in slots],
            )
        return self._layouts[buffer]

    def padding(self, partition: Sequence[_Buffer]) -> int:
        """Count the padding elements of all buffers together."""
        return sum(self.layout(buffer).padding_numel for buffer in partition)

    def best_partition(self, allowed: float, *, at_most: float = math.inf) -> list[_Buffer]:
        """Return the first partition, from one buffer up, whose padding is allowed; else that of the least padding.

        Args:
            at_most: partitions that must have more padding than that are not tried.
        """
        by_granule = self._kinds(lambda slot: slot.granule_numel)
        by_shape = self._kinds(lambda slot: (slot.shape, slot.granule))
        best: list[_Buffer] = [tuple(range(len(self.slots)))]
        least = self.padding(best)
        for num_buffers in range(2, max(len(by_granule), len(by_shape)) + 1):
            for kinds in (by_granule, by_shape):
                if least <= allowed:
                    return best
                # Packing is slow, so only partitions of the least bounds are packed.
                for partition in self._partitions(kinds, num_buffers, at_most)[:_MAX_TRIALS]:
                    padding = self.padding(partition)
                    if padding < least:
                        best, least = partition, padding
        return best

    def _kinds(self, key: Callable[[TensorSlot], Hashable]) -> list[list[int]]:
        """Return the indices of the tensors, put together by a key: the largest kinds, and the rest as one."""
        found: dict[Hashable, list[int]] = defaultdict(list)
        for index, slot in enumerate(self.slots):
            found[key(slot)].append(index)
        by_size = sorted(found.values(), key=lambda members: -sum(self.slots[index].numel for index in members))
        # Small tensors together are little padding wherever they are.
        rest = [index for members in by_size[_MAX_KINDS - 1 :] for index in members]
        return by_size[: _MAX_KINDS - 1] + ([rest] if rest else [])

    def _partitions(self, kinds: list[list[int]], num_buffers: int, at_most: float) -> list[list[_Buffer]]:
        """Return all partitions of the kinds into so many buffers, the one of least possible padding first."""
        found = []
        for groups in _partitions(len(kinds), num_buffers):
            partition = sorted(tuple(sorted(index for kind in group for index in kinds[kind])) for group in groups)
            bound = sum(map(self._least_numel, partition))
            if bound - self.used_numel <= at_most:
                found.append((bound, partition))
        return [partition for _, partition in sorted(found)]

    def _least_numel(self, buffer: _Buffer) -> int:
        if buffer not in self._bounds:
            slots = [self.slots[index] for index in buffer]
            least = least_segment_of(slots, num_ranks=self.num_ranks, alignment=self.policy.alignment)
            self._bounds[buffer] = self.num_ranks * least
        return self._bounds[buffer]


def _partitions(num_items: int, num_buffers: int) -> Iterator[list[list[int]]]:
    """Yield each way to put items 0..num_items-1 into exactly ``num_buffers`` buffers, once."""

    def place(item: int, groups: list[list[int]]) -> Iterator[list[list[int]]]:
        # Not enough items are left to fill the buffers that are missing.
        if num_buffers - len(groups) > num_items - item:
            return
        if item == num_items:
            yield groups
            return
        for at, group in enumerate(groups):
            yield from place(item + 1, [*groups[:at], [*group, item], *groups[at + 1 :]])
        # Only behind the others, so that each partition comes once, not once for each order of its buffers.
        if len(groups) < num_buffers:
            yield from place(item + 1, [*groups, [item]])

    return place(0, [])


def _allowed_with_asked(whole: _Candidate, free: Sequence[int]) -> float:
    """Return the padding of the tensors that ask for a granule, in buffers of their own, plus the budget of the others."""
    asking = whole.of([index for index in range(len(whole.slots)) if index not in free])
    if not asking.slots:
        return 0
    return asking.padding(asking.best_partition(asking.allowed)) + whole.of(free).allowed


def _finer_cuts(whole: _Candidate, free: Sequence[int]) -> Iterator[_Candidate]:
    """Yield the tensors with the rows of free ones cut so that none is longer than a limit, for shorter and shorter limits.

    Only tensors larger than what a rank holds, which must cross a boundary, are cut.
    """
    # A smaller one fits into a segment, where nothing cuts it.
    crossing = [index for index in free if whole.slots[index].numel * whole.num_ranks > whole.used_numel]
    choices = {index: _row_parts(whole.slots[index].shape, whole.policy.alignment) for index in crossing}
    lengths = {length for of_tensor in choices.values() for length in of_tensor.values()}
    before = dict.fromkeys(choices, 1)
    for limit in sorted(lengths, reverse=True):
        parts = {}
        for index, of_tensor in choices.items():
            # The fewest parts that are short enough come first.
            short = [parts for parts, length in of_tensor.items() if length <= limit]
            parts[index] = short[0] if short else max(of_tensor)
        if parts != before:
            yield whole.with_parts(parts)
        before = parts


@functools.lru_cache(maxsize=256)
def _row_parts(shape: torch.Size, alignment: int) -> dict[int, int]:
    """Return the numbers of parts that a row may have, ascending, and the elements between two cuts for each.

    Cuts are multiples of the alignment, so more parts are listed only where they bring cuts closer.
    """
    row_numel = math.prod(shape[1:])
    found = {1: math.lcm(row_numel, alignment)}
    for parts in range(2, shape[1] + 1) if row_numel and len(shape) > 1 else ():
        if shape[1] % parts:
            continue
        length = math.lcm(row_numel // parts, alignment)
        if length < min(found.values()):
            found[parts] = length
    return found


def _without_needless_parts(
    best: _Candidate, free: Sequence[int], partition: Sequence[_Buffer], allowed: float
) -> _Candidate:
    """Return the same buffers with each shape's rows in the fewest parts for which their padding is allowed."""
    cut = {index: best.slots[index].shape for index in free if best.slots[index].row_parts > 1}
    for shape in dict.fromkeys(cut.values()):
        for parts in _row_parts(shape, best.policy.alignment):
            # One shape at a time, since layers of one shape should be cut in the same way: optimizers batch them.
            fewer = best.with_parts({i: min(best.slots[i].row_parts, parts) for i in cut if cut[i] == shape})
            if fewer.padding(partition) <= allowed:
                best = fewer
                break
    return best
