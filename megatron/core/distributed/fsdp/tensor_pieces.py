"""Which boxes of a whole tensor a rank's part of a DTensor is; several, where a tensor-parallel axis cuts blocks.

DTensor and PyTorch's distributed checkpoints (DCP) take each rank's part to be one box, so those of tensors that are cut
into blocks would be stored at wrong offsets without a word. They ask the DTensor first, which is taught to answer here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard

from megatron.core.distributed.fsdp.block_shard import BlockShard

# Begin and end of rows of the whole tensor.
_Range = tuple[int, int]


def boxes_of(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """The boxes of the whole tensor that this rank holds, in the order of its rows; one of no elements if it holds none.

    Raises:
        RuntimeError: a placement is Partial.

    Ranks: each of the tensor's mesh, on its own.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise RuntimeError(
            f"a tensor must be reduced before its parts are stored, got one placed by {tensor.placements}"
        )
    sizes, offsets = list(tensor.shape), [0] * tensor.dim()
    ranges: list[_Range] = [(0, sizes[0])] if sizes else []
    mesh = tensor.device_mesh
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, Shard):
            continue
        place = {"rank": mesh.get_local_rank(axis), "num_ranks": mesh.size(axis)}
        if placement.dim == 0:
            ranges = _cut(placement, ranges, **place)
        else:
            size, offset = placement.local_shard_size_and_offset(
                sizes[placement.dim], place["num_ranks"], place["rank"]
            )
            sizes[placement.dim], offsets[placement.dim] = size, offsets[placement.dim] + offset
    if not sizes:
        return [ChunkStorageMetadata(torch.Size(), torch.Size())]
    return [
        ChunkStorageMetadata(torch.Size([begin, *offsets[1:]]), torch.Size([end - begin, *sizes[1:]]))
        for begin, end in ranges or [(0, 0)]
    ]


def _cut(placement: Shard, ranges: list[_Range], *, rank: int, num_ranks: int) -> list[_Range]:
    """What an axis leaves to a rank of a tensor whose rows are these of the whole one."""
    num_rows = sum(end - begin for begin, end in ranges)
    size, offset = map(int, placement._local_shard_size_and_offset(num_rows, num_ranks, rank))
    if isinstance(placement, BlockShard):
        kept = placement.full_ranges(0, size, num_rows=num_rows, rank=rank, num_ranks=num_ranks)
    else:
        kept = [(offset, offset + size)] if size else []
    return [piece for begin, end in kept for piece in _slice(ranges, begin, end)]


def _slice(ranges: list[_Range], begin: int, end: int) -> list[_Range]:
    """Rows [begin, end) of the rows that ``ranges`` name, one after the other."""
    found: list[_Range] = []
    passed = 0
    for first, last in ranges:
        start, stop = max(begin - passed, 0), min(end - passed, last - first)
        if stop > start:
            found.append((first + start, first + stop))
        passed += last - first
    return found


def pieces_of(tensor: DTensor) -> list[tuple[ChunkStorageMetadata, torch.Tensor]]:
    """The boxes that this rank holds, each with the memory that holds it: a view of the local tensor."""
    local, begin, pieces = tensor._local_tensor.detach(), 0, []
    for box in boxes_of(tensor):
        rows = box.sizes[0] if box.sizes else 0
        pieces.append((box, local[begin : begin + rows] if box.sizes else local))
        begin += rows
    assert local.dim() == 0 or begin == local.shape[0], "the placements say how many rows a rank holds"
    return pieces


def _is_in_blocks(tensor: DTensor) -> bool:
    return any(isinstance(placement, BlockShard) for placement in tensor.placements)


def _teach() -> None:
    """Wrap what DCP asks of a DTensor, so that one that is cut into blocks answers for each of its boxes."""
    write_items, chunk_list, shard = (
        DTensor.__create_write_items__,
        DTensor.__create_chunk_list__,
        DTensor.__get_tensor_shard__,
    )

    def create_write_items(self: DTensor, fqn: str, object: Any) -> Any:
        if not _is_in_blocks(self):
            return write_items(self, fqn, object)
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=box, properties=properties, size=self.size()),
            )
            for box in boxes_of(self)
        ]

    def create_chunk_list(self: DTensor) -> Any:
        return boxes_of(self) if _is_in_blocks(self) else chunk_list(self)

    def get_tensor_shard(self: DTensor, index: MetadataIndex) -> Any:
        if not _is_in_blocks(self):
            return shard(self, index)
        return next(local for box, local in pieces_of(self) if box.offsets == index.offset)

    DTensor.__create_write_items__ = create_write_items  # type: ignore[method-assign]
    DTensor.__create_chunk_list__ = create_chunk_list  # type: ignore[method-assign]
    DTensor.__get_tensor_shard__ = get_tensor_shard  # type: ignore[method-assign]


_teach()
