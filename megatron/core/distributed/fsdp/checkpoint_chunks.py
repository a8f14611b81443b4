"""Which part of each tensor this rank holds and writes. It follows from placements and layout; no rank asks another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Replicate

from megatron.core.distributed.fsdp.checkpoint_state import NamedTensor


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the memory that holds it on this rank.

    Args:
        name: the tensor's name in the checkpoint.
        size: of the whole tensor.
        offsets: where the box begins in it.
        local: the box; its shape is the box's.
    """

    name: str
    size: torch.Size
    offsets: torch.Size
    local: torch.Tensor

    @property
    def metadata(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=self.offsets, sizes=self.local.shape)


def local_chunk(name: str, tensor: torch.Tensor) -> Chunk | None:
    """The part of a tensor that this rank holds; None where it is not in the tensor's mesh.

    Raises:
        RuntimeError: a placement is Partial.
    """
    if not isinstance(tensor, DTensor):
        return Chunk(name, tensor.shape, torch.Size([0] * tensor.dim()), tensor.detach())
    if tensor.device_mesh.get_coordinate() is None:
        return None
    (box,) = tensor.__create_chunk_list__()
    local = tensor._local_tensor.detach()
    assert box.sizes == local.shape, f"{name}: the layout says {box.sizes}, the rank holds {local.shape}"
    return Chunk(name, tensor.shape, box.offsets, local)


def chunks_to_write(tensors: Sequence[NamedTensor]) -> list[Chunk]:
    """What this rank writes, so that all ranks together write each element once.

    Replicas share the work by bytes; plain tensors are rank 0's.
    """
    nbytes: dict[tuple[object, ...], list[int]] = {}
    chunks = []
    for entry in tensors:
        chunk = local_chunk(entry.name, entry.tensor)
        if chunk is None:
            continue
        tensor = entry.tensor
        if not isinstance(tensor, DTensor):
            is_mine = dist.get_rank() == 0
        elif tensor.numel() == 0:
            is_mine = not any(tensor.device_mesh.get_coordinate() or ())  # nobody holds an element, but it has a name
        else:
            is_mine = _is_my_turn(tensor, chunk, nbytes) and chunk.local.numel() > 0
        if is_mine:
            chunks.append(chunk)
    return chunks


def copied_to_host(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks in host memory of their own (pinned where they come from a GPU). Blocks until the copies are made."""
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


def _is_my_turn(tensor: DTensor, chunk: Chunk, nbytes: dict[tuple[object, ...], list[int]]) -> bool:
    """True if this rank, of those that hold the same chunk, has the least to write so far; they all agree on it."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    axes = tuple(axis for axis, placement in enumerate(tensor.placements) if isinstance(placement, Replicate))
    mine, num_replicas = 0, 1
    for axis in axes:
        mine, num_replicas = mine * mesh.size(axis) + coordinate[axis], num_replicas * mesh.size(axis)
    written = nbytes.setdefault((mesh, axes), [0] * num_replicas)
    chosen = written.index(min(written))
    written[chosen] += chunk.local.nbytes
    return chosen == mine
