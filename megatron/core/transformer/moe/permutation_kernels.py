"""Triton kernels of ``permutation.py``, which imports them where Triton is installed.

A dozen small operations of torch cost the host far more than the device. Each element is written by one program, in the
order of assignments, so results are bitwise reproducible.

Shapes: t tokens, k experts of a token, a assignments (t * k), e experts, r rows, g ranks, l experts of a rank, n sums, c
summands of each, w width.
"""

from __future__ import annotations

import torch

from megatron.core.extensions.triton_language import tl, triton

ASSIGNMENTS_AT_ONCE = 8192
ROWS_AT_ONCE = 1024
COLUMNS_AT_ONCE = 1024


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _assignments_kernel(  # type: ignore[no-untyped-def]
    experts, sources, tokens, places, counts, ends, num_assignments, TOPK: tl.constexpr, BLOCK: tl.constexpr
):
    """Sort assignments by expert. One program per expert: it counts those of earlier experts, then writes its own."""
    expert = tl.program_id(0)
    inside = tl.arange(0, BLOCK)
    smaller = tl.zeros((BLOCK,), dtype=tl.int32)
    start = 0
    while start < num_assignments:
        at = start + inside
        there = at < num_assignments
        smaller += (there & (tl.load(experts + at, mask=there, other=0) < expert)).to(tl.int32)
        start += BLOCK
    first = tl.sum(smaller, axis=0)
    row = first
    start = 0
    while start < num_assignments:
        at = start + inside
        there = at < num_assignments
        own = there & (tl.load(experts + at, mask=there, other=0) == expert)
        rows = row + tl.cumsum(own.to(tl.int32), axis=0) - 1
        tl.store(sources + rows, at, mask=own)
        tl.store(tokens + rows, at // TOPK, mask=own)
        tl.store(places + at, rows, mask=own)
        row += tl.sum(own.to(tl.int32), axis=0)
        start += BLOCK
    tl.store(counts + expert, row - first)
    tl.store(ends + expert, row)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _blocks_kernel(  # type: ignore[no-untyped-def]
    sizes,
    sources,
    places,
    counts,
    ends,
    NUM_RANKS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Permute received rows into expert order. One program per block of rows, those of one rank and one expert.

    ``PADDED`` is a power of two, at least g * l.
    """
    block = tl.program_id(0)
    rank = block // NUM_EXPERTS
    expert = block % NUM_EXPERTS
    blocks = tl.arange(0, PADDED)
    extents = tl.load(sizes + blocks, mask=blocks < NUM_RANKS * NUM_EXPERTS, other=0).to(tl.int32)
    of_smaller = tl.sum(tl.where(blocks % NUM_EXPERTS < expert, extents, 0), axis=0)
    is_earlier = blocks // NUM_EXPERTS < rank
    of_same = tl.sum(tl.where((blocks % NUM_EXPERTS == expert) & is_earlier, extents, 0), axis=0)
    arrived = tl.sum(tl.where(blocks < block, extents, 0), axis=0)
    extent = tl.sum(tl.where(blocks == block, extents, 0), axis=0)
    row = of_smaller + of_same
    inside = tl.arange(0, BLOCK)
    start = 0
    while start < extent:
        at = start + inside
        tl.store(sources + row + at, arrived + at, mask=at < extent)
        tl.store(places + arrived + at, row + at, mask=at < extent)
        start += BLOCK
    if rank == NUM_RANKS - 1:
        tl.store(counts + expert, of_same + extent)
        tl.store(ends + expert, row + extent)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _sums_kernel(  # type: ignore[no-untyped-def]
    rows, places, sums, num_rows, width, COPIES: tl.constexpr, HAS_GAPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum the copies of rows. One program for ``BLOCK`` columns of one sum."""
    blocks = tl.cdiv(width, BLOCK)
    index = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    dtype = sums.dtype.element_ty
    total = tl.zeros((BLOCK,), dtype=tl.float64 if dtype == tl.float64 else tl.float32)
    for copy in tl.static_range(COPIES):
        row = tl.load(places + index * COPIES + copy)
        there = inside & (row < num_rows) if HAS_GAPS else inside
        total += tl.load(rows + row * width + columns, mask=there, other=0.0).to(total.dtype)
    tl.store(sums + index * width + columns, total.to(dtype), mask=inside)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copies_kernel(rows, places, copied, width, COPIES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy a row to all its places. One program for ``BLOCK`` columns of one row, which it reads once."""
    blocks = tl.cdiv(width, BLOCK)
    index = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    row = tl.load(rows + index * width + columns, mask=inside)
    for copy in tl.static_range(COPIES):
        place = tl.load(places + index * COPIES + copy)
        tl.store(copied + place * width + columns, row, mask=inside)


def sort_assignments(
    experts: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort the assignments of [t, k] experts by expert.

    Returns:
        The assignment of each row [a], its token [a], each assignment's row [t, k], counts [e] and ends [e] of the experts;
        ends are int32, all others int64.
    """
    experts = experts.contiguous()
    sources, tokens, places = experts.new_empty(3, experts.numel()).unbind()
    counts, ends = experts.new_empty(num_experts), experts.new_empty(num_experts, dtype=torch.int32)
    tensors = (experts, sources, tokens, places, counts, ends)
    numbers = (experts.numel(), experts.shape[1], ASSIGNMENTS_AT_ONCE)
    _assignments_kernel[(num_experts,)](*tensors, *numbers, num_warps=16)
    return sources, tokens, places.view(experts.shape), counts, ends


def sort_blocks(sizes: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Permute blocks of [g, l] rows to the order [l, g].

    Returns:
        The source of each row of the new order [r], the place of each row of the old one [r, 1], counts and ends [l].
    """
    num_ranks, num_experts = sizes.shape
    sources, places = sizes.new_empty(num_rows), sizes.new_empty(num_rows, 1)
    counts, ends = sizes.new_empty(num_experts), sizes.new_empty(num_experts, dtype=torch.int32)
    constants = (num_ranks, num_experts, triton.next_power_of_2(sizes.numel()), ROWS_AT_ONCE)
    _blocks_kernel[(sizes.numel(),)](sizes, sources, places, counts, ends, *constants, num_warps=4)
    return sources, places, counts, ends


def copy_rows(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Copy the rows [n, w] to their ``places`` [n, c], which are all rows of the result [n * c, w].

    On an H200 84 % of the copy bandwidth for 8 copies of 4 KiB, where gathering reads each row c times: 59 %.
    """
    rows, places = rows.contiguous(), places.contiguous()
    (num_rows, copies), width = places.shape, rows.shape[1]
    copied = rows.new_empty(num_rows * copies, width)
    num_programs = num_rows * triton.cdiv(width, COLUMNS_AT_ONCE)
    if num_programs > 0:
        _copies_kernel[(num_programs,)](rows, places, copied, width, copies, COLUMNS_AT_ONCE, num_warps=4)
    return copied


def sum_rows(rows: torch.Tensor, places: torch.Tensor, *, has_gaps: bool) -> torch.Tensor:
    """Sum the rows [r, w] at ``places`` [n, c] to [n, w], in the order of the places and in fp32 at least.

    With ``has_gaps`` some places are r, which means no row.
    """
    rows, places = rows.contiguous(), places.contiguous()
    (num_sums, copies), (num_rows, width) = places.shape, rows.shape
    sums = rows.new_empty(num_sums, width)
    num_programs = num_sums * triton.cdiv(width, COLUMNS_AT_ONCE)
    if num_programs > 0:
        numbers = (num_rows, width, copies, has_gaps, COLUMNS_AT_ONCE)
        _sums_kernel[(num_programs,)](rows, places, sums, *numbers, num_warps=4)
    return sums
