"""Megatron-FSDP's layout, for buffers that users construct: segments are multiples of the least common multiple of all row sizes.

Parameter groups use ``pack_rows``, which needs far less padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout, TensorSlot


def non_leading_numel(shape: torch.Size) -> int:
    """Return the number of elements of a row: all dims but the first; 1 for a tensor without dims."""
    return math.prod(shape[1:])


class GlobalLayout(FlatLayout):
    """A layout that ``build`` returns.

    Source: the methods of the class of this name in the package megatron-fsdp.
    """

    @classmethod
    def build(cls, shapes: Iterable[Iterable[int]], dp_size: int) -> GlobalLayout:
        """Place tensors for ``dp_size`` ranks; see ``pack_chunks``."""
        return pack_chunks(shapes, num_ranks=dp_size)


def pack_chunks(shapes: Iterable[Iterable[int]], *, num_ranks: int) -> GlobalLayout:
    """Place tensors in chunks of the least common multiple of their row sizes, so that all rank boundaries fall between rows.

    A tensor of at least one chunk starts at a chunk boundary. The free end of its last chunk takes the partial chunk of another
    such tensor, whose whole chunks follow, and then smaller tensors, largest first. Small tensors that do not fit come last.

    Args:
        shapes: [T] shapes of the tensors.

    Raises:
        ValueError: ``num_ranks`` is not positive, or a row has no elements.

    Ranks: pure; every rank computes the same result.
    Source: the rule of ``GlobalLayout`` of the package megatron-fsdp.
    """
    slots = [TensorSlot(torch.Size(shape), 0) for shape in shapes]
    if num_ranks < 1:
        raise ValueError(f"num_ranks must be positive, got {num_ranks}")
    for slot in slots:
        if slot.row_numel == 0:
            raise ValueError(f"rows must have elements, got a tensor of shape {list(slot.shape)}")
    chunk = math.lcm(*(slot.row_numel for slot in slots)) if slots else 1
    starts: dict[int, int] = {}
    large = [index for index, slot in enumerate(slots) if slot.numel >= chunk]
    small = sorted(set(range(len(slots))).difference(large), key=lambda index: (-slots[index].numel, index))
    end = 0
    while large:
        index = large.pop(0)
        starts[index], gap = end, end + slots[index].numel
        end = gap_end = _round_up(gap, chunk)
        if gap == gap_end:
            continue
        partner = next((other for other in large if 0 < slots[other].numel % chunk <= gap_end - gap), None)
        if partner is not None:
            large.remove(partner)
            whole, rest = divmod(slots[partner].numel, chunk)
            starts[partner] = gap_end = end - rest
            end += whole * chunk
        for index in list(small):
            start = _round_up(gap, slots[index].row_numel)
            if start + slots[index].numel <= gap_end:
                starts[index], gap = start, start + slots[index].numel
                small.remove(index)
    for index in small:
        starts[index] = _round_up(end, slots[index].row_numel)
        end = starts[index] + slots[index].numel
    placed = tuple(TensorSlot(slot.shape, starts[index]) for index, slot in enumerate(slots))
    return GlobalLayout(placed, num_ranks, _round_up(end, chunk * num_ranks) // num_ranks)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
