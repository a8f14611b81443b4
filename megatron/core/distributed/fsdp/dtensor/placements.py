"""Placements of rows that ranks hold in unequal numbers or in several blocks, and the parts of a tensor that they give each rank.

PyTorch's ``Shard(0)`` means ``torch.chunk``: equal shares but for the last ranks. ``RowShard`` and ``BlockShard`` split dim 0 in other
ways, without communication. Rules of torch would take them for ``Shard(0)``; ``UnevenDTensor`` runs by those of propagation.py.

DTensor and PyTorch's distributed checkpoints (DCP) assume that a rank's part is one box of the whole tensor, and would store
other parts at wrong offsets and report nothing. ``boxes_of`` returns all boxes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron.core.distributed.fsdp.config.torch_versions import all_gather_functional
from megatron.core.distributed.fsdp.layout.flat_layout import rows_before
from megatron.core.distributed.fsdp.layout.granule import check_row_parts

# Rows [begin, end) of a tensor, or of its view whose rows are parts of rows.
_Range = tuple[int, int]


class UnevenShard(Shard):
    """A split of dim 0 whose fields define the rows of each rank of a mesh axis. Equal only if all fields are equal.

    Also equal to a placeholder for any such split (``Flat()`` of users' buffers). No DTensor here has a placeholder.

    Args:
        fields: the arguments of the subclass's constructor.
    """

    row_parts = 1  # equal parts along dim 1 that each row is cut into

    def __init__(self, *fields: int) -> None:
        super().__init__(0)
        self._fields = fields

    @abstractmethod
    def full_ranges(self, num_rows: int, *, rank: int, num_ranks: int) -> list[_Range]:
        """Return the rows that ``rank`` holds of a tensor of ``num_rows`` rows, after the cut into parts, as ranges in order."""

    def part(self, tensor: torch.Tensor, *, rank: int, num_ranks: int) -> torch.Tensor:
        """Return a copy of a rank's part of a whole tensor."""
        rows = tensor
        if self.row_parts > 1:  # [R, C, ...] as [R * row_parts, C / row_parts, ...]
            check_row_parts(rows.shape, self.row_parts)
            rows = rows.unflatten(1, (self.row_parts, rows.size(1) // self.row_parts)).flatten(0, 1)
        ranges = self.full_ranges(tensor.size(0), rank=rank, num_ranks=num_ranks)
        return torch.cat([rows[:0], *(rows[begin:end] for begin, end in ranges)]).contiguous()

    def __eq__(self, other: object) -> bool:
        # An optimizer's step compares placements for each parameter, and isinstance of a placement is slow in torch 2.13.
        if type(other) is type(self):
            return other is self or self._fields == other._fields
        return getattr(other, "is_of_any_rows", False)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((type(self), *self._fields))

    def __reduce__(self) -> tuple[type[UnevenShard], tuple[int, ...]]:
        return type(self), self._fields

    # DTensor calls these on a placement. Names and signatures are torch's (config/torch_versions.py). Sizes of dim 0 that
    # they take are in rows before this axis cuts, those that they return in rows after it, as an axis further right needs.

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:  # type: ignore[override]
        ranges = self.full_ranges(curr_local_size, rank=rank, num_ranks=num_chunks)
        return sum(end - begin for begin, end in ranges), ranges[0][0] if ranges else 0

    local_shard_size_and_offset = _local_shard_size_and_offset  # type: ignore[assignment]

    def _replicate_to_shard(  # type: ignore[override]
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shard_index: int
    ) -> torch.Tensor:
        # A copy, also of one range: a view would keep the whole tensor's memory.
        return self.part(local_tensor, rank=shard_index, num_ranks=mesh.size(mesh_dim))

    def _to_replicate_tensor(  # type: ignore[override]
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, current_logical_shape: Sequence[int]
    ) -> torch.Tensor:
        num_rows, num_ranks = current_logical_shape[0], mesh.size(mesh_dim)
        held = [self.full_ranges(num_rows, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
        counts = [sum(end - begin for begin, end in ranges) for ranges in held]
        rank = mesh.get_local_rank(mesh_dim)
        # A wrong number of rows would shift those of all ranks after this one.
        if local_tensor.size(0) != counts[rank]:
            own = " and ".join(f"[{begin}, {end})" for begin, end in held[rank]) or "[0, 0)"
            raise ValueError(
                f"the local tensor must hold rows {own} by {self}, got {local_tensor.size(0)} rows; pass "
                "shape and stride of the full tensor to DTensor.from_local"
            )
        most = max(counts)
        padding = local_tensor.new_zeros((most - local_tensor.size(0), *local_tensor.shape[1:]))
        padded = torch.cat([local_tensor, padding]) if padding.size(0) else local_tensor.contiguous()
        # gloo knows no int16 (the remainders of bf16 weights): what travels are bits.
        sent = padded.view(torch.float16) if padded.dtype == torch.int16 else padded
        gathered = all_gather_functional(sent, gather_dim=0, group=(mesh, mesh_dim))
        if isinstance(gathered, funcol.AsyncCollectiveTensor):
            gathered = gathered.wait()  # once, as each operation on it would ask whether it has
        gathered = gathered.view(padded.dtype)
        pieces = [(0, gathered[:0])]
        for ranges, rows in zip(held, gathered.unflatten(0, (num_ranks, most)), strict=True):
            for begin, end in ranges:
                pieces.append((begin, rows[: end - begin]))
                rows = rows[end - begin :]
        # Ranks' ranges interleave where each holds several.
        joined = torch.cat([piece for _, piece in sorted(pieces, key=itemgetter(0))])
        return joined if self.row_parts == 1 else joined.unflatten(0, (num_rows, self.row_parts)).flatten(1, 2)

    def _reduce_shard_tensor(
        self, tensor: torch.Tensor, mesh: DeviceMesh, reduce_op: str, mesh_dim: int
    ) -> torch.Tensor:
        # Not the hot path (the engine reduces whole buffers), so the simple way: all-reduce, then take our rows.
        reduced = funcol.all_reduce(tensor, reduceOp=reduce_op, group=(mesh, mesh_dim))
        return self._replicate_to_shard(reduced, mesh, mesh_dim, mesh.get_local_rank(mesh_dim))

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"a tensor placed by {self} is made by redistribution, to or from Replicate()")

    _split_tensor = _to_new_shard_dim = _refuse


def has_uneven(placements: Iterable[object]) -> bool:
    """Return whether a placement is an ``UnevenShard``."""
    # Each DTensor's construction asks this, and isinstance of a placement is slow in torch 2.13.
    return not _KINDS.isdisjoint(map(type, placements))


def is_uneven(tensor: torch.Tensor) -> bool:
    """Return whether this is a DTensor that an ``UnevenShard`` places."""
    return isinstance(tensor, DTensor) and has_uneven(tensor.placements)


def is_in_boxes(placements: Sequence[Placement]) -> bool:
    """Return whether a rank's part may be several boxes of the whole tensor."""
    return any(isinstance(p, BlockShard) or cuts_rows(p) for p in placements)


def cuts_rows(placement: Placement) -> bool:
    """Return whether this is a RowShard whose local rows are parts of the tensor's rows."""
    # See [Note: what rows cost].
    return getattr(placement, "row_parts", 1) > 1


class RowShard(UnevenShard):
    """Rows split over a mesh axis where the segments of a flat buffer cut them, perhaps unevenly.

    Rank k of the axis owns the rows of the tensor that begin in elements [k * segment_numel, (k + 1) * segment_numel)
    of a buffer in which the tensor begins at ``start``. Ranks may own no row. Tensors that are split in the same way combine freely;
    others are redistributed first.

    With ``row_parts`` p (``Granule.row_parts``) rows are those of the tensor's view [R * p, C / p, ...]. The local tensor has
    the shape [rows here, C / p, ...]; the DTensor's stays [R, C, ...]. Elementwise operations between tensors placed so, and
    norms and sums of all elements, work on the parts. Operations on rows or columns gather first, or are refused
    (propagation.py). On an axis further right, which cuts what this one leaves, these parts are the rows and
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

    def __init__(self, start: int, segment_numel: int, row_numel: int, row_parts: int = 1) -> None:
        if row_parts < 1:
            raise ValueError(f"row_parts must be 1 or more, got {row_parts}")
        if start < 0 or segment_numel < 0 or row_numel < 0:
            raise ValueError(
                f"start, segment_numel and row_numel must be 0 or more, got {start}, {segment_numel} and {row_numel}"
            )
        super().__init__(start, segment_numel, row_numel, row_parts)
        self.start, self.segment_numel, self.row_numel, self.row_parts = start, segment_numel, row_numel, row_parts

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

    def full_ranges(self, num_rows: int, *, rank: int, num_ranks: int) -> list[_Range]:
        """Return the rows that ``rank`` owns as one range, or none."""
        begin, end = self.rows(num_rows, rank=rank, num_ranks=num_ranks)
        return [(begin, end)] if end > begin else []

    def seen_as(self, shape: torch.Size, other: torch.Size, *, num_ranks: int) -> RowShard | None:
        """Return the placement of a view in shape ``other``, if ranks' elements are whole rows of both; else None."""
        if self.row_parts == 1 and other[:1] == shape[:1]:
            return self
        # Sums of rows keep the placement of the rows, whose elements the cuts below count.
        has_own_rows = shape[1:].numel() == self.row_numel * self.row_parts
        if not other or not has_own_rows or (self.row_parts > 1 and len(other) > 1):
            return None
        row_numel = other[1:].numel()
        cuts = (rank * self.segment_numel - self.start for rank in range(1, num_ranks))
        inside = [cut for cut in cuts if 0 < cut < shape.numel()]
        fits = all(cut % self.row_numel == 0 and cut % row_numel == 0 for cut in inside)
        return RowShard(self.start, self.segment_numel, row_numel) if fits else None

    def __repr__(self) -> str:
        parts = f", row_parts={self.row_parts}" if self.row_parts > 1 else ""
        return f"RowShard(start={self.start}, segment_numel={self.segment_numel}, row_numel={self.row_numel}{parts})"

    def __str__(self) -> str:
        parts = f":1/{self.row_parts}" if self.row_parts > 1 else ""
        return f"Rows({self.start}:{self.segment_numel}:{self.row_numel}{parts})"


class BlockShard(UnevenShard):
    """Blocks of equally many rows along dim 0, each of which is split evenly over a mesh axis.

    A rank holds its rows of the first block, then its rows of the second, and so on: tensor parallelism splits a gated
    ``linear_fc1`` of [gate; up] matrix by matrix. PyTorch's private ``_StridedShard`` says the same, but PyTorch reads it as the
    order of two axes wherever the numbers allow that, which is wrong with uneven rows on the other axis.

    Raises:
        ValueError: fewer than two blocks; when used, rows that blocks and ranks do not divide.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be 2 or more, got {num_blocks}; one block is Shard(0)")
        super().__init__(num_blocks)
        self.num_blocks = num_blocks

    def full_ranges(self, num_rows: int, *, rank: int, num_ranks: int) -> list[_Range]:
        """Return the rows of a tensor of ``num_rows`` rows that ``rank`` holds, as ranges in order."""
        pieces = self.num_blocks * num_ranks
        if num_rows % pieces != 0:
            raise ValueError(
                f"rows must be a multiple of {pieces} ({self.num_blocks} blocks x {num_ranks} ranks), got {num_rows}"
            )
        piece = num_rows // pieces
        starts = [(block * num_ranks + rank) * piece for block in range(self.num_blocks)]
        return [(start, start + piece) for start in starts if piece]

    def __repr__(self) -> str:
        return f"BlockShard(num_blocks={self.num_blocks})"

    def __str__(self) -> str:
        return f"Blocks({self.num_blocks})"


_KINDS = {RowShard, BlockShard}
REMEDY = "call full_tensor() or redistribute it to Replicate() first, or work on to_local()"


def check_parts(spec: DTensorSpec) -> None:
    """Refuse parts of rows whose columns are cut again, and those on an axis of one rank, which torch would take for whole rows."""
    # See [Note: what rows cost].
    axes = [axis for axis, placement in enumerate(spec.placements) if cuts_rows(placement)]
    if axes and any(placement.is_shard() and not placement.is_shard(0) for placement in spec.placements[axes[0] :]):
        raise NotImplementedError(
            f"columns must be cut before parts of rows are, got {spec.placements}; put the other axis first, or {REMEDY}"
        )
    if any(spec.mesh.size(axis) == 1 for axis in axes):
        raise NotImplementedError(
            f"an axis of one rank cuts nothing and must have row_parts=1, got {spec.placements} on {spec.mesh}"
        )


torch.serialization.add_safe_globals([*_KINDS])


# ---- the parts of a tensor ------------------------------------------------------------------------------------------


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
    if not tensor.dim():
        return [ChunkStorageMetadata(torch.Size(), torch.Size())]
    check_parts(tensor._spec)
    mesh = tensor.device_mesh
    columns = [Replicate() if placement.is_shard(0) else placement for placement in tensor.placements]
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, columns)
    sizes = torch.Size(shape)
    unit = row_numel = sizes[1:].numel() or 1  # elements of what an axis counts as a row
    ranges: list[_Range] = [(0, tensor.size(0) * row_numel)]
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, Shard) or placement.dim != 0:
            continue
        # The leftmost axis cuts first, and the next one cuts what it leaves. See [Note: cuts go inside out].
        num_rows = sum(end - begin for begin, end in ranges) // unit
        held = _held(placement, num_rows, rank=mesh.get_local_rank(axis), num_ranks=mesh.size(axis))
        if cuts_rows(placement):
            check_row_parts(sizes, placement.row_parts)  # type: ignore[attr-defined]
            unit //= placement.row_parts  # type: ignore[attr-defined]
        ranges = [piece for begin, end in held for piece in _slice(ranges, begin * unit, end * unit)]
    return [box for begin, end in ranges or [(0, 0)] for box in _boxes(begin, end, sizes, offsets)]


def _held(placement: Shard, num_rows: int, *, rank: int, num_ranks: int) -> list[_Range]:
    """Return the ranges that an axis gives a rank out of ``num_rows`` rows, or out of the parts that it cuts rows into."""
    if isinstance(placement, UnevenShard):
        return placement.full_ranges(num_rows, rank=rank, num_ranks=num_ranks)
    size, offset = map(int, placement._local_shard_size_and_offset(num_rows, num_ranks, rank))
    return [(offset, offset + size)] if size else []


def _boxes(begin: int, end: int, sizes: torch.Size, offsets: tuple[int, ...]) -> Iterator[ChunkStorageMetadata]:
    """Yield elements [begin, end) of rows as boxes, in order, where dims from 1 on have these sizes and offsets."""
    row_numel, column_numel = sizes[1:].numel() or 1, sizes[2:].numel()
    # Rows that lie here with all their elements.
    whole = -(-begin // row_numel) * row_numel, end // row_numel * row_numel
    pieces = [(begin, whole[0]), whole, (whole[1], end)] if whole[0] <= whole[1] else [(begin, end)]
    for first, last in [(first, last) for first, last in pieces if last > first] or [(0, 0)]:
        num_rows, rest = divmod(last - first, row_numel)
        (row, element), first_offsets, box_sizes = divmod(first, row_numel), offsets[1:], sizes[1:]
        if rest:
            num_rows = 1
            first_offsets = (offsets[1] + element // column_numel, *offsets[2:])
            box_sizes = torch.Size((rest // column_numel, *sizes[2:]))
        yield ChunkStorageMetadata(torch.Size((row, *first_offsets)), torch.Size((num_rows, *box_sizes)))


def _slice(ranges: list[_Range], begin: int, end: int) -> list[_Range]:
    """Return elements [begin, end) of those that ``ranges`` name, counted through all ranges."""
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
    local, boxes = memory_of(tensor._local_tensor, writes=writes).detach(), boxes_of(tensor)
    if len(boxes) == 1:
        return [(boxes[0], local.view(boxes[0].sizes))]
    parts = local.view(-1).split([box.sizes.numel() for box in boxes])
    return [(box, part.view(box.sizes)) for box, part in zip(boxes, parts, strict=True)]


def local_rows(parameter: DTensor, full: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``full``, in the local shape of ``parameter``; all of it where that is replicated."""
    parts = [full[_indices_of(box)].flatten() for box in boxes_of(parameter)]
    return torch.cat(parts).view(parameter._local_tensor.shape)


def spread(tensor: DTensor) -> torch.Tensor:
    """Return a tensor of the whole shape with this rank's part in its place, and zeros elsewhere."""
    whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor._local_tensor.device)
    for box, local in pieces_of(tensor):
        whole[_indices_of(box)] = local
    return whole


def _indices_of(box: ChunkStorageMetadata) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(box.offsets, box.sizes, strict=True))


def write_part(target: DTensor, part: torch.Tensor) -> None:
    """Copy ``part`` to this rank's part of ``target``, the first replica's to all. Ranks: all of the tensor's mesh."""
    mesh = target.device_mesh
    for axis, placement in enumerate(target.placements):
        # Ranks' generators may differ, and replicas that differ would never meet again.
        if isinstance(placement, Replicate) and mesh.size(axis) > 1:
            dist.broadcast(part, group=mesh.get_group(axis), group_src=0)
    memory_of(target._local_tensor).copy_(part)


# ---- memory inside of tensor subclasses that wrap other tensors -----------------------------------------------


def memory_of(tensor: torch.Tensor, *, writes: bool = True) -> torch.Tensor:
    """Return the plain tensor that holds a shard's values: the tensor itself, or the one that a subclass wraps.

    A subclass whose values are computed when they are read has a method ``fsdp_memory``, which returns memory that may be written.

    Args:
        writes: it may be written. Else a tensor that computes its values when it is read stays what it is.
    """
    if hasattr(type(tensor), "fsdp_memory"):
        return tensor.fsdp_memory() if writes else tensor  # type: ignore[attr-defined]
    while type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, key) for key in tensor.__tensor_flatten__()[0]]
        tensor = next(each for each in inner if looks_like(each, tensor))
    return tensor


def looks_like(inner: object, outer: torch.Tensor) -> bool:
    """Return whether ``inner`` is a tensor of the shape and dtype of ``outer``."""
    return isinstance(inner, torch.Tensor) and inner.shape == outer.shape and inner.dtype == outer.dtype


def leaves_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with separate memory that a wrapper subclass consists of; the tensor itself if it is none."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for key in tensor.__tensor_flatten__()[0]:
        yield from leaves_of(getattr(tensor, key))
