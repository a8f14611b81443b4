"""The arithmetic of 8-bit floating point weights: scales from largest absolute values, and bytes from weights and scales.

All numbers are computed in fp32, as transformer-engine computes them, so that both write the same bytes. Bytes are those of
``torch.float8_e4m3fn``; a value beyond the largest one becomes the largest one, NaN remains NaN.

Source: transformer-engine's recipes for delayed, current and block scaling (its ``common/recipe``); Micikevicius et al.,
"FP8 Formats for Deep Learning" (arXiv:2209.05433).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import pad

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
NAN_BYTE = 0x7F
BLOCK = 128
_FP32_MAX = torch.finfo(torch.float32).max
_SIGN_AND_EXPONENT = -0x00800000  # of an fp32 number, as int32
# Scales of a weight begin at multiples of 256 bytes: cuBLAS refuses products whose scales lie anywhere.
SCALE_ALIGNMENT = 64


def current_scale(amax: torch.Tensor, *, power_of_two: bool) -> torch.Tensor:
    """Return what weights are multiplied by, from the largest absolute values ``amax`` [N] of these very weights.

    Where that is 0, infinite or NaN the scale is 1. A power of two is the next one below.
    """
    scale = _quotient(amax).clamp_(max=_FP32_MAX)
    scale = torch.where(amax.isfinite() & (amax > 0), scale, 1.0)
    return (scale.view(torch.int32) & _SIGN_AND_EXPONENT).view(torch.float32) if power_of_two else scale


def delayed_scale(amax: torch.Tensor, former: torch.Tensor, *, margin: int) -> torch.Tensor:
    """Return the scale [N] from the largest absolute values ``amax`` [N] of earlier steps.

    Where that is 0, infinite or NaN the ``former`` scale is kept.
    """
    scale = (_quotient(amax) / 2.0**margin).clamp_(max=_FP32_MAX)
    return torch.where(amax.isfinite() & (amax > 0), scale, former)


def _quotient(amax: torch.Tensor) -> torch.Tensor:
    # A number divided by a tensor is, in torch, the number times the reciprocal, which rounds twice.
    return torch.full_like(amax, E4M3_MAX).div_(amax)


def write_bytes(target: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor) -> None:
    """Write ``weights`` times ``scale``, which broadcasts to their shape, as bytes to ``target`` (uint8, of their shape)."""
    scaled = (weights.float() * scale).clamp_(-E4M3_MAX, E4M3_MAX)
    target.view(torch.float8_e4m3fn).copy_(scaled)


def read_bytes(data: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights that the bytes ``data`` stand for, with the reciprocal of their scale, which broadcasts."""
    return (data.view(torch.float8_e4m3fn).float() * inverse).to(dtype)


def raise_amax(amax: torch.Tensor, weights: torch.Tensor) -> None:
    """Raise ``amax`` [1] to the largest absolute value of ``weights``."""
    amax.copy_(torch.maximum(amax, torch.linalg.vector_norm(weights, torch.inf, dtype=torch.float32)))


class UpdateEncoding(NamedTuple):
    """What an update of a group's main weights measures and writes while it has them at hand, for weights with one scale each.

    See [Note: updates that encode].

    Args:
        target: [N] bytes, one for each main weight of this rank; None where scales depend on all updated weights.
        scale, amax: those of weight t at ``t * SCALE_ALIGNMENT``. The update raises ``amax``.
        nominal: dtype to which main weights are rounded before they are scaled.
    """

    target: torch.Tensor | None
    scale: torch.Tensor
    amax: torch.Tensor
    nominal: torch.dtype

    def encode(self, main: torch.Tensor, weight: int, begin: int, end: int) -> None:
        """Measure and write elements [begin, end), all of one weight, from the updated main weights ``main`` [N]."""
        values, at = main[begin:end], slice(weight * SCALE_ALIGNMENT, weight * SCALE_ALIGNMENT + 1)
        raise_amax(self.amax[at], values)
        if self.target is not None:
            write_bytes(self.target[begin:end], values.to(self.nominal), self.scale[at])


# ---- blocks of 128 x 128 --------------------------------------------------------------------------------------------


class Box(NamedTuple):
    """Rows [row, row + rows) and columns [column, column + columns) of a matrix."""

    row: int
    column: int
    rows: int
    columns: int

    @property
    def blocks(self) -> tuple[slice, slice]:
        """The blocks of ``BLOCK`` rows and columns that the box touches."""
        return tuple(  # type: ignore[return-value]
            slice(begin // BLOCK, -(-(begin + length) // BLOCK))
            for begin, length in ((self.row, self.rows), (self.column, self.columns))
        )


def boxes(first: int, numel: int, width: int) -> Iterator[Box]:
    """Cut elements [first, first + numel) of a matrix with rows of ``width`` into at most three boxes, in order; pure."""
    row, column = divmod(first, width)
    if column and numel:
        columns = min(width - column, numel)
        yield Box(row, column, 1, columns)
        row, numel = row + 1, numel - columns
    if numel >= width:
        yield Box(row, 0, numel // width, width)
    if numel % width:
        yield Box(row + numel // width, 0, 1, numel % width)


def _parts(flat: torch.Tensor, first: int, width: int) -> Iterator[tuple[Box, torch.Tensor]]:
    """Cut ``flat`` [N], elements ``first`` to ``first + N`` of a matrix with rows of ``width``, into boxes and views of them."""
    offset = 0
    for box in boxes(first, flat.numel(), width):
        numel = box.rows * box.columns
        yield box, flat[offset : offset + numel].view(box.rows, box.columns)
        offset += numel


def _of_box(of_blocks: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the value of its block for each element of the box."""
    return expand_blocks(of_blocks[box.blocks])[box.row % BLOCK :, box.column % BLOCK :][: box.rows, : box.columns]


def raise_block_amax(amax: torch.Tensor, weights: torch.Tensor, first: int, width: int) -> None:
    """Raise ``amax`` [block rows, block columns or more] to the largest absolute values of these elements in each block.

    Args:
        weights: [N] elements ``first`` to ``first + N`` of a matrix with rows of ``width``.
    """
    for box, part in _parts(weights, first, width):
        top, left = box.row % BLOCK, box.column % BLOCK
        edges = (left, -(left + box.columns) % BLOCK, top, -(top + box.rows) % BLOCK)
        whole = pad(part.float().abs(), edges)
        found = whole.view(whole.shape[0] // BLOCK, BLOCK, whole.shape[1] // BLOCK, BLOCK).amax(dim=(1, 3))
        of_blocks = amax[box.blocks]
        of_blocks.copy_(torch.maximum(of_blocks, found))


def write_block_bytes(target: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor, first: int, width: int) -> None:
    """Write ``weights`` times the scales of their blocks as bytes to ``target``; arguments as in ``raise_block_amax``."""
    for (box, part), (_, out) in zip(_parts(weights, first, width), _parts(target, first, width), strict=True):
        write_bytes(out, part, _of_box(scale, box))


def read_block_bytes(
    data: torch.Tensor, inverse: torch.Tensor, first: int, width: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the weights that bytes with scales for blocks stand for; arguments as in ``raise_block_amax``."""
    made = torch.empty(data.numel(), dtype=dtype, device=data.device)
    for (box, part), (_, out) in zip(_parts(data, first, width), _parts(made, first, width), strict=True):
        out.copy_(read_bytes(part, _of_box(inverse, box), dtype))
    return made


def expand_blocks(of_blocks: torch.Tensor) -> torch.Tensor:
    """Repeat each value of [block rows, block columns] for all elements of its block."""
    return of_blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
