"""Geometry of tensor-parallel parts of a tensor.

[Note: partition stride] A tensor that concatenates several matrices along the split dim is split matrix by matrix: a gated
``linear_fc1`` is [gate; up] with stride 2, and a rank's part is [its rows of gate; its rows of up]. Stride 1 is one matrix.

Source: Megatron-Core's ``partition_dim`` and ``partition_stride`` of parameters (their meaning; the code is ours).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def part_extent(extent: int, stride: int, size: int) -> int:
    """Return the extent of each rank's part of ``extent`` entries along the split dim.

    Raises:
        ValueError: ``extent`` is not a multiple of ``stride * size``.
    """
    if extent % (stride * size) != 0:
        pieces = f"{stride} matrices x {size} ranks" if stride > 1 else f"{size} ranks"
        raise ValueError(
            f"the extent of a dim that tensor parallelism splits must be a multiple of {stride * size} ({pieces}), got"
            f" {extent}; change the degree or the size of the model"
        )
    return extent // size


def part_ranges(extent: int, stride: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Return the [stride] ranges (start, end) of the whole dim that make up a rank's part, in its order.

    Raises:
        ValueError: ``extent`` is not a multiple of ``stride * size``.
    """
    piece = part_extent(extent, stride, size) // stride
    return [(start, start + piece) for start in (index * size * piece + rank * piece for index in range(stride))]


def partition(full: torch.Tensor, dim: int, stride: int, rank: int, size: int) -> torch.Tensor:
    """Cut a rank's part out of a whole tensor along ``dim``: a view with stride 1 or one rank, otherwise a copy.

    Raises:
        ValueError: the extent of ``dim`` is not a multiple of ``stride * size``.

    Ranks: pure.
    """
    if size == 1:
        return full
    pieces = [full.narrow(dim, start, end - start) for start, end in part_ranges(full.shape[dim], stride, rank, size)]
    return pieces[0] if stride == 1 else torch.cat(pieces, dim)


def assemble(parts: Sequence[torch.Tensor], dim: int, stride: int) -> torch.Tensor:
    """Assemble the whole tensor from all ranks' parts in rank order: the inverse of ``partition``.

    Raises:
        ValueError: the extent of a part along ``dim`` is not a multiple of ``stride``.

    Ranks: pure.
    """
    if len(parts) == 1:
        return parts[0]
    extent = parts[0].shape[dim]
    if extent % stride != 0:
        raise ValueError(f"the extent of a part must be a multiple of partition_stride ({stride}), got {extent}")
    piece = extent // stride
    pieces = [part.narrow(dim, index * piece, piece) for index in range(stride) for part in parts]
    return torch.cat(pieces, dim)
