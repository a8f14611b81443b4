"""A flat buffer over the axes of a device mesh, as users make it and look at a group's: under Megatron-FSDP's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatBuffer, local_range
from megatron.core.distributed.fsdp.comm.choose import SharedTransports
from megatron.core.distributed.fsdp.compat.chunk_packing import pack_chunks
from megatron.core.distributed.fsdp.mesh.group_mesh import device_of, mesh_in_order


class Flat(Shard):
    """A segment of a flat buffer for each rank of an axis; equal to ``Shard(0)``, and to what a DTensor of such a buffer has."""

    is_of_any_rows = True  # see UnevenShard.__eq__

    def __init__(self) -> None:
        super().__init__(0)


def changed_mesh_axis(old_placements: Iterable[Placement], new_placements: Iterable[Placement]) -> int | None:
    """Return the mesh axis whose placement differs, or None.

    Raises:
        NotImplementedError: several do.
        ValueError: there are more of one than of the other.
    """
    pairs = enumerate(zip(old_placements, new_placements, strict=True))
    changed = [axis for axis, (old, new) in pairs if old != new]
    if len(changed) > 1:
        raise NotImplementedError(f"one axis may change its placement, got the axes {changed}")
    return changed[0] if changed else None


class DBuffer(FlatBuffer):
    """Several tensors in one flat buffer, whose elements rest on the ranks of a mesh as one placement per axis says.

    Args:
        mesh: its axes, outermost first.
        placements: [A] one per axis: ``Replicate()``, ``Flat()`` (or ``Shard(0)``) or ``Partial("sum" or "avg")``; an axis
            that cuts the buffer comes after all that do not.
        tensor_shapes: [T] shapes of the tensors.
        dtype: of the buffer.
        device: of this rank's part, which is zeros.

    Attributes:
        local: [local_numel] this rank's part, also ``local_buffer``.
        layout: where the tensors lie in the whole buffer; see ``pack_chunks``. Rank boundaries fall between rows.
        allocation_stream: the CUDA stream that was current when memory was allocated; None on the CPU.

    Raises:
        ValueError: not one placement per axis, or a cut before an axis that does not cut.
        TypeError: another kind of placement.

    Ranks: all of the mesh make it; communicates nothing.
    Source: the class of this name of the package megatron-fsdp (constructor and methods).
    """

    mesh: DeviceMesh
    allocation_stream: Any = None

    def __init__(
        self,
        mesh: DeviceMesh,
        placements: Iterable[Placement],
        tensor_shapes: Iterable[Iterable[int]],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        placed, axes = _checked(placements, mesh), _axes_of(mesh)
        layout = pack_chunks(tensor_shapes, num_ranks=mesh.size())
        begin, end = local_range(layout, placed, axes)
        super().__init__(layout, placed, axes, torch.zeros(end - begin, dtype=dtype, device=device))
        self.mesh = mesh
        if self.local.is_cuda:
            self.allocation_stream = torch.cuda.current_stream(self.local.device)

    @classmethod
    def over(cls, buffer: FlatBuffer, mesh: DeviceMesh) -> DBuffer:
        """Return the same elements in the same memory. Ranks: each alone."""
        made = cls.__new__(cls)
        FlatBuffer.__init__(made, buffer.layout, _flat(buffer.placements), buffer.axes, buffer.local)
        made.mesh = mesh
        return made

    @classmethod
    def from_local(
        cls,
        local_buffer: torch.Tensor,
        mesh: DeviceMesh,
        placements: Iterable[Placement],
        tensor_shapes: Iterable[Iterable[int]],
        *,
        allocation_stream: Any = None,
    ) -> DBuffer:
        """Return a buffer in memory that is there: [local_numel], contiguous.

        Raises:
            ValueError: it has another shape.
        """
        if local_buffer.dim() != 1 or not local_buffer.is_contiguous():
            raise ValueError(
                f"local_buffer must be contiguous and have one dimension, got {list(local_buffer.shape)} with strides "
                f"{local_buffer.stride()}; pass local_buffer.contiguous().view(-1)"
            )
        layout = pack_chunks(tensor_shapes, num_ranks=mesh.size())
        placed = _checked(placements, mesh)
        made = cls.over(FlatBuffer(layout, placed, _axes_of(mesh), local_buffer), mesh)
        made.allocation_stream = allocation_stream
        return made

    @classmethod
    def distribute_tensors(
        cls, tensors: Iterable[torch.Tensor], mesh: DeviceMesh, placements: Iterable[Placement]
    ) -> DBuffer:
        """Return a buffer on the mesh's device that holds this rank's part of whole tensors, detached.

        What a tensor on the meta device would fill is left as it is. Under ``Partial`` the tensors are this rank's summand.

        Raises:
            ValueError: there are none, or their dtypes differ.
        """
        whole = [tensor.detach() for tensor in tensors]
        dtypes = {tensor.dtype for tensor in whole}
        if len(dtypes) != 1:
            raise ValueError(f"distribute_tensors needs tensors of one dtype, got {sorted(map(str, dtypes))}")
        made = cls(mesh, placements, [tensor.shape for tensor in whole], dtypes.pop(), mesh.device_type)
        for index, tensor in enumerate(whole):
            if not tensor.is_meta:
                own = made.view(index)
                begin = made.first_row(index)
                own.copy_(tensor if tensor.dim() == 0 else tensor[begin : begin + own.size(0)])
        return made

    @property
    def local_buffer(self) -> torch.Tensor:
        """This rank's part: [local_numel]."""
        return self.local

    @property
    def offset(self) -> int:
        """The element of the whole buffer where this rank's part begins."""
        return self.begin

    @property
    def dtype(self) -> torch.dtype:
        """Of the buffer."""
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        """Of this rank's part."""
        return self.local.device

    @property
    def is_symmetric_memory(self) -> bool:
        """Whether this rank's part lies in PyTorch's symmetric memory, as far as PyTorch can tell."""
        tells = getattr(_symmetric_memory, "is_symm_mem_tensor", None)
        return tells is not None and self.local.is_cuda and bool(tells(self.local))

    def rendezvous(self, mesh_axis: int) -> None:
        """Exchange handles of symmetric memory over an axis. Ranks: all of it, in the same order."""
        _symmetric_memory.rendezvous(self.local, group=self.mesh.get_group(mesh_axis).group_name)

    def release_storage(self) -> None:
        """Free the memory; views stay views of it, and must not be read until it is allocated again."""
        self.local.untyped_storage().resize_(0)

    def reallocate_storage(self) -> None:
        """Allocate the memory that ``release_storage`` freed, with no values."""
        end = int(self.local.storage_offset()) + self.local.numel()
        self.local.untyped_storage().resize_(end * self.local.itemsize)

    def get_local_tensor(self, index: int) -> torch.Tensor:
        """Return this rank's rows of tensor ``index``, a view."""
        return self.view(index)

    def get_dtensor(self, index: int) -> DTensor:
        """Return tensor ``index`` as a DTensor around this rank's rows, whose placements know the rows of all ranks."""
        shape = self.layout.slots[index].shape
        in_order = mesh_in_order(self.mesh, range(self.mesh.ndim)[::-1])
        placements = [
            placement if isinstance(placement, Partial) else rows
            for placement, rows in zip(reversed(self.placements), self.row_placements(index), strict=True)
        ]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(self.view(index), in_order, placements, run_check=False, shape=shape, stride=stride)

    def cast(self, dtype: torch.dtype, *, out: DBuffer | None = None) -> DBuffer:
        """Return the buffer in another dtype, in ``out`` or in new memory; itself, if it has the dtype and there is no ``out``."""
        if out is None and dtype == self.dtype:
            return self
        out = self._checked_out(out, self.placements, dtype)
        out.local.copy_(self.local)
        return out

    def redistribute(self, new_placements: Iterable[Placement], *, out: DBuffer | None = None) -> DBuffer:
        """Return the buffer under other placements: gathered, reduced, or cut.

        Without ``out`` it is itself where nothing changes, a view of its memory where it is cut, and else in new memory.

        Raises:
            ValueError: ``out`` is another kind of buffer; or some axes would be gathered and others cut.
            NotImplementedError: more than one partial axis would be reduced, or an axis would become a sum.

        Ranks: all of the mesh; on the current stream.
        """
        placements = _checked(new_placements, self.mesh)
        if placements == self.placements:
            return self.cast(self.dtype, out=out)
        _checked(self.placements, self.mesh)
        pairs = enumerate(zip(self.placements, placements, strict=True))
        changed = [(axis, now, then) for axis, (now, then) in pairs if now != then]
        for axis, now, _ in changed:
            if isinstance(now, Partial):
                return self._reduced(axis, now, placements, self._checked_out(out, placements, self.dtype))
        if any(isinstance(then, Partial) for *_, then in changed):
            if out is not None or any(not isinstance(n, Replicate) or t != Partial("avg") for _, n, t in changed):
                raise NotImplementedError(
                    f"only Replicate() becomes Partial('avg'), and without out, got {self.placements} -> {placements}"
                )
            return self._around(self.local, placements)
        begin, end = local_range(self.layout, placements, self.axes)
        if self.begin <= begin and end <= self.end:
            if out is None:
                return self._around(self.piece(placements), placements)
            self._checked_out(out, placements, self.dtype).local.copy_(self.piece(placements))
            return out
        out = self._checked_out(out, placements, self.dtype)
        for gather, full, shard in self.gathers(out):
            gather(full, shard)
        return out

    def allgather(self, mesh_axis: int, *, out: DBuffer | None = None) -> DBuffer:
        """Gather what an axis cuts. Ranks: all of the axis."""
        return self._moved(mesh_axis, "allgather", Shard, Replicate(), out)

    def allreduce(self, mesh_axis: int, *, out: DBuffer | None = None) -> DBuffer:
        """Sum or average over a partial axis, for all of its ranks. Ranks: all of the axis."""
        return self._moved(mesh_axis, "allreduce", Partial, Replicate(), out)

    def reduce_scatter(self, mesh_axis: int, new_placement: Placement, *, out: DBuffer | None = None) -> DBuffer:
        """Sum or average over a partial axis, each rank its segment. Ranks: all of the axis."""
        return self._moved(mesh_axis, "reduce_scatter", Partial, new_placement, out)

    def scatter(self, mesh_axis: int, new_placement: Placement, *, out: DBuffer | None = None) -> DBuffer:
        """Cut what an axis replicates; without ``out`` a view. Ranks: each alone."""
        return self._moved(mesh_axis, "scatter", Replicate, new_placement, out)

    def _moved(self, axis: int, name: str, kind: type[Placement], then: Placement, out: DBuffer | None) -> DBuffer:
        now = self.placements[axis]
        if not isinstance(now, kind):
            raise ValueError(f"{name} of axis {axis} needs {kind.__name__} there, got {now}")
        if not isinstance(then, Replicate) and then != Shard(0):
            raise NotImplementedError(f"{name} must lead to Flat(), got {then}")
        placements = list(self.placements)
        placements[axis] = then
        return self.redistribute(placements, out=out)

    def _reduced(self, axis: int, partial: Partial, placements: Sequence[Placement], out: DBuffer) -> DBuffer:
        if isinstance(placements[axis], Partial):
            raise NotImplementedError(f"a partial axis is reduced or kept, got {self.placements} -> {placements}")
        reduce, summand = self.reduction(placements)
        # Reductions leave their input undefined.
        reduce(out.local, summand.clone(), scale=1 / self.axes[axis].size if partial.reduce_op == "avg" else 1.0)
        return out

    def _around(self, local: torch.Tensor, placements: Sequence[Placement]) -> DBuffer:
        made = DBuffer.over(FlatBuffer(self.layout, placements, self.axes, local), self.mesh)
        made.allocation_stream = self.allocation_stream
        return made

    def _checked_out(self, out: DBuffer | None, placements: Sequence[Placement], dtype: torch.dtype) -> DBuffer:
        """Return ``out``, or new memory where there is none."""
        if out is None:
            begin, end = local_range(self.layout, placements, self.axes)
            return self._around(torch.empty(end - begin, dtype=dtype, device=self.device), placements)
        wanted = {"mesh": self.mesh, "placements": tuple(placements), "layout": self.layout, "dtype": dtype}
        for name, value in (wanted | {"device": self.device}).items():
            if getattr(out, name) != value:
                raise ValueError(f"out must have the {name} {value}, got {getattr(out, name)}")
        return out


