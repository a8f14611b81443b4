"""Where a tensor-parallel rank's part of a tensor lies in the whole one; pure geometry.

[Note: partition stride] A tensor that holds several matrices, one after the other along the dim that is cut, is cut
matrix by matrix: a gated ``linear_fc1`` is [gate; up] with stride 2, and a rank's part is [its rows of gate; its rows of
up]. Stride 1 is one matrix.

Source: Megatron-Core's ``partition_dim`` and ``partition_stride`` of parameters (their meaning; the code is ours).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def part_extent(extent: int, stride: int, size: int) -> int:
    """Extent of each rank's part of ``extent`` entries along the dim that is cut.

    Raises:
        ValueError: ``extent`` is no multiple of ``stride * size``.
    """
    if extent % (stride * size) != 0:
        pieces = f"{stride} matrices x {size} ranks" if stride > 1 else f"{size} ranks"
        raise ValueError(
            f"the extent of a dim that tensor parallelism cuts must be a multiple of {stride * size} ({pieces}), got"
            f" {extent}; change the degree or the size of the model"
        )
    return extent // size


def part_ranges(extent: int, stride: int, rank: int, size: int) -> list[tuple[int, int]]:
    """[stride] (start, end) in the whole of the pieces that make up a rank's part, in the order of the part.

    Raises:
        ValueError: ``extent`` is no multiple of ``stride * size``.
    """
    piece = part_extent(extent, stride, size) // stride
    return [(start, start + piece) for start in (index * size * piece + rank * piece for index in range(stride))]


def partition(full: torch.Tensor, dim: int, stride: int, rank: int, size: int) -> torch.Tensor:
    """A rank's part of a whole tensor, cut along ``dim``: a view with stride 1 or one rank, else a copy.

    Raises:
        ValueError: the extent of ``dim`` is no multiple of ``stride * size``.

    Ranks: pure.
    """
    if size == 1:
        return full
    pieces = [full.narrow(dim, start, end - start) for start, end in part_ranges(full.shape[dim], stride, rank, size)]
    return pieces[0] if stride == 1 else torch.cat(pieces, dim)


def assemble(parts: Sequence[torch.Tensor], dim: int, stride: int) -> torch.Tensor:
    """The whole tensor of all ranks' parts in rank order: ``partition`` undone.

    Raises:
        ValueError: the extent of a part along ``dim`` is no multiple of ``stride``.

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
