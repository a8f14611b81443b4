"""Sharded state dicts: what a rank holds of each tensor or object of a checkpoint, under Megatron-Core's names.

A sharded state dict is a nested dict or list whose leaves are ``ShardedBase`` objects, plain values, which rank 0 saves, and
``LocalNonpersistentObject``s, which nobody saves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace

ReplicaId = int | tuple[int, ...]
"""Which copy of the same data this is; the one with zeros alone is saved."""
StateDict = dict[str, Any]
CommonStateDict = dict[str, Any]
ShardedStateDict = dict[str, Any]


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether this copy is the one that is saved."""
    return replica_id == 0 if isinstance(replica_id, int) else not any(replica_id)


class ShardedBase(ABC):
    """What a rank holds of one entry of a checkpoint."""

    key: str
    data: Any
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise CheckpointingException where fields contradict each other."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """Return a copy that only says where the data are."""


@dataclass
class ShardedTensor(ShardedBase):
    """A rank's box of a whole tensor.

    Attributes:
        key: the tensor's name in the checkpoint.
        data: the box, in ``local_shape``; None: it is made when it is loaded. A DTensor of the whole tensor's shape stands
            for all boxes that the rank holds of it, and for its replicas.
        global_shape: of the whole tensor, ``prepend_axis_num`` axes before those of the data.
        global_offset: indices at which the box begins.
        axis_fragmentations: numbers of boxes along the axes; None where boxes are no regular grid.
        allow_shape_mismatch: the stored tensor may be longer or shorter; what both have is loaded.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise CheckpointingException where fields contradict each other."""
        faults = (
            (self.flattened_range is not None, "flattened_range must be None"),
            (self.data is not None and self.data.dtype != self.dtype, "dtype must be that of the data"),
            (
                self.data is not None and tuple(self.data.shape) != tuple(self.local_shape),
                "local_shape must be that of the data",
            ),
            (len(self.global_shape) != len(self.global_offset), "global_offset must have an index for each axis"),
            (
                len(self.local_shape) + self.prepend_axis_num != len(self.global_shape),
                "global_shape must have the axes of local_shape and prepend_axis_num more",
            ),
        )
        for holds, message in faults:
            if holds:
                raise CheckpointingException(f"{self.key}: {message}, got {self}")

    @property
    def has_regular_grid(self) -> bool:
        """Whether the boxes of all ranks are a regular grid."""
        return self.axis_fragmentations is not None

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Shape of the box in the whole tensor: that of the data, behind axes of one."""
        return (1,) * self.prepend_axis_num + tuple(self.local_shape)

    def without_data(self) -> ShardedTensor:
        """Return a copy that only says where the data are."""
        return replace(self, data=None)

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Describe the same range of each rank's box; the whole tensor consists of these ranges.

        Args:
            dim: of the data.
            start, length: the range of indices of the data.

        Returns:
            [1] the range; its data are a view.

        Raises:
            CheckpointingException: boxes along ``dim`` are not equal.
        """
        axis, own = dim % len(self.local_shape) + self.prepend_axis_num, self.local_shape[dim]
        if self.global_shape[axis] % own or self.global_offset[axis] % own:
            raise CheckpointingException(f"{self.key}: boxes along dim {dim} must be equal to be narrowed, got {self}")

        def scaled(sizes: tuple[int, ...]) -> tuple[int, ...]:
            return (*sizes[:axis], sizes[axis] // own * length, *sizes[axis + 1 :])

        local_shape = list(self.local_shape)
        local_shape[dim] = length
        data = None if self.data is None else self.data.narrow(dim, start, length)
        return [
            replace(
                self,
                data=data,
                local_shape=tuple(local_shape),
                global_shape=scaled(self.global_shape),
                global_offset=scaled(self.global_offset),
            )
        ]

    def init_data(self, device: str | torch.device, init_fn: Callable[..., torch.Tensor] = torch.empty) -> None:
        """Make memory for the data, where there is none."""
        if self.data is None:
            self.data = init_fn(tuple(self.local_shape), dtype=self.dtype, device=device)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        **init_kwargs: Any,
    ) -> ShardedTensor:
        """Describe a box of a tensor that is cut into equal parts.

        Args:
            rank_offsets: (axis, index of this part, number of parts); along other axes the data are whole.

        Raises:
            CheckpointingException: an axis or an index is out of range.
        """
        whole = [1] * prepend_axis_num + list(data.shape)
        shape, offset, parts = list(whole), [0] * len(whole), [1] * len(whole)
        for axis, index, count in rank_offsets:
            if not 0 <= axis < len(whole) or not 0 <= index < count:
                raise CheckpointingException(
                    f"{key}: rank_offsets must be (axis, index, parts) in range, got {rank_offsets}"
                )
            shape[axis], offset[axis], parts[axis] = whole[axis] * count, whole[axis] * index, count
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            tuple(shape),
            tuple(offset),
            tuple(parts),
            replica_id,
            prepend_axis_num,
            flattened_range=flattened_range,
            **init_kwargs,
        )


@dataclass
class ShardedObject(ShardedBase):
    """A rank's element of a grid of plain values: numbers, strings, tensors, lists and dicts of them."""

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Raise CheckpointingException where fields contradict each other."""
        if len(self.global_shape) != len(self.global_offset):
            raise CheckpointingException(f"{self.key}: global_offset must have an index for each axis, got {self}")

    def without_data(self) -> ShardedObject:
        """Return a copy that only says where the data are."""
        return replace(self, data=None)

    @property
    def unique_key(self) -> str:
        """The entry's name in the checkpoint."""
        offset, shape = (".".join(map(str, numbers)) for numbers in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> ShardedObject:
        """Return the object of an entry's name, without data."""
        key, _, shard = unique_key.rpartition("/shard_")
        offset, shape = (tuple(map(int, numbers.split("."))) for numbers in shard.split("_"))
        return cls(key, None, shape, offset, replica_id)


FactoryBuildFn = Callable[[str, torch.Tensor, ReplicaId, slice | None], Any]
FactoryMergeFn = Callable[[Any], torch.Tensor]


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A tensor that is saved as several sharded tensors, and put together from them when it is loaded."""

    key: str
    data: torch.Tensor
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        """Return the sharded tensors."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Do nothing: what ``build`` returns is checked."""

    def without_data(self) -> ShardedTensorFactory:
        """Return a copy that cannot be built."""
        return replace(self, data=None)  # type: ignore[arg-type]


class LocalNonpersistentObject:
    """A value that is not saved; ``load`` returns the one that it is given."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the value."""
        return self.obj


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace factories by what they build, in place."""
    dict_list_map_inplace(lambda x: x.build() if isinstance(x, ShardedTensorFactory) else x, sharded_state_dict)


def apply_factory_merges(loaded: Any, factories: Any, key: tuple[str, ...] = ()) -> Any:
    """Put the tensors of factories together: where ``factories`` has one, in place of what was loaded there.

    Raises:
        ValueError: the two have not the same structure.
    """
    if isinstance(factories, ShardedTensorFactory):
        return factories.merge_fn(loaded)
    items = factories.items() if isinstance(factories, dict) else enumerate(factories)
    for index, factory in items:
        try:
            loaded[index] = apply_factory_merges(loaded[index], factory, (*key, str(index)))
        except (KeyError, IndexError) as error:
            raise ValueError(
                f"a state dict must have what a factory is for, got nothing at {'.'.join((*key, str(index)))}"
            ) from error
    return loaded
