"""The sum of pieces as one Triton kernel, which is bound by memory bandwidth."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron.core.extensions.triton_language import tl, triton

# 16 elements for each of 128 threads: loads of 16 bytes, several of them in flight.
_BLOCK_NUMEL = 2048
_NUM_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(out, pieces, numel, scale, ADDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < numel
    # From the first piece to the last: ranks must add in one order to get the same bits.
    total = tl.load(pieces[0] + offsets, mask=inside, other=0.0).to(tl.float32)
    for index in tl.static_range(1, len(pieces)):
        total += tl.load(pieces[index] + offsets, mask=inside, other=0.0).to(tl.float32)
    total = total * scale
    if ADDS:
        total += tl.load(out + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)


def sum_with_triton(out: Tensor, pieces: Sequence[Tensor], scale: float, accumulate: bool) -> None:
    """Do as ``sum_pieces`` for at most 8 contiguous pieces of 16 or 32 bits on the current device."""
    numel = out.numel()
    num_blocks = -(-numel // _BLOCK_NUMEL)
    if num_blocks == 0:
        return
    # numel keeps its specialization: loads are wide where masks end at a multiple of 16 elements. That makes at most
    # two variants, times two by the alignment of the pointers.
    _sum_kernel[(num_blocks,)](out, tuple(pieces), numel, scale, accumulate, _BLOCK_NUMEL, num_warps=_NUM_WARPS)
