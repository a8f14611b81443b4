"""The base of DTensor placements that split dim 0 in another way than ``Shard(0)``, which means ``torch.chunk``.

Rules of torch would take them for ``Shard(0)``; those of ``UnevenDTensor`` are in row_shard_rules.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

# Its subclasses. Each DTensor's construction asks for them, and isinstance of a placement is slow in torch 2.13.
_KINDS: set[type] = set()

UnevenShardT = TypeVar("UnevenShardT", bound="UnevenShard")


class UnevenShard(Shard):
    """A split of dim 0 whose fields define the rows of each rank of a mesh axis. Equal only if all fields are equal.

    Also equal to a placeholder for any such split (``Flat()`` of users' buffers). No DTensor here has a placeholder.
    """

    def __init__(self) -> None:
        super().__init__(0)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _KINDS.add(cls)

    @abstractmethod
    def _fields(self) -> tuple[int, ...]:
        """Return the arguments of the constructor."""

    @abstractmethod
    def part(self, tensor: torch.Tensor, *, rank: int, num_ranks: int) -> torch.Tensor:
        """Return a rank's part of a whole tensor; it may be a view."""

    def seen_as(self, shape: torch.Size, other: torch.Size, *, num_ranks: int) -> UnevenShard | None:
        """Return the placement of a view in shape ``other`` of a contiguous tensor; None if no rank's part would be rows of it."""
        return None

    def __eq__(self, other: object) -> bool:
        # An optimizer's step compares placements for each parameter, and isinstance of a placement is slow in torch 2.13.
        if type(other) is type(self):
            return other is self or self._fields() == other._fields()
        return getattr(other, "is_of_any_rows", False)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((type(self), *self._fields()))

    def __reduce__(self) -> tuple[type[UnevenShard], tuple[int, ...]]:
        return type(self), self._fields()

    def __copy__(self: UnevenShardT) -> UnevenShardT:
        return self

    def __deepcopy__(self: UnevenShardT, memo: dict[int, Any]) -> UnevenShardT:
        return self

    # DTensor calls these on a placement. Names and signatures are torch's (config/torch_versions.py). Sizes of dim 0 that
    # they take are in rows before this axis cuts, those that they return in rows after it, as an axis further right needs.

    def local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:  # type: ignore[override]
        return self._local_shard_size_and_offset(curr_local_size, num_chunks, rank)  # type: ignore[return-value]

    def _replicate_to_shard(  # type: ignore[override]
        self, local_tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int, shard_index: int
    ) -> torch.Tensor:
        own = self.part(local_tensor, rank=shard_index, num_ranks=mesh.size(mesh_dim))
        return own.clone(memory_format=torch.contiguous_format)

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
    return not _KINDS.isdisjoint(map(type, placements))
