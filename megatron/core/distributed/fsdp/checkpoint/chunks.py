"""The parts of each tensor that this rank holds and writes, computed from placements without communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from megatron.core.distributed.fsdp.checkpoint.state import NamedTensor
from megatron.core.distributed.fsdp.dtensor.placements import pieces_of
from megatron.core.distributed.fsdp.mesh.model_parallel import DATA_PART


@dataclass(frozen=True)
class Chunk:
    """A box (a range of indices in each dim) of a tensor, and this rank's memory of it.

    Args:
        name: the tensor's name in the checkpoint.
        size: shape of the whole tensor.
        offsets: indices at which the box begins.
        local: the memory, in the box's shape.
    """

    name: str
    size: torch.Size
    offsets: torch.Size
    local: torch.Tensor

    def overlap(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], torch.Tensor] | None:
        """Return what this chunk and another box of the tensor share: where it begins, and this chunk's memory of it."""
        begins = tuple(map(max, self.offsets, offsets))
        target = self.local.detach()
        for dim, (begin, own, other, size) in enumerate(zip(begins, self.offsets, offsets, sizes, strict=True)):
            length = min(own + self.local.shape[dim], other + size) - begin
            if length <= 0:
                return None
            target = target.narrow(dim, begin - own, length)
        return begins, target


def local_chunks(name: str, tensor: torch.Tensor, *, writes: bool = False) -> list[Chunk]:
    """Return the parts of a tensor that this rank holds, in the order of rows; [] if it is not in the tensor's mesh.

    Args:
        writes: they are to be read into.

    Raises:
        RuntimeError: a placement is ``Partial``.
    """
    if not isinstance(tensor, DTensor):
        return [Chunk(name, tensor.shape, torch.Size([0] * tensor.dim()), tensor.detach())]
    if tensor.device_mesh.get_coordinate() is None:
        return []
    return [Chunk(name, tensor.shape, box.offsets, local) for box, local in pieces_of(tensor, writes=writes)]


def chunks_to_write(tensors: Sequence[NamedTensor]) -> list[Chunk]:
    """Return what this rank writes of DTensors, such that all ranks together write each element once.

    Replicas share the work evenly by bytes. Copies of another pipeline stage's tensors are not written. A tensor whose mesh is
    the data-parallel part of one over which ``parallelize_module`` has split others is the same on all such parts.

    Ranks: pure; all compute the same distribution.
    """
    nbytes: dict[tuple[object, ...], list[int]] = {}
    chunks = []
    first_ranks = _first_ranks({entry.tensor.device_mesh for entry in tensors if isinstance(entry.tensor, DTensor)})
    for entry in tensors:
        tensor = entry.tensor
        if not isinstance(tensor, DTensor) or entry.is_copy:
            continue
        held = local_chunks(entry.name, tensor)
        if not held or first_ranks.get(tensor.device_mesh) is False:
            continue
        if tensor.numel() == 0:
            # No rank holds an element, but the checkpoint must have the name.
            chunks += held[:1] if not any(tensor.device_mesh.get_coordinate() or ()) else []
        elif _is_my_turn(tensor, nbytes):
            chunks += [chunk for chunk in held if chunk.local.numel() > 0]
    return chunks


def plain_chunks(tensors: Sequence[NamedTensor]) -> list[Chunk]:
    """Return the plain tensors, whole. One of the ranks that have a name writes it."""
    plain = (entry for entry in tensors if not isinstance(entry.tensor, DTensor) and not entry.is_copy)
    return [chunk for entry in plain for chunk in local_chunks(entry.name, entry.tensor)]


def copied_to_host(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Copy the chunks to host memory, page-locked for those on a GPU. Blocks until the copies are done."""
    copies = []
    for chunk in chunks:
        copy = torch.empty(
            chunk.local.shape, dtype=chunk.local.dtype, device="cpu", pin_memory=chunk.local.device.type == "cuda"
        )
        copy.copy_(chunk.local, non_blocking=True)
        copies.append(replace(chunk, local=copy))
    for device in {chunk.local.device for chunk in chunks if chunk.local.device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _first_ranks(meshes: set[DeviceMesh]) -> dict[DeviceMesh, bool]:
    """Return, for each mesh that is the data-parallel part of another one, whether it holds that one's first rank."""
    wholes = [(mesh, vars(mesh)[DATA_PART]) for mesh in meshes if DATA_PART in vars(mesh)]
    return {part: bool((part.mesh == whole.mesh.flatten()[0]).any()) for whole, part in wholes}


def _is_my_turn(tensor: DTensor, nbytes: dict[tuple[object, ...], list[int]]) -> bool:
    """Return whether this rank has the least to write so far of those that hold the same part; all of them agree."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    axes = tuple(axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Replicate))
    mine, num_replicas = 0, 1
    for axis in axes:
        mine, num_replicas = mine * mesh.size(axis) + coordinate[axis], num_replicas * mesh.size(axis)
    written = nbytes.setdefault((mesh, axes), [0] * num_replicas)
    chosen = written.index(min(written))
    written[chosen] += tensor._local_tensor.nbytes
    return chosen == mine
