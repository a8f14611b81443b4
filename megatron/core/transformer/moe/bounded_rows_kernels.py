"""Triton kernels of ``bounded_rows.py``, which imports them where Triton is installed.

Each element is written by one program, in the order of assignments, so results are bitwise reproducible.

Shapes: t tokens, k experts of a token, a assignments (t * k), e experts, o owners of experts, c copies of a row, g ranks, l experts of a
rank, r rows.
"""

from __future__ import annotations

import torch

from megatron.core.extensions.triton_language import tl, triton
from megatron.core.transformer.moe.permutation_kernels import ASSIGNMENTS_AT_ONCE, ROWS_AT_ONCE


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _bounded_assignments_kernel(  # type: ignore[no-untyped-def]
    experts,
    sources,
    tokens,
    places,
    counts,
    num_assignments,
    num_rows,
    capacity,
    TOPK: tl.constexpr,
    LOCAL: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sort assignments by expert. One program per expert: it counts those of its owner's earlier experts, then writes its own.

    The program of an owner's last expert marks the owner's rows that are left as padding.
    """
    expert = tl.program_id(0)
    owner = expert // LOCAL
    inside = tl.arange(0, BLOCK)
    earlier = tl.zeros((BLOCK,), dtype=tl.int32)
    start = 0
    while start < num_assignments:
        at = start + inside
        there = at < num_assignments
        value = tl.load(experts + at, mask=there, other=0)
        earlier += (there & (value < expert) & (value >= owner * LOCAL)).to(tl.int32)
        start += BLOCK
    first = tl.sum(earlier, axis=0)
    row = first
    start = 0
    while start < num_assignments:
        at = start + inside
        there = at < num_assignments
        own = there & (tl.load(experts + at, mask=there, other=0) == expert)
        within = row + tl.cumsum(own.to(tl.int32), axis=0) - 1
        fits = own & (within < capacity)
        for copy in tl.static_range(COPIES):
            slot = (owner * COPIES + copy) * capacity + within
            tl.store(sources + slot, at, mask=fits)
            tl.store(tokens + slot, at // TOPK, mask=fits)
            tl.store(places + at * COPIES + copy, tl.where(fits, slot, num_rows), mask=own)
        row += tl.sum(own.to(tl.int32), axis=0)
        start += BLOCK
    end = tl.minimum(row, capacity)
    tl.store(counts + expert, end - tl.minimum(first, capacity))
    if expert % LOCAL == LOCAL - 1:
        start = end
        while start < capacity:
            within = start + inside
            for copy in tl.static_range(COPIES):
                slot = (owner * COPIES + copy) * capacity + within
                tl.store(sources + slot, num_assignments, mask=within < capacity)
                tl.store(tokens + slot, num_assignments // TOPK, mask=within < capacity)
            start += BLOCK


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _bounded_blocks_kernel(  # type: ignore[no-untyped-def]
    sizes,
    sources,
    places,
    counts,
    ends,
    num_rows,
    capacity,
    NUM_RANKS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Permute received rows into expert order. One program per block of rows, those of one rank and one expert.

    The program of a rank's last expert marks the rank's padding, and the very last one the padding after all experts. ``PADDED``
    is a power of two, at least g * l.
    """
    block = tl.program_id(0)
    rank = block // NUM_EXPERTS
    expert = block % NUM_EXPERTS
    blocks = tl.arange(0, PADDED)
    extents = tl.load(sizes + blocks, mask=blocks < NUM_RANKS * NUM_EXPERTS, other=0).to(tl.int32)
    of_smaller = tl.sum(tl.where(blocks % NUM_EXPERTS < expert, extents, 0), axis=0)
    of_same = tl.sum(tl.where((blocks % NUM_EXPERTS == expert) & (blocks // NUM_EXPERTS < rank), extents, 0), axis=0)
    before = tl.sum(tl.where((blocks // NUM_EXPERTS == rank) & (blocks < block), extents, 0), axis=0)
    extent = tl.sum(tl.where(blocks == block, extents, 0), axis=0)
    arrived = rank * capacity + before
    row = of_smaller + of_same
    inside = tl.arange(0, BLOCK)
    start = 0
    while start < extent:
        at = start + inside
        tl.store(sources + row + at, arrived + at, mask=at < extent)
        tl.store(places + arrived + at, row + at, mask=at < extent)
        start += BLOCK
    if expert == NUM_EXPERTS - 1:
        start = before + extent
        while start < capacity:
            at = start + inside
            tl.store(places + rank * capacity + at, num_rows, mask=at < capacity)
            start += BLOCK
    if rank == NUM_RANKS - 1:
        tl.store(counts + expert, of_same + extent)
        tl.store(ends + expert, row + extent)
        if expert == NUM_EXPERTS - 1:
            start = row + extent
            while start < num_rows:
                at = start + inside
                tl.store(sources + at, num_rows, mask=at < num_rows)
                start += BLOCK


def sort_bounded(
    experts: torch.Tensor, num_experts: int, *, num_owners: int, num_copies: int, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the assignments of [t, k] experts by expert into ``capacity`` rows of each copy of each owner.

    Returns:
        The assignment of each row [o * c * capacity] (a: none), its token (t: none), each assignment's rows [t, k * c] (the number of
        rows: none), and the counts [e] of assignments that have rows; all int64.
    """
    experts = experts.contiguous()
    num_rows = num_owners * num_copies * capacity
    sources, tokens = experts.new_empty(2, num_rows).unbind()
    places = experts.new_empty(experts.shape[0], experts.shape[1] * num_copies)
    counts = experts.new_empty(num_experts)
    numbers = (experts.numel(), num_rows, capacity)
    constants = (experts.shape[1], num_experts // num_owners, num_copies, ASSIGNMENTS_AT_ONCE)
    _bounded_assignments_kernel[(num_experts,)](
        experts, sources, tokens, places, counts, *numbers, *constants, num_warps=16
    )
    return sources, tokens, places, counts


def sort_bounded_blocks(
    sizes: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Permute blocks of [g, l] rows, ``capacity`` of each rank with its padding, to the order [l, g] with all padding last.

    Returns:
        The source of each row of the new order [g * capacity] (as many: none), the place of each row of the old one [g * capacity, 1],
        counts and ends [l]; ends are int32, all others int64.
    """
    num_ranks, num_experts = sizes.shape
    num_rows = num_ranks * capacity
    sources, places = sizes.new_empty(num_rows), sizes.new_empty(num_rows, 1)
    counts, ends = sizes.new_empty(num_experts), sizes.new_empty(num_experts, dtype=torch.int32)
    constants = (num_ranks, num_experts, triton.next_power_of_2(sizes.numel()), ROWS_AT_ONCE)
    tensors = (sizes, sources, places, counts, ends)
    _bounded_blocks_kernel[(sizes.numel(),)](*tensors, num_rows, capacity, *constants, num_warps=4)
    return sources, places, counts, ends