class _OutsideAxis:
    """An axis of a mesh that does not contain this rank. It allows replicated buffers and communicates nothing."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getattr__(self, name: str) -> Any:
        raise ValueError(
            f"the mesh must hold rank {dist.get_rank()}, got one of other ranks, and a buffer that is cut or moved"
        )


def _axes_of(mesh: DeviceMesh) -> tuple[Any, ...]:
    if mesh.get_coordinate() is None:
        return tuple(map(_OutsideAxis, mesh.shape))
    transports, device = SharedTransports.of(mesh), device_of(mesh)
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    return tuple(transports.get("nccl", group, group, device) for group in groups)


def _flat(placements: Iterable[Placement]) -> tuple[Placement, ...]:
    return tuple(Flat() if placement == Shard(0) else placement for placement in placements)


def _checked(placements: Iterable[Placement], mesh: DeviceMesh) -> tuple[Placement, ...]:
    """Return the placements, with ``Flat`` for ``Shard(0)``.

    Raises:
        ValueError, TypeError: as ``DBuffer``.
    """
    placed = _flat(placements)
    if len(placed) != mesh.ndim:
        raise ValueError(f"placements must be {mesh.ndim}, one per axis of the mesh, got {len(placed)}")
    for placement in placed:
        partial = isinstance(placement, Partial) and placement.reduce_op in ("sum", "avg")
        if not (partial or isinstance(placement, (Replicate, Flat))):
            raise TypeError(f"a placement must be Replicate(), Flat() or Partial('sum' or 'avg'), got {placement}")
    is_cut = [isinstance(placement, Flat) for placement in placed]
    if is_cut != sorted(is_cut):
        raise ValueError(
            f"Flat placements must be a suffix of the placements, so that each rank's part is contiguous, got {placed}"
        )
    return placed
