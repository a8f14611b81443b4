"""A DTensor placement for rows that ranks own in unequal numbers, computed without communication.

PyTorch's ``Shard(0)`` means ``torch.chunk``: equal shares but for the last ranks. A rank of ours owns the rows that
fall into its segment of a flat buffer (flat_layout.py), so the placement carries where the tensor lies in that buffer.
Gathering, splitting and checkpoint offsets follow from that and the number of rows. Granules of several rows need
nothing more: they are rows, cut at fewer places.

DTensor itself rebuilds placements as ``Shard(dim)``; ``UnevenDTensor`` does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.config.torch_versions import all_gather_functional
from megatron.core.distributed.fsdp.dtensor.uneven_shard import UnevenShard
from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout, rows_before
from megatron.core.distributed.fsdp.layout.granule import check_row_parts


class RowShard(UnevenShard):
    """Rows split over a mesh axis where the segments of a flat buffer cut them, perhaps unevenly.

    Rank k of the axis owns the rows of the tensor that begin in elements [k * segment_numel, (k + 1) * segment_numel)
    of a buffer in which the tensor begins at ``start``. Ranks may own no row. Tensors that are split alike combine freely;
    others are redistributed first.

    With ``row_parts`` p (``Granule.row_parts``) rows are those of the tensor's view [R * p, C / p, ...]. The local tensor has
    the shape [rows here, C / p, ...]; the DTensor's stays [R, C, ...]. Elementwise operations between tensors placed so, and
    norms and sums of all elements, work on the parts. Operations on rows or columns gather first, or are refused
    (row_shard_rules.py). On an axis further right, which cuts what this one leaves, these parts are the rows and
    ``row_parts`` is 1.

    Make DTensors with ``DTensor.from_local(local, mesh, [placement], run_check=False, shape=..., stride=...)`` (without
    shape and stride it is refused), or from a ``Replicate()`` one by
    ``redistribute``, or by ``distribute_tensor``.

    Args:
        start: elements before the tensor in the flat buffer.
        segment_numel: elements of the flat buffer that each rank of the axis owns.
        row_numel: elements of a row (of a part of one, with ``row_parts``); 1 for tensors of one dimension.
        row_parts: equal parts along dim 1 that each row of the tensor is cut into.

    Raises:
        ValueError: a number is negative; when used, a tensor that does not end within the ranks' segments, or whose dim 1
            ``row_parts`` does not divide.
    """

    start: int
    segment_numel: int
    row_numel: int
    row_parts: int

    def __init__(self, start: int, segment_numel: int, row_numel: int, row_parts: int = 1) -> None:
        if row_parts < 1:
            raise ValueError(f"row_parts must be 1 or more, got {row_parts}")
        if start < 0 or segment_numel < 0 or row_numel < 0:
            raise ValueError(
                f"start, segment_numel and row_numel must be 0 or more, got {start}, {segment_numel} and {row_numel}"
            )
        super().__init__()
        self.start, self.segment_numel, self.row_numel, self.row_parts = start, segment_numel, row_numel, row_parts

    @classmethod
    def of(cls, layout: FlatLayout, index: int) -> RowShard:
        """Return the placement of tensor ``index`` of a layout on the axis whose ranks share the layout's buffer."""
        slot = layout.slots[index]
        return cls(slot.start, layout.segment_numel, slot.row_numel, slot.row_parts)

    def rows(self, num_rows: int, *, rank: int, num_ranks: int) -> tuple[int, int]:
        """Return the rows [begin, end), after the cut into parts, that ``rank`` owns of a tensor of ``num_rows`` rows.

        Raises:
            ValueError: the segments of ``num_ranks`` ranks do not hold all rows.
        """
        num_cut = num_rows * self.row_parts
        begin, end, covered = (
            rows_before(cut * self.segment_numel, start=self.start, row_numel=self.row_numel, num_rows=num_cut)
            for cut in (rank, rank + 1, num_ranks)
        )
        if covered != num_cut:
            raise ValueError(
                f"{self} on {num_ranks} ranks holds {covered} rows, got a tensor of {num_cut}; "
                "a placement belongs to the tensor and the number of ranks that its layout was made for"
            )
        return begin, end

    def part(self, tensor: torch.Tensor, *, rank: int, num_ranks: int) -> torch.Tensor:
        """Return a rank's rows of a whole tensor, after the cut into parts; a view where ``tensor`` is contiguous."""
        begin, end = self.rows(tensor.size(0), rank=rank, num_ranks=num_ranks)
        return self._cut(tensor)[begin:end]

    def seen_as(self, shape: torch.Size, other: torch.Size, *, num_ranks: int) -> RowShard | None:
        """Return the placement of a view in shape ``other``, if ranks' elements are whole rows of both; else None."""
        if not other or (self.row_parts > 1 and len(other) > 1):
            return None
        row_numel = math.prod(other[1:])
        cuts = (rank * self.segment_numel - self.start for rank in range(1, num_ranks))
        inside = [cut for cut in cuts if 0 < cut < math.prod(shape)]
        fits = all(cut % self.row_numel == 0 and cut % row_numel == 0 for cut in inside)
        return RowShard(self.start, self.segment_numel, row_numel) if fits else None

    def _cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """View [R, C, ...] as [R * row_parts, C / row_parts, ...]."""
        if self.row_parts == 1:
            return tensor
        check_row_parts(tensor.shape, self.row_parts)
        return tensor.unflatten(1, (self.row_parts, tensor.size(1) // self.row_parts)).flatten(0, 1)

    def _joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """View [R * row_parts, C / row_parts, ...] as [R, C, ...], the inverse of ``_cut``."""
        if self.row_parts == 1:
            return tensor
        return tensor.unflatten(0, (tensor.size(0) // self.row_parts, self.row_parts)).flatten(1, 2)

    def __repr__(self) -> str:
        parts = f", row_parts={self.row_parts}" if self.row_parts > 1 else ""
        return f"RowShard(start={self.start}, segment_numel={self.segment_numel}, row_numel={self.row_numel}{parts})"

    def __str__(self) -> str:
        parts = f":1/{self.row_parts}" if self.row_parts > 1 else ""
        return f"Rows({self.start}:{self.segment_numel}:{self.row_numel}{parts})"

    def _fields(self) -> tuple[int, int, int, int]:
        return self.start, self.segment_numel, self.row_numel, self.row_parts

    # DTensor calls these, as the base class says.

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:  # type: ignore[override]
        begin, end = self.rows(curr_local_size, rank=rank, num_ranks=num_chunks)
        return end - begin, begin

    def _to_replicate_tensor(  # type: ignore[override]
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Sequence[int]
    ) -> torch.Tensor:
        num_rows, num_ranks = current_logical_shape[0], mesh.size(mesh_dim)
        ranges = [self.rows(num_rows, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
        begin, end = ranges[mesh.get_local_rank(mesh_dim)]
        if local_tensor.size(0) != end - begin:
            raise ValueError(
                f"the local tensor must hold rows [{begin}, {end}) by {self}, got {local_tensor.size(0)} rows; pass "
                "shape and stride of the full tensor to DTensor.from_local"
            )
        most = max(end - begin for begin, end in ranges)
        padded = _pad_rows(local_tensor, most)
        # gloo knows no int16 (the remainders of bf16 weights): what travels are bits.
        sent = padded.view(torch.float16) if padded.dtype == torch.int16 else padded
        gathered = all_gather_functional(sent, gather_dim=0, group=(mesh, mesh_dim))
        if isinstance(gathered, AsyncCollectiveTensor):
            gathered = gathered.wait()  # once, as each operation on it would ask whether it has
        gathered = gathered.view(padded.dtype)
        starts = (rank * most for rank in range(len(ranges)))
        joined = torch.cat([gathered[at : at + end - begin] for at, (begin, end) in zip(starts, ranges, strict=True)])
        return self._joined(joined)


def _pad_rows(tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return ``tensor`` with zero rows after it, ``num_rows`` in all, contiguous."""
    if tensor.size(0) == num_rows:
        return tensor.contiguous()
    padded = tensor.new_zeros((num_rows, *tensor.shape[1:]))
    padded[: tensor.size(0)] = tensor
    return padded


torch.serialization.add_safe_globals([RowShard])
