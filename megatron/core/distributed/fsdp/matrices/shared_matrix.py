"""What ranks hold of a matrix, and which matrices in it are orthogonalized each by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Replicate, Shard

from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatBuffer
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup, group_of

TensorParallelMode = Literal["blockwise", "duplicated", "distributed"]
TENSOR_PARALLEL_MODES: tuple[str, ...] = ("blockwise", "duplicated", "distributed")


@dataclass(frozen=True)
class SharedMatrix:
    """A matrix [R, C] that the ranks of a process group hold together, each a range of its elements, row by row.

    Args:
        shape: R and C, of the tensor-parallel part where there are several.
        ranges: [ranks] (begin, end) of the elements that each rank holds.
        ranks: the process group; None if this rank holds the whole matrix.
        rank: this rank's number in it.
        row_blocks: heights of blocks of rows that follow each other again and again; all blocks of one place together are
            a matrix of their own (queries, keys and values, for each group of heads). (R,) is the matrix as it is.
        tensor_group: the tensor-parallel ranks whose parts together are the matrix that is orthogonalized; None: this part
            alone is.
        split_dim: dim along which they are parts.
        tensor_mode: ``duplicated``: each of them computes with the whole; ``distributed``: with its part.
    """

    shape: tuple[int, int]
    ranges: tuple[tuple[int, int], ...]
    ranks: ProcessGroup | None
    rank: int
    row_blocks: tuple[int, ...]
    tensor_group: ProcessGroup | None = None
    split_dim: int = 0
    tensor_mode: TensorParallelMode = "duplicated"

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def own_range(self) -> tuple[int, int]:
        """(begin, end) of the elements on this rank."""
        return self.ranges[self.rank]

    @property
    def num_repeats(self) -> int:
        """How often the blocks of rows follow each other."""
        return self.shape[0] // sum(self.row_blocks)

    def matrices(self) -> list[tuple[int, int]]:
        """Return the shapes of the whole matrices that are orthogonalized, one for each block."""
        whole = 1 if self.tensor_group is None else self.tensor_group.size()
        rows, columns = (whole, 1) if self.split_dim == 0 else (1, whole)
        return [(height * self.num_repeats * rows, self.shape[1] * columns) for height in self.row_blocks]

    def pieces_by_block(self, value_of: Callable[[int, int], float]) -> list[tuple[int, float]]:
        """Cut this rank's elements where the value of their matrix (from its shape) changes: (numel, value) of each piece."""
        begin, end = self.own_range
        values = [value_of(*shape) for shape in self.matrices()]
        if len(set(values)) == 1:
            return [(end - begin, values[0])] if end > begin else []
        found: list[tuple[int, float]] = []
        position = 0
        for _ in range(self.num_repeats):
            for height, value in zip(self.row_blocks, values, strict=True):
                stop = position + height * self.shape[1]
                numel = min(stop, end) - max(position, begin)
                if numel > 0:
                    found.append((numel, value))
                position = stop
        return found


def shared_matrix_of(
    parameter: torch.Tensor, *, row_blocks: Sequence[int] | None = None, tensor_mode: TensorParallelMode = "duplicated"
) -> SharedMatrix:
    """Describe what ranks hold of a parameter of a sharded module.

    Args:
        row_blocks: as in ``SharedMatrix``; None for the matrix as it is.
        tensor_mode: what becomes of tensor-parallel parts: ``blockwise``: each is a matrix of its own.

    Raises:
        ValueError: it is not sharded by the engine, it is no matrix, or blocks of rows do not divide it.

    Ranks: all that hold the parameter, in one order.
    """
    group = group_of(parameter)
    if group is None:
        raise ValueError(
            f"a parameter of shape {list(parameter.shape)} is not one of a sharded module; call fully_shard first"
        )
    index = next(at for at, sharded in enumerate(group.sharded) if sharded is parameter)
    slot = group.layout.slots[index]
    if len(slot.shape) != 2:
        raise ValueError(
            f"Muon must be given matrices, got {group.name_of(index)} of shape {list(slot.shape)}; give it to AdamW"
        )
    rows, columns = slot.shape
    blocks = (rows,) if row_blocks is None else tuple(row_blocks)
    if rows % sum(blocks) != 0:
        raise ValueError(
            f"blocks of {list(blocks)} rows must divide the {rows} rows of {group.name_of(index)}; leave the blocks out"
        )
    ranks, places = _ranks_of(group)
    segments = segments_of(group.weights.main)
    bounds = [tuple(min(max(position - slot.start, 0), slot.numel) for position in segments[place]) for place in places]
    tensor_group, split_dim = (None, 0) if tensor_mode == "blockwise" else _tensor_split(group, index)
    return SharedMatrix(
        shape=(rows, columns),
        ranges=tuple((begin, end) for begin, end in bounds),
        ranks=ranks,
        rank=0 if ranks is None else ranks.rank(),
        row_blocks=blocks,
        tensor_group=tensor_group,
        split_dim=split_dim,
        tensor_mode=tensor_mode,
    )


def segments_of(buffer: FlatBuffer) -> list[tuple[int, int]]:
    """Return [begin, end) of the full buffer on each of the ranks that share it, in the order of their flat mesh; pure."""
    sharded = [
        axis for axis, placement in zip(buffer.axes, buffer.placements, strict=True) if isinstance(placement, Shard)
    ]
    found = []
    for place in product(*(range(axis.size) for axis in sharded)):
        begin, numel = 0, buffer.layout.total_numel
        for axis, at in reversed(list(zip(sharded, place, strict=True))):
            numel //= axis.size
            begin += at * numel
        found.append((begin, begin + numel))
    return found


def _ranks_of(group: FsdpParameterGroup) -> tuple[ProcessGroup | None, list[int]]:
    """Return the ranks that share the main weights, and the place of each in ``segments_of``; None where each has them whole."""
    shared = [
        axis
        for axis, placement in zip(group.group_mesh.axes, group.placements.optimizer, strict=True)
        if isinstance(placement, Shard)
    ]
    if all(axis.size == 1 for axis in shared):
        return None, [0]
    mesh = group.group_mesh.mesh_of_shards(group.placements)
    place_of = {rank: place for place, rank in enumerate(mesh.mesh.flatten().tolist())}
    ranks = mesh.get_group()
    return ranks, [place_of[rank] for rank in dist.get_process_group_ranks(ranks)]


def _tensor_split(group: FsdpParameterGroup, index: int) -> tuple[ProcessGroup | None, int]:
    """Return the tensor-parallel ranks that hold parts of the parameter, and the dim along which; None if they do not.

    Raises:
        NotImplementedError: two axes split it, or one does unevenly.
    """
    mesh, placements = group.group_mesh.tensor_mesh, group.parts[index].placements
    split = [axis for axis, p in enumerate(placements) if mesh and mesh.size(axis) > 1 and not isinstance(p, Replicate)]
    if mesh is None or not split:
        return None, 0
    dim, shape = getattr(placements[split[0]], "dim", 0), group.sharded[index].shape
    if len(split) > 1 or shape[dim] % mesh.size(split[0]):
        raise NotImplementedError(
            f"tensor parallelism must split the matrix {group.name_of(index)} evenly along one dim for Muon, got {placements} of shape "
            f"{list(shape)} on {mesh}; give it to AdamW"
        )
    return mesh.get_group(split[0]), dim
