"""A DTensor placement for rows that ranks own in unequal numbers, which knows these numbers without asking anyone.

PyTorch's ``Shard(0)`` means ``torch.chunk``: equal shares but for the last ranks. A rank of ours owns the rows that
fall into its segment of a flat buffer (layout.py), so the placement carries where the tensor lies in that buffer.
Everything else (gathering, splitting, checkpoint offsets) follows from it and the tensor's rows.

What DTensor must be taught besides, since it rebuilds placements as ``Shard(dim)``, stands in row_shard_rules.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from megatron.core.distributed.fsdp import row_shard_rules
from megatron.core.distributed.fsdp.layout import FlatLayout, rows_before
from megatron.core.distributed.fsdp.torch_versions import all_gather_functional


class RowShard(Shard):
    """Dim 0 is split over a mesh axis where the segments of a flat buffer cut it; the split may be uneven.

    Rank k of the axis owns the rows of the tensor that begin in elements [k * segment_numel, (k + 1) * segment_numel)
    of a buffer in which the tensor begins at ``start``. Ranks may own no row. Two placements are equal only if all
    three numbers are, so tensors that are split alike combine freely and others are redistributed first.

    Make DTensors with ``DTensor.from_local(local, mesh, [placement], run_check=False, shape=..., stride=...)`` (without
    shape and stride, PyTorch would take all shards to be as large as this rank's), or from a ``Replicate()`` one by
    ``redistribute``. ``distribute_tensor`` knows only ``Shard(dim)`` and returns an even ``Shard(0)``.

    Args:
        start: elements before the tensor in the flat buffer.
        segment_numel: elements of the flat buffer that each rank of the axis owns.
        row_numel: elements of a row of the tensor; 1 for tensors of one dimension.

    Raises:
        ValueError: a number is negative; when used, a tensor that does not end within the ranks' segments.
    """

    start: int
    segment_numel: int
    row_numel: int

    def __init__(self, start: int, segment_numel: int, row_numel: int) -> None:
        if start < 0 or segment_numel < 0 or row_numel < 0:
            raise ValueError(
                f"start, segment_numel and row_numel must be 0 or more, got {start}, {segment_numel} and {row_numel}"
            )
        super().__init__(0)
        self.start, self.segment_numel, self.row_numel = start, segment_numel, row_numel

    @classmethod
    def of(cls, layout: FlatLayout, index: int) -> RowShard:
        """The placement of tensor ``index`` of a layout on the axis whose ranks share the layout's buffer."""
        slot = layout.slots[index]
        return cls(slot.start, layout.segment_numel, slot.row_numel)

    def rows(self, num_rows: int, *, rank: int, num_ranks: int) -> tuple[int, int]:
        """Rows [begin, end) that ``rank`` owns of a tensor of ``num_rows`` rows; begin == end where it owns none.

        Raises:
            ValueError: the segments of ``num_ranks`` ranks do not hold all rows.
        """
        begin, end, covered = (
            rows_before(cut * self.segment_numel, start=self.start, row_numel=self.row_numel, num_rows=num_rows)
            for cut in (rank, rank + 1, num_ranks)
        )
        if covered != num_rows:
            raise ValueError(
                f"{self} on {num_ranks} ranks holds {covered} rows, got a tensor of {num_rows}; "
                "a placement belongs to the tensor and the number of ranks that its layout was made for"
            )
        return begin, end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowShard) and self._fields() == other._fields()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((RowShard, *self._fields()))

    def __repr__(self) -> str:
        return f"RowShard(start={self.start}, segment_numel={self.segment_numel}, row_numel={self.row_numel})"

    def __str__(self) -> str:
        return f"Rows({self.start}:{self.segment_numel}:{self.row_numel})"

    def __reduce__(self) -> tuple[type[RowShard], tuple[int, int, int]]:
        return RowShard, self._fields()

    def __copy__(self) -> RowShard:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> RowShard:
        return self

    def _fields(self) -> tuple[int, int, int]:
        return self.start, self.segment_numel, self.row_numel

    # What DTensor calls on a placement. The names and signatures are torch's (2.11 to 2.13).

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:  # type: ignore[override]
        begin, end = self.rows(curr_local_size, rank=rank, num_ranks=num_chunks)
        return end - begin, begin

    def local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:  # type: ignore[override]
        return self._local_shard_size_and_offset(curr_local_size, num_chunks, rank)

    def _split_tensor(
        self, tensor: torch.Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Each rank's rows of ``tensor``, padded to the most that any owns where asked, and the padding of each."""
        ranges = self._row_ranges(tensor.size(0), num_chunks)
        most = max(end - begin for begin, end in ranges)
        pads = [most - (end - begin) for begin, end in ranges]
        pieces = [tensor[begin:end] for begin, end in ranges]
        if with_padding:
            pieces = [_pad_rows(piece, most) for piece in pieces]
        return [piece.contiguous() if contiguous else piece for piece in pieces], pads if with_padding else []

    def _replicate_to_shard(  # type: ignore[override]
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shard_index: int
    ) -> torch.Tensor:
        begin, end = self.rows(local_tensor.size(0), rank=shard_index, num_ranks=mesh.size(mesh_dim))
        return local_tensor[begin:end].clone(memory_format=torch.contiguous_format)

    def _to_replicate_tensor(  # type: ignore[override]
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Sequence[int]
    ) -> torch.Tensor:
        ranges = self._row_ranges(current_logical_shape[0], mesh.size(mesh_dim))
        begin, end = ranges[mesh.get_local_rank(mesh_dim)]
        if local_tensor.size(0) != end - begin:
            raise ValueError(
                f"the local tensor must hold rows [{begin}, {end}) by {self}, got {local_tensor.size(0)} rows; pass "
                "shape and stride of the full tensor to DTensor.from_local"
            )
        most = max(end - begin for begin, end in ranges)
        gathered = all_gather_functional(_pad_rows(local_tensor, most), gather_dim=0, group=(mesh, mesh_dim))
        starts = (rank * most for rank in range(len(ranges)))
        return torch.cat([gathered[at : at + end - begin] for at, (begin, end) in zip(starts, ranges, strict=True)])

    def _reduce_shard_tensor(
        self, tensor: torch.Tensor, mesh: DeviceMesh, reduce_op: str, mesh_dim: int
    ) -> torch.Tensor:
        # Not the hot path (the engine reduces whole buffers), so the simple way: all-reduce, keep our rows.
        reduced = funcol.all_reduce(tensor, reduceOp=reduce_op, group=(mesh, mesh_dim))
        return self._replicate_to_shard(reduced, mesh, mesh_dim, mesh.get_local_rank(mesh_dim))

    def _to_new_shard_dim(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("the planner goes from RowShard to another dim through Replicate")

    def _row_ranges(self, num_rows: int, num_ranks: int) -> list[tuple[int, int]]:
        return [self.rows(num_rows, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]


def _pad_rows(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """``tensor`` with zero rows after it, ``num_rows`` in all, contiguous."""
    if tensor.size(0) == num_rows:
        return tensor.contiguous()
    padded = tensor.new_zeros((num_rows, *tensor.shape[1:]))
    padded[: tensor.size(0)] = tensor
    return padded


torch.serialization.add_safe_globals([RowShard])
row_shard_rules.teach(RowShard)
