"""The sum of pieces as one Triton kernel, which is bound by memory bandwidth."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron.core.extensions.triton_language import tl, triton

# 16 elements for each of 128 threads: loads of 16 bytes, several of them in flight.
_BLOCK_NUMEL = 2048
_NUM_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    out, p0, p1, p2, p3, p4, p5, p6, p7, numel, scale, NUM_PIECES: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr
):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    total = tl.load(p0 + offsets, mask=inside, other=0.0).to(tl.float32)
    if NUM_PIECES > 1:
        total += tl.load(p1 + offsets, mask=inside, other=0.0).to(tl.float32)
    if NUM_PIECES > 2:
        total += tl.load(p2 + offsets, mask=inside, other=0.0).to(tl.float32)
    if NUM_PIECES > 3:
        total += tl.load(p3 + offsets, mask=inside, other=0.0).to(tl.float32)
    if NUM_PIECES > 4:
        total += tl.load(p4 + offsets, mask=inside, other=0.0).to(tl.float32)
    if NUM_PIECES > 5:
        total += tl.load(p5 + offsets, mask=inside, other=0.0).to(tl.float32)
    if NUM_PIECES > 6:
        total += tl.load(p6 + offsets, mask=inside, other=0.0).to(tl.float32)
    if NUM_PIECES > 7:
        total += tl.load(p7 + offsets, mask=inside, other=0.0).to(tl.float32)
    total = total * scale
    if ADDS:
        total += tl.load(out + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)


_ABSENT = [(None,) * (8 - count) for count in range(9)]


def sum_with_triton(out: Tensor, pieces: Sequence[Tensor], scale: float, accumulate: bool) -> None:
    """Do as ``sum_pieces`` for at most 8 contiguous pieces of 16 or 32 bits on the current device."""
    numel = out.numel()
    num_blocks = -(-numel // _BLOCK_NUMEL)
    if num_blocks == 0:
        return
    # numel keeps its specialisation: loads are wide where masks end at a multiple of 16 elements. That makes at most
    # two variants, times two by the alignment of the pointers.
    arguments = (out, *pieces, *_ABSENT[len(pieces)], numel, scale, len(pieces), accumulate, _BLOCK_NUMEL)
    _sum_kernel[(num_blocks,)](*arguments, num_warps=_NUM_WARPS)
