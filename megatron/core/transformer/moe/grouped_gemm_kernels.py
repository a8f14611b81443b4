"""The Triton kernel of ``grouped_gemm.py`` that writes weight gradients where they are reduced, or adds them there.

torch's grouped kernel returns new memory in bf16, so that each gradient would be written, read and written again, and rounded
before it is added.

Shapes: r rows, l experts, o output size, i input size.
"""

from __future__ import annotations

import torch

from megatron.core.extensions.triton_language import tl, triton

# Two programs fit on a multiprocessor of Hopper, so that one multiplies while the other reads and writes its part of the total.
TILE_O, TILE_I, TILE_R = 128, 128, 32
NUM_WARPS, NUM_STAGES = 4, 4
# Programs that follow each other take so many tiles of o, which share what they read of x.
TILES_TOGETHER = 8


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _weight_gradients_kernel(  # type: ignore[no-untyped-def]
    grads,
    x,
    ends,
    totals,
    distance,
    width_o,
    width_i,
    ADDS: tl.constexpr,
    TILE_O: tl.constexpr,
    TILE_I: tl.constexpr,
    TILE_R: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Compute one tile of one expert's gradient: its rows of ``grads`` [r, o] transposed times those of ``x`` [r, i]."""
    expert = tl.program_id(1)
    tiles_o, tiles_i = tl.cdiv(width_o, TILE_O), tl.cdiv(width_i, TILE_I)
    in_strip = TOGETHER * tiles_i
    strip, place = tl.program_id(0) // in_strip, tl.program_id(0) % in_strip
    first_o = strip * TOGETHER
    height = tl.minimum(tiles_o - first_o, TOGETHER)
    columns_o = (first_o + place % height) * TILE_O + tl.arange(0, TILE_O)
    columns_i = (place // height) * TILE_I + tl.arange(0, TILE_I)
    rows = tl.arange(0, TILE_R)
    # Expert 0 begins at row 0.
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    last = tl.load(ends + expert)
    grads_at = grads + (first + rows)[:, None].to(tl.int64) * width_o + columns_o[None, :]
    x_at = x + (first + rows)[:, None].to(tl.int64) * width_i + columns_i[None, :]
    inside_o, inside_i = columns_o < width_o, columns_i < width_i
    product = tl.zeros((TILE_O, TILE_I), dtype=tl.float32)
    for row in range(first, last, TILE_R):
        # Rows behind the expert's are another one's, or padding that may be NaN.
        there = (row + rows)[:, None] < last
        a = tl.load(grads_at, mask=there & inside_o[None, :], other=0.0)
        b = tl.load(x_at, mask=there & inside_i[None, :], other=0.0)
        product = tl.dot(tl.trans(a), b, product)
        grads_at += TILE_R * width_o
        x_at += TILE_R * width_i
    at = totals + expert.to(tl.int64) * distance + columns_o[:, None].to(tl.int64) * width_i + columns_i[None, :]
    inside = inside_o[:, None] & inside_i[None, :]
    if ADDS:
        product += tl.load(at, mask=inside).to(tl.float32)
    tl.store(at, product.to(totals.dtype.element_ty), mask=inside)


def write_weight_gradients(
    totals: torch.Tensor, grads: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, *, overwrites: bool
) -> None:
    """Write each expert's [r, o] ``grads`` transposed times its [r, i] ``x`` to ``totals`` [l, o, i], or add it there, in fp32.

    Args:
        totals: of any dtype; matrices are contiguous, and may lie apart. Experts without rows get zeros, or nothing is added.
        grads, x: contiguous, in bf16.
        ends: [l] index after each expert's last row, int32.
    """
    num_experts, width_o, width_i = totals.shape
    grid = (triton.cdiv(width_o, TILE_O) * triton.cdiv(width_i, TILE_I), num_experts)
    numbers = (totals.stride(0), width_o, width_i, not overwrites, TILE_O, TILE_I, TILE_R, TILES_TOGETHER)
    _weight_gradients_kernel[grid](grads, x, ends, totals, *numbers, num_warps=NUM_WARPS, num_stages=NUM_STAGES)
