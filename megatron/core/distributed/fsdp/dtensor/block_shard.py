"""A DTensor placement for tensors that hold several matrices, each of which is split over the axis.

Tensor parallelism splits a gated ``linear_fc1`` of [gate; up] matrix by matrix, so a rank's part is no range of rows: it
is [its rows of gate; its rows of up]. PyTorch's private ``_StridedShard`` says the same, but PyTorch reads it as the
order of two axes wherever the numbers allow that, which is wrong beside uneven rows (``RowShard``) on the other axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.config.torch_versions import all_gather_functional
from megatron.core.distributed.fsdp.dtensor.uneven_shard import UnevenShard


class BlockShard(UnevenShard):
    """Blocks of equally many rows along dim 0, each of which is split evenly over a mesh axis.

    A rank holds its rows of the first block, then its rows of the second, and so on.

    Raises:
        ValueError: fewer than two blocks; when used, rows that blocks and ranks do not divide.
    """

    num_blocks: int

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be 2 or more, got {num_blocks}; one block is Shard(0)")
        super().__init__()
        self.num_blocks = num_blocks

    def block_rows(self, num_rows: int, num_ranks: int) -> int:
        """Count the rows that a rank holds of each block of a tensor of ``num_rows`` rows."""
        pieces = self.num_blocks * num_ranks
        if num_rows % pieces != 0:
            raise ValueError(
                f"rows must be a multiple of {pieces} ({self.num_blocks} blocks x {num_ranks} ranks), got {num_rows}"
            )
        return num_rows // pieces

    def full_ranges(self, num_rows: int, *, rank: int, num_ranks: int) -> list[tuple[int, int]]:
        """Return the rows of a tensor of ``num_rows`` rows that ``rank`` holds, as ranges in order."""
        piece = self.block_rows(num_rows, num_ranks)
        starts = [(block * num_ranks + rank) * piece for block in range(self.num_blocks)]
        return [(start, start + piece) for start in starts if piece]

    def part(self, tensor: torch.Tensor, *, rank: int, num_ranks: int) -> torch.Tensor:
        """Return a rank's part of a whole tensor; a copy but for a single rank."""
        piece = self.block_rows(tensor.size(0), num_ranks)
        blocks = tensor.unflatten(0, (self.num_blocks, num_ranks, piece))
        return blocks[:, rank].flatten(0, 1)

    def _fields(self) -> tuple[int]:
        return (self.num_blocks,)

    def __repr__(self) -> str:
        return f"BlockShard(num_blocks={self.num_blocks})"

    def __str__(self) -> str:
        return f"Blocks({self.num_blocks})"

    # DTensor calls these, as the base class says.

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:  # type: ignore[override]
        piece = self.block_rows(curr_local_size, num_chunks)
        return self.num_blocks * piece, rank * piece

    def _to_replicate_tensor(  # type: ignore[override]
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Sequence[int]
    ) -> torch.Tensor:
        num_ranks = mesh.size(mesh_dim)
        piece = self.block_rows(current_logical_shape[0], num_ranks)
        gathered = all_gather_functional(local_tensor.contiguous(), gather_dim=0, group=(mesh, mesh_dim))
        return rearrange(gathered, "(r b p) ... -> (b r p) ...", r=num_ranks, p=piece)


torch.serialization.add_safe_globals([BlockShard])
