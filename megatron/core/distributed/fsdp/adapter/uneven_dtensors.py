"""Megatron-FSDP's functions of DTensors with uneven rows.

Placements of this library know their rows, so DTensor's own methods serve. A plain ``Shard`` whose ranks hold other rows than
``torch.chunk`` gives them, which DTensor would read wrongly, is what ranks exchange their sizes for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from megatron.core.distributed.fsdp.dtensor.placements import RowShard, UnevenShard, pieces_of


def _is_plain(dtensor: DTensor) -> bool:
    """Return whether the rows of each rank are to be asked for: placements are torch's, and some axis splits a dim."""
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"a DTensor is needed, got a {type(dtensor).__name__}")
    known = (UnevenShard, _StridedShard, Partial)
    placements = dtensor.placements
    return not any(isinstance(p, known) for p in placements) and any(isinstance(p, Shard) for p in placements)


def gather_and_compute_chunk_metadata(dtensor: DTensor) -> ChunkStorageMetadata:
    """Return where this rank's part lies in the whole tensor.

    Raises:
        NotImplementedError: it is several boxes, as of a gated weight that tensor parallelism splits matrix by matrix.

    Ranks: all of the mesh; blocks where placements are torch's.
    """
    if not _is_plain(dtensor):
        pieces = list(pieces_of(dtensor))
        if len(pieces) > 1:
            raise NotImplementedError(f"the local part must be one box, got {len(pieces)} of {dtensor.placements}")
        begins = pieces[0][0].offsets if pieces else torch.Size([0] * dtensor.dim())
        return ChunkStorageMetadata(begins, dtensor.to_local().shape)
    local = dtensor.to_local()
    offsets, sizes = [0] * local.dim(), list(local.shape)
    for axis, placement in reversed(list(enumerate(dtensor.placements))):  # the first axis cuts first
        if isinstance(placement, Shard):
            of_ranks = _exchanged(dtensor, axis, sizes[placement.dim])
            offsets[placement.dim] += sum(of_ranks[: dtensor.device_mesh.get_local_rank(axis)])
            sizes[placement.dim] = sum(of_ranks)
    return ChunkStorageMetadata(torch.Size(offsets), local.shape)


def _exchanged(dtensor: DTensor, axis: int, value: Any) -> list[Any]:
    values: list[Any] = [None] * dtensor.device_mesh.size(axis)
    dist.all_gather_object(values, value, group=dtensor.device_mesh.get_group(axis))
    return values


def update_uneven_dtensor_chunk_metadata(dtensor: DTensor) -> None:
    """Let DCP write and read this rank's part where it lies; does nothing where placements know. Ranks: all of the mesh."""
    if not _is_plain(dtensor):
        return
    chunk = gather_and_compute_chunk_metadata(dtensor)

    def write_items(name: str, tensor: DTensor) -> list[WriteItem]:
        local = tensor.to_local()
        if local.numel() == 0:
            return []
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(local), tensor.size())
        return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    local: Any = dtensor._local_tensor
    local.__create_chunk_list__ = lambda: [chunk]
    local.__create_write_items__ = write_items


def validate_uneven_dtensor(dtensor: DTensor) -> None:
    """Check that this rank's part lies within the tensor, and that the ranks' parts reach its ends.

    Raises:
        ValueError: they do not.

    Ranks: all of the mesh; blocks.
    """
    chunk = gather_and_compute_chunk_metadata(dtensor)
    ends = [[begin, begin + size] for begin, size in zip(chunk.offsets, chunk.sizes, strict=True)]
    first, last = [begin for begin, _ in ends], [end for _, end in ends]
    for axis, placement in enumerate(dtensor.placements):
        if isinstance(placement, Shard):
            of_ranks = _exchanged(dtensor, axis, (first, last))
            first = [min(column) for column in zip(*(begins for begins, _ in of_ranks), strict=True)]
            last = [max(column) for column in zip(*(ends for _, ends in of_ranks), strict=True)]
    if any(first) or last != list(dtensor.shape):
        raise ValueError(f"the ranks' parts must reach from 0 to {list(dtensor.shape)}, got {first} to {last}")


def filter_unflattened_state_dict(
    state_dict: Mapping[str, Any],
    key_chain: Sequence[str] = (),
    visit_condition: Callable[[Any], bool] = lambda value: False,
) -> list[list[str]]:
    """Return the paths of keys to the values, in nested dicts, that meet a condition."""
    found: list[list[str]] = []
    for key, value in state_dict.items():
        path = [*key_chain, key]
        if isinstance(value, dict):
            found += filter_unflattened_state_dict(value, path, visit_condition)
        elif visit_condition(value):
            found.append(path)
    return found


def get_unflattened_state_dict(state_dict: Mapping[str, Any], key_chain: Sequence[str] = ()) -> Any:
    """Return the value at a path of keys.

    Raises:
        KeyError: there is none.
    """
    found: Any = state_dict
    for key in key_chain:
        if not isinstance(found, Mapping) or key not in found:
            raise KeyError(f"the state dict has nothing at {list(key_chain)}")
        found = found[key]
    return found


