"""Flat buffers: their memory, where their elements rest on each mesh axis, and which collectives bring them to other placements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.comm.transport import Transport
from megatron.core.distributed.fsdp.dtensor.placements import RowShard
from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout, rows_before

# A transport's all_gather and its arguments: the buffer to fill, and this rank's shard of it.
Gather = tuple[Callable[[torch.Tensor, torch.Tensor], object], torch.Tensor, torch.Tensor]
# A transport's reduce_scatter or all_reduce, and this rank's summand.
Reduction = tuple[Callable[..., None], torch.Tensor]


class FlatStorage:
    """A flat tensor in memory of its own, which can be freed and taken again under its views, or in an arena.

    ``flat`` [numel] is the tensor; views of it stay valid as objects while the memory is free, but must not be read.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel, self.dtype, self.device = numel, dtype, device
        self.nbytes = numel * dtype.itemsize  # of the whole buffer, in use or not
        self.move(None)

    def move(self, flat: torch.Tensor | None) -> None:
        """Use the given range of an arena, or, if None, new memory of its own."""
        self.in_arena = flat is not None
        # New memory instead of ``resize_``: views of the former range must keep it.
        self.flat = torch.empty(self.numel, dtype=self.dtype, device=self.device) if flat is None else flat
        self.allocated = True

    def allocate(self) -> None:
        """Allocate the memory if it was freed; its content is undefined then."""
        if not self.allocated:
            # The storage object stays, so parameters and saved views point to the new memory without being touched.
            self.flat.untyped_storage().resize_(self.nbytes)
            self.allocated = True

    def free(self) -> None:
        """Free memory of its own; a range of an arena stays."""
        if self.allocated and not self.in_arena:
            self.flat.untyped_storage().resize_(0)
            self.allocated = False


