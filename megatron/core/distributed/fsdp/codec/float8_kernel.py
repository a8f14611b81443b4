"""Maxima and bytes of FP8 weights as two Triton kernels, each of which reads a weight once; ``float8`` says what they compute.

A program handles consecutive elements of the flattened weight, from a multiple of their number on, whatever of them this
rank holds. Where blocks are scaled, the weight's width is a multiple of ``CHUNK``, so that each chunk lies in one block.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.distributed.fsdp.codec.float8 import E4M3_MAX
from megatron.core.extensions.triton_language import tl, triton

# Elements of a program: 8 for each of 128 threads. Chunks of a program are as wide as blocks.
NUMEL = 1024
CHUNK = tl.constexpr(128)
NUM_WARPS = 4
# Each product is rounded by itself, as torch operations round it.
_OPTIONS: dict[str, Any] = {"BLOCK": NUMEL, "num_warps": NUM_WARPS, "enable_fp_fusion": False}


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def amax_kernel(weights, amax, first, numel, width, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Raise ``amax`` of the blocks to the largest absolute values of ``weights`` [numel]; NaN counts as infinite."""
    begin = (first // BLOCK + tl.program_id(0)) * BLOCK
    at = begin + tl.arange(0, BLOCK) - first
    w = tl.load(weights + at, mask=(at >= 0) & (at < numel), other=0.0).to(tl.float32)
    w = tl.where(w == w, tl.abs(w), float("inf"))
    found = tl.max(tl.reshape(w, (BLOCK // CHUNK, CHUNK)), axis=1)
    chunk = begin + tl.arange(0, BLOCK // CHUNK) * CHUNK
    index = chunk // width // CHUNK * columns + chunk % width // CHUNK
    tl.atomic_max(amax + index, found, mask=(chunk + CHUNK > first) & (chunk < first + numel))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def write_kernel(  # type: ignore[no-untyped-def]
    target,
    weights,
    scale,
    first,
    numel,
    width,
    columns,
    LARGEST: tl.constexpr,
    SCALES_BLOCKS: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write ``weights`` [numel] times their scales to ``target`` [numel]; ``ROUNDS``: after rounding them to bf16."""
    begin = (first // BLOCK + tl.program_id(0)) * BLOCK
    at = begin + tl.arange(0, BLOCK) - first
    mask = (at >= 0) & (at < numel)
    w = tl.load(weights + at, mask=mask, other=0.0).to(tl.float32)
    if ROUNDS:
        w = to_bf16(w)
    if SCALES_BLOCKS:
        chunk = begin + tl.arange(0, BLOCK // CHUNK) * CHUNK
        index = chunk // width // CHUNK * columns + chunk % width // CHUNK
        own = tl.load(scale + index, mask=(chunk + CHUNK > first) & (chunk < first + numel), other=1.0)
        w = tl.reshape(tl.reshape(w, (BLOCK // CHUNK, CHUNK)) * own[:, None], (BLOCK,))
    else:
        w = w * tl.load(scale)
    tl.store(target + at, to_e4m3(w, LARGEST), mask=mask)


# Conversions are written out in integers, so that Triton's interpreter, which truncates, tests what devices run.


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def to_bf16(w):  # type: ignore[no-untyped-def]
    """Round to bf16, ties to even, as fp32."""
    bits = w.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return tl.where(w == w, rounded, bits).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def to_e4m3(w, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the bytes of the nearest E4M3 numbers, ties to even; beyond the largest one that one, and NaN as NaN."""
    bits = w.to(tl.int32, bitcast=True)
    size = tl.abs(w)
    size = tl.where(size > LARGEST, LARGEST, size)
    of_size = size.to(tl.int32, bitcast=True)
    # From 2^-6 on: three bits of mantissa, and an exponent whose bias is 7 instead of 127.
    normal = ((of_size + 0x7FFFF + ((of_size >> 20) & 1)) >> 20) - 960
    # Below, in steps of 2^-9: the last bit of the mantissa of what is added to 2^14.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    byte = tl.where(size >= 0.015625, normal, small)
    byte = tl.where(w == w, byte, 0x7F)
    return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def from_e4m3(byte):  # type: ignore[no-untyped-def]
    """Return the E4M3 numbers of bytes, as fp32."""
    size = byte.to(tl.int32) & 0x7F
    number = tl.where(
        size >= 8, ((size << 20) + 0x3C000000).to(tl.float32, bitcast=True), size.to(tl.float32) * 2.0**-9
    )
    number = tl.where(size == 0x7F, float("nan"), number)
    return tl.where(byte >= 0x80, -number, number)


# ---- launches -------------------------------------------------------------------------------------------------------


def raise_block_amax(amax: torch.Tensor, weights: torch.Tensor, first: int, width: int) -> None:
    """Do as ``float8.raise_block_amax``; NaN counts as infinite."""
    grid = _grid(first, weights.numel())
    amax_kernel[grid](weights, amax, first, weights.numel(), width, amax.shape[1], **_OPTIONS)


def write(
    target: torch.Tensor,
    weights: torch.Tensor,
    scale: torch.Tensor,
    first: int,
    width: int,
    *,
    scales_blocks: bool,
    rounds: bool,
) -> None:
    """Do as ``float8.write_block_bytes`` or ``write_bytes``, after rounding to bf16 if ``rounds``."""
    numbers = (first, weights.numel(), width, scale.shape[-1], E4M3_MAX, scales_blocks, rounds)
    write_kernel[_grid(first, weights.numel())](target, weights, scale, *numbers, **_OPTIONS)


def _grid(first: int, numel: int) -> tuple[int]:
    return (-(-(first + numel) // NUMEL) - first // NUMEL,)