def preprocess_state_dict_for_uneven_dtensor(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with DTensors from which DCP learns where each rank's rows lie. Ranks: all of the DTensors' meshes."""
    for path in sorted(filter_unflattened_state_dict(state_dict, (), lambda value: isinstance(value, DTensor))):
        update_uneven_dtensor_chunk_metadata(get_unflattened_state_dict(state_dict, path))
    return state_dict


def uneven_dtensor_to_full_tensor(dtensor: DTensor) -> torch.Tensor:
    """Return the whole tensor. Ranks: all of the mesh; blocks."""
    if not _is_plain(dtensor):
        return dtensor.full_tensor()
    whole = dtensor.to_local()
    for axis, placement in reversed(list(enumerate(dtensor.placements))):
        if isinstance(placement, Shard):
            whole = _gathered(whole, placement.dim, _exchanged(dtensor, axis, whole.size(placement.dim)), dtensor, axis)
    return whole


def _gathered(local: torch.Tensor, dim: int, sizes: Sequence[int], dtensor: DTensor, axis: int) -> torch.Tensor:
    """Return the ranks' parts one after the other; collectives take parts of equal size."""
    shape = list(local.shape)
    shape[dim] = max(sizes)
    padded = local.new_zeros(shape)
    padded.narrow(dim, 0, local.size(dim)).copy_(local)
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=dtensor.device_mesh.get_group(axis))
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)


def redistribute_uneven_dtensor_to_replicated(dtensor: DTensor) -> DTensor:
    """Return a replicated DTensor. Ranks: all of the mesh."""
    mesh = dtensor.device_mesh
    return DTensor.from_local(uneven_dtensor_to_full_tensor(dtensor), mesh, [Replicate()] * mesh.ndim, run_check=False)


gather_uneven_dtensor_to_full_tensor = redistribute_uneven_dtensor_to_replicated


def split_dtensor(
    dtensor: DTensor,
    split_size_or_sections: int | Sequence[int],
    dim: int = 0,
    update_uneven_dtensor_chunk_meta: bool = False,
) -> Iterator[DTensor]:
    """Split a DTensor along a dim as ``torch.split``, without moving anything: each rank keeps what it has of each part.

    Args:
        update_uneven_dtensor_chunk_meta: call ``update_uneven_dtensor_chunk_metadata`` on each part.

    Raises:
        NotImplementedError: a rank's part is several boxes, or rows are cut into parts.

    Ranks: all of the mesh.
    """
    whole = dtensor.shape[dim]
    if isinstance(split_size_or_sections, int):
        bounds = [*range(0, whole, split_size_or_sections), whole]
    else:
        bounds = list(accumulate(split_size_or_sections, initial=0))
    if bounds[-1] != whole:
        raise ValueError(f"sections must add up to {whole}, got {list(split_size_or_sections)}")  # type: ignore[arg-type]
    chunk, local = gather_and_compute_chunk_metadata(dtensor), dtensor.to_local()
    own_begin, own_end = chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]
    for begin, end in pairwise(bounds):
        first, stop = (min(max(bound, own_begin), own_end) - own_begin for bound in (begin, end))
        shape = list(dtensor.shape)
        shape[dim] = end - begin
        part = DTensor.from_local(
            local.narrow(dim, first, stop - first),
            dtensor.device_mesh,
            _of_rows(dtensor, begin) if dim == 0 else _with_whole_rows(dtensor.placements),
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )
        if update_uneven_dtensor_chunk_meta:
            update_uneven_dtensor_chunk_metadata(part)
        yield part


def _with_whole_rows(placements: Sequence[Placement]) -> Sequence[Placement]:
    # The same rows of fewer columns: the numbers of a RowShard say which rows a rank has, whatever their length.
    if any(isinstance(p, UnevenShard) and not (isinstance(p, RowShard) and p.row_parts == 1) for p in placements):
        raise NotImplementedError(f"rows must be whole to be split, got {list(placements)}; split the full tensor")
    return placements


def _of_rows(dtensor: DTensor, begin: int) -> list[Placement]:
    """Return the placements of the rows from ``begin`` on: their ranges begin as many rows later in the flat buffer."""
    placed: list[Placement] = []
    first, rows = 0, dtensor.shape[0]  # of what the axes so far leave to this rank
    for axis, placement in enumerate(_with_whole_rows(dtensor.placements)):
        if not isinstance(placement, RowShard):
            placed.append(placement)
            continue
        start = placement.start + max(begin - first, 0) * placement.row_numel
        placed.append(RowShard(start, placement.segment_numel, placement.row_numel))
        mesh = dtensor.device_mesh
        own = placement.rows(rows, rank=mesh.get_local_rank(axis), num_ranks=mesh.size(axis))
        first, rows = first + own[0], own[1] - own[0]
    return placed