class FlatBuffer:
    """The elements of a layout that this rank holds under one placement per axis.

    Args:
        layout: where each tensor lies in the full buffer.
        placements: [A] one per axis: ``Replicate``, ``Shard(0)`` or ``Partial``.
        axes: [A] transports of the mesh axes, outermost first.
        local: [local_numel] storage to use.

    The innermost axis cuts the full buffer first and each outer axis cuts what is left, so that the piece of an
    inner rank is contiguous whatever the outer axes do. [Note: cuts go inside out].
    """

    def __init__(
        self, layout: FlatLayout, placements: Sequence[Placement], axes: Sequence[Transport], local: torch.Tensor
    ) -> None:
        self.layout = layout
        self.placements = tuple(placements)
        self.axes = tuple(axes)
        # Computed once: ranks and placements of a buffer never change, only its memory does.
        self.begin, self.end = local_range(layout, self.placements, self.axes)
        placed = zip(self.placements, self.axes, strict=True)
        self._is_cut = any(isinstance(placement, Shard) and axis.size > 1 for placement, axis in placed)
        self.local = local
        if local.numel() != self.end - self.begin:
            raise ValueError(f"the local storage must have {self.end - self.begin} elements, got {local.numel()}")

    def rebind(self, local: torch.Tensor) -> None:
        """Use other memory [local_numel]; views from before keep the former."""
        self.local = local

    @property
    def local_nbytes(self) -> int:
        """Bytes that this rank holds."""
        return self.local.numel() * self.local.element_size()

    def view(self, index: int) -> torch.Tensor:
        """Return the part of tensor ``index`` on this rank: rows [rows_here, ...] as they are cut, or all of a 0-dim tensor.

        Where no axis cuts the buffer it has the tensor's own shape, whatever the layout's ``row_parts`` are.
        """
        offset, shape = self.place_of(index)
        return self.local[offset : offset + math.prod(shape)].view(shape)

    def place_of(self, index: int) -> tuple[int, tuple[int, ...]]:
        """Return where ``view`` begins in the local storage, and its shape."""
        slot = self.layout.slots[index]
        if not slot.shape or not self._is_cut:
            return slot.start - self.begin, tuple(slot.shape)
        first = self.first_row(index)
        stop = rows_before(self.end, start=slot.start, row_numel=slot.row_numel, num_rows=slot.rows)
        # A tensor without rows here begins at 0: its offset would lie outside of the local storage.
        offset = slot.start + first * slot.row_numel - self.begin if stop > first else 0
        return offset, (stop - first, *slot.cut_shape[1:])

    def first_row(self, index: int) -> int:
        """Return the first row of tensor ``index`` (as it is cut) that is on this rank, or begins after what is."""
        slot = self.layout.slots[index]
        if not slot.shape or not self._is_cut:
            return 0
        return rows_before(self.begin, start=slot.start, row_numel=slot.row_numel, num_rows=slot.rows)

    def row_placements(self, index: int) -> list[Placement]:
        """Return the placements of a DTensor around ``view``: [A] by axis, innermost first.

        The first axis that cuts a tensor with ``row_parts`` cuts its rows into them; to the others they are rows. Of several
        axes, one of a single rank cuts nothing: torch 2.11 would take two that cut alike for one.
        """
        slot, begin, segment_numel = self.layout.slots[index], 0, self.layout.total_numel
        row_parts = slot.row_parts
        placements: list[Placement] = []
        for placement, axis in reversed(list(zip(self.placements, self.axes, strict=True))):
            if not isinstance(placement, Shard) or (axis.size == 1 and len(self.axes) > 1):
                placements.append(Replicate())
                continue
            # An axis cuts what the axes inside of it have left to this rank. See [Note: cuts go inside out].
            segment_numel //= axis.size
            start = max(slot.start - begin, 0)
            if axis.size == 1:
                placements.append(RowShard(start, segment_numel, slot.row_numel * row_parts))
            else:
                placements.append(RowShard(start, segment_numel, slot.row_numel, row_parts))
                row_parts = 1
            begin += axis.rank * segment_numel  # the next axis cuts what this one leaves here
        return placements

    def piece(self, placements: Sequence[Placement]) -> torch.Tensor:
        """Return a view of the part that this rank keeps under ``placements``, which must lie inside this buffer."""
        begin, end = local_range(self.layout, placements, self.axes)
        assert self.begin <= begin and end <= self.end, "a piece lies inside its buffer"
        return self.local[begin - self.begin : end - self.begin]

    def gathers(self, out: FlatBuffer) -> list[Gather]:
        """List the all-gathers that fill ``out``, which is replicated on axes where this buffer is sharded, in order.

        ``self.local`` may lie in ``out.local``, at its own place. The list holds as long as neither moves.

        Raises:
            ValueError: ``out`` is sharded where this buffer is not.
        """
        placements, source = list(self.placements), self.local
        steps: list[Gather] = []
        for axis, transport in enumerate(self.axes):  # outermost first: undoes the last cut first
            if isinstance(placements[axis], Shard) and isinstance(out.placements[axis], Replicate):
                placements[axis] = Replicate()
                target = out.piece(placements)
                steps.append((transport.all_gather, target, source))
                # The next axis sends what this one has gathered, in place.
                source = target
        if tuple(placements) != out.placements:
            raise ValueError(f"gather goes from shards to replicas, got {self.placements} -> {out.placements}")
        return steps

    def reduction(self, placements: Sequence[Placement]) -> Reduction:
        """Return the reduce-scatter or all-reduce that brings this partial buffer to ``placements``.

        The pair is the transport's function and its second argument, this rank's summand; it holds as long as
        ``self.local`` does not move.

        Raises:
            NotImplementedError: more than one axis would change.
        """
        changed = [a for a, (now, then) in enumerate(zip(self.placements, placements, strict=True)) if now != then]
        if len(changed) != 1 or not isinstance(self.placements[changed[0]], Partial):
            raise NotImplementedError(
                f"one partial axis is reduced at a time, got {self.placements} -> {tuple(placements)}"
            )
        # One axis at a time, since sums between axes are kept, scaled and sent apart. See [Note: two reductions].
        transport, target = self.axes[changed[0]], placements[changed[0]]
        return (transport.reduce_scatter if isinstance(target, Shard) else transport.all_reduce), self.local


def local_range(layout: FlatLayout, placements: Sequence[Placement], axes: Sequence[Transport]) -> tuple[int, int]:
    """[begin, end) of the full buffer that rests on this rank under ``placements``; pure."""
    begin, numel = 0, layout.total_numel
    for placement, transport in reversed(list(zip(placements, axes, strict=True))):
        if isinstance(placement, Shard):
            numel //= transport.size
            begin += transport.rank * numel
    return begin, begin + numel
