"""A DTensor placement for tensors that hold several matrices, each of which is split over the axis.

Tensor parallelism splits a gated ``linear_fc1`` of [gate; up] matrix by matrix, so a rank's part is no range of rows: it
is [its rows of gate; its rows of up]. PyTorch's private ``_StridedShard`` says the same, but PyTorch reads it as the
order of two axes wherever the numbers allow that, which is wrong beside uneven rows (``RowShard``) on the other axis.

The rules that keep DTensor from taking it for ``Shard(0)`` are in row_shard_rules.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from megatron.core.distributed.fsdp.config.torch_versions import all_gather_functional
from megatron.core.distributed.fsdp.dtensor import row_shard_rules


class BlockShard(Shard):
    """Blocks of equally many rows along dim 0, each of which is split evenly over a mesh axis.

    A rank holds its rows of the first block, then its rows of the second, and so on.

    Raises:
        ValueError: fewer than two blocks; when used, rows that blocks and ranks do not divide.
    """

    num_blocks: int

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be 2 or more, got {num_blocks}; one block is Shard(0)")
        super().__init__(0)
        self.num_blocks = num_blocks

    def block_rows(self, num_rows: int, num_ranks: int) -> int:
        """Count the rows that a rank holds of each block of a tensor of ``num_rows`` rows."""
        pieces = self.num_blocks * num_ranks
        if num_rows % pieces != 0:
            raise ValueError(
                f"rows must be a multiple of {pieces} ({self.num_blocks} blocks x {num_ranks} ranks), got {num_rows}"
            )
        return num_rows // pieces

    def full_ranges(self, begin: int, end: int, *, num_rows: int, rank: int, num_ranks: int) -> list[tuple[int, int]]:
        """Return the rows of the whole tensor, as ranges in order, that rows [begin, end) of ``rank``'s part are."""
        piece = self.block_rows(num_rows, num_ranks)
        ranges = []
        for block in range(self.num_blocks):
            first, last = max(begin, block * piece), min(end, (block + 1) * piece)
            if last > first:
                shift = block * piece * (num_ranks - 1) + rank * piece
                ranges.append((first + shift, last + shift))
        return ranges

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockShard) and self.num_blocks == other.num_blocks

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((BlockShard, self.num_blocks))

    def __repr__(self) -> str:
        return f"BlockShard(num_blocks={self.num_blocks})"

    def __str__(self) -> str:
        return f"Blocks({self.num_blocks})"

    def __reduce__(self) -> tuple[type[BlockShard], tuple[int]]:
        return BlockShard, (self.num_blocks,)

    def __copy__(self) -> BlockShard:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockShard:
        return self

    # DTensor calls these on a placement. Names and signatures are torch's (config/torch_versions.py).

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:  # type: ignore[override]
        piece = self.block_rows(curr_local_size, num_chunks)
        return self.num_blocks * piece, rank * piece

    def local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:  # type: ignore[override]
        return self._local_shard_size_and_offset(curr_local_size, num_chunks, rank)

    def _split_tensor(
        self, tensor: torch.Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Return each rank's part of ``tensor``; none needs padding."""
        parts = [self.part(tensor, rank=rank, num_ranks=num_chunks) for rank in range(num_chunks)]
        return parts, [0] * num_chunks if with_padding else []

    def part(self, tensor: torch.Tensor, *, rank: int, num_ranks: int) -> torch.Tensor:
        """Return a copy of a rank's part of a whole tensor."""
        piece = self.block_rows(tensor.size(0), num_ranks)
        blocks = tensor.unflatten(0, (self.num_blocks, num_ranks, piece))
        return blocks[:, rank].clone(memory_format=torch.contiguous_format).flatten(0, 1)

    def _replicate_to_shard(  # type: ignore[override]
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shard_index: int
    ) -> torch.Tensor:
        return self.part(local_tensor, rank=shard_index, num_ranks=mesh.size(mesh_dim))

    def _to_replicate_tensor(  # type: ignore[override]
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Sequence[int]
    ) -> torch.Tensor:
        num_ranks = mesh.size(mesh_dim)
        piece = self.block_rows(current_logical_shape[0], num_ranks)
        gathered = all_gather_functional(local_tensor.contiguous(), gather_dim=0, group=(mesh, mesh_dim))
        return gathered.unflatten(0, (num_ranks, self.num_blocks, piece)).transpose(0, 1).flatten(0, 2)

    def _reduce_shard_tensor(
        self, tensor: torch.Tensor, mesh: DeviceMesh, reduce_op: str, mesh_dim: int
    ) -> torch.Tensor:
        reduced = funcol.all_reduce(tensor, reduceOp=reduce_op, group=(mesh, mesh_dim))
        return self._replicate_to_shard(reduced, mesh, mesh_dim, mesh.get_local_rank(mesh_dim))

    def _to_new_shard_dim(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("a redistribution from BlockShard to another dim goes through Replicate")


torch.serialization.add_safe_globals([BlockShard])
row_shard_rules.patch_dtensor(BlockShard)
