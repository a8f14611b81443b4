"""The boxes of a whole tensor that a rank's part of a DTensor consists of: several for ``BlockShard`` and for parts of rows.

DTensor and PyTorch's distributed checkpoints (DCP) assume one box for each rank, and would store other parts at wrong
offsets without a word. Both ask methods of the DTensor; those of ``UnevenDTensor`` return several boxes. A caller that asks
for the one box of such a placement gets an error (torch_shims.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.dtensor.block_shard import BlockShard
from megatron.core.distributed.fsdp.dtensor.row_shard import RowShard
from megatron.core.distributed.fsdp.dtensor.wrapped_memory import memory_of
from megatron.core.distributed.fsdp.layout.granule import check_row_parts

# Rows [begin, end) of the whole tensor, or of its view whose rows are parts of rows.
_Range = tuple[int, int]


def boxes_of(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """Return the boxes of the whole tensor that this rank holds, in the order of its rows; one empty box if it holds none.

    A range of rows is one box. A range that begins and ends inside rows is up to three: the end of a row, whole rows, and
    the beginning of a row.

    Raises:
        RuntimeError: a placement is Partial.
        NotImplementedError: columns are cut after parts of rows.

    Ranks: each of the tensor's mesh, on its own.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise RuntimeError(
            f"a tensor must be reduced before its parts are stored, got one placed by {tensor.placements}"
        )
    sizes, offsets = list(tensor.shape), [0] * tensor.dim()
    ranges: list[_Range] = [(0, sizes[0])] if sizes else []
    mesh = tensor.device_mesh
    row_parts = 1
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, Shard):
            continue
        place = {"rank": mesh.get_local_rank(axis), "num_ranks": mesh.size(axis)}
        if placement.dim == 0:
            held = _held(placement, sum(end - begin for begin, end in ranges), **place)
            if isinstance(placement, RowShard) and placement.row_parts > 1:
                row_parts *= placement.row_parts
                check_row_parts(sizes, row_parts)
                ranges = [(begin * placement.row_parts, end * placement.row_parts) for begin, end in ranges]
            ranges = [piece for begin, end in held for piece in _slice(ranges, begin, end)]
        elif row_parts > 1:
            raise NotImplementedError(f"columns must be cut before parts of rows are, got {tensor.placements}")
        else:
            size, offset = placement.local_shard_size_and_offset(
                sizes[placement.dim], place["num_ranks"], place["rank"]
            )
            sizes[placement.dim], offsets[placement.dim] = size, offsets[placement.dim] + offset
    if not sizes:
        return [ChunkStorageMetadata(torch.Size(), torch.Size())]
    return [
        box for begin, end in ranges or [(0, 0)] for box in _boxes(begin, end, row_parts, tuple(sizes), tuple(offsets))
    ]


def _held(placement: Shard, num_rows: int, *, rank: int, num_ranks: int) -> list[_Range]:
    """Return the ranges that an axis gives a rank out of ``num_rows`` rows, or out of the parts that it cuts rows into."""
    if isinstance(placement, BlockShard):
        return placement.full_ranges(num_rows, rank=rank, num_ranks=num_ranks)
    size, offset = map(int, placement._local_shard_size_and_offset(num_rows, num_ranks, rank))
    return [(offset, offset + size)] if size else []


def _boxes(
    begin: int, end: int, row_parts: int, sizes: tuple[int, ...], offsets: tuple[int, ...]
) -> Iterator[ChunkStorageMetadata]:
    """Yield parts [begin, end) of rows as boxes, in order, where dims from 1 on have these sizes and offsets."""
    if row_parts == 1:
        yield ChunkStorageMetadata(torch.Size((begin, *offsets[1:])), torch.Size((end - begin, *sizes[1:])))
        return
    width = sizes[1] // row_parts
    whole = -(-begin // row_parts) * row_parts, end // row_parts * row_parts  # rows that lie here with all their parts
    pieces = [(begin, whole[0]), whole, (whole[1], end)] if whole[0] <= whole[1] else [(begin, end)]
    for first, last in [(first, last) for first, last in pieces if last > first] or [(0, 0)]:
        (row, part), num_parts = divmod(first, row_parts), last - first
        num_rows, num_parts = (1, num_parts) if num_parts % row_parts else (num_parts // row_parts, row_parts)
        yield ChunkStorageMetadata(
            torch.Size((row, offsets[1] + part * width, *offsets[2:])),
            torch.Size((num_rows, num_parts * width, *sizes[2:])),
        )


def _slice(ranges: list[_Range], begin: int, end: int) -> list[_Range]:
    """Return rows [begin, end) of the rows that ``ranges`` name, counted through all ranges."""
    found: list[_Range] = []
    passed = 0
    for first, last in ranges:
        start, stop = max(begin - passed, 0), min(end - passed, last - first)
        if stop > start:
            found.append((first + start, first + stop))
        passed += last - first
    return found


def pieces_of(tensor: DTensor, *, writes: bool = False) -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
    """Return the boxes that this rank holds, each with its data: a view of the local tensor, which may be written if ``writes``."""
    local, begin, pieces = memory_of(tensor._local_tensor, writes=writes).detach(), 0, []
    if local.dim() == 0:
        return [(box, local) for box in boxes_of(tensor)]
    for box in boxes_of(tensor):
        # In rows of the local tensor, which are parts of the box's rows where rows are cut.
        rows = box.sizes.numel() // local.shape[1:].numel() if box.sizes.numel() else box.sizes[0]
        pieces.append((box, local[begin : begin + rows].view(box.sizes)))
        begin += rows
    assert begin == local.shape[0], "the placements say how many rows a rank holds"
    return pieces


def is_in_boxes(placements: Sequence[Placement]) -> bool:
    """Return whether a rank's part may be several boxes of the whole tensor."""
    return any(isinstance(p, BlockShard) or (isinstance(p, RowShard) and p.row_parts > 1) for p in placements)
