"""Sharded tensors of modules: how a tensor of a model lies in the whole one, from its attributes and groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from megatron.core.dist_checkpointing.mapping import (
    ReplicaId,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.module_names import child_name
from megatron.core.process_groups_config import DEFAULT_GROUP, group_of, group_or_default, group_rank, group_size

Offsets = Iterable[tuple[int, int, int]]
"""[(axis, index of this part, number of parts)] of axes before those of the tensors, of a stack of layers for instance."""


def make_sharded_tensor_for_checkpoint(
    tensor: torch.Tensor,
    key: str,
    prepend_offsets: Offsets = (),
    replica_id: ReplicaId | None = None,
    *,
    tp_group: ProcessGroup | None = DEFAULT_GROUP,
    dp_cp_group: ProcessGroup | None = DEFAULT_GROUP,
    **kwargs: Any,
) -> ShardedTensor:
    """Describe a tensor that all tensor- and data-parallel ranks hold whole; a DTensor says itself who holds what."""
    offsets = list(prepend_offsets)
    tp_group, dp_cp_group = _given_or_default(tp_group, dp_cp_group)
    if replica_id is None:
        replica_id = (0, group_rank(tp_group), group_rank(dp_cp_group))
    if isinstance(tensor, DTensor):
        return _of_dtensor(tensor, key, offsets)
    return ShardedTensor.from_rank_offsets(
        key, tensor, *offsets, replica_id=replica_id, prepend_axis_num=len(offsets), **kwargs
    )


def make_tp_sharded_tensor_for_checkpoint(
    tensor: torch.Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: ReplicaId | None = None,
    prepend_offsets: Offsets = (),
    *,
    tp_group: ProcessGroup | None = DEFAULT_GROUP,
    dp_cp_group: ProcessGroup | None = DEFAULT_GROUP,
    **kwargs: Any,
) -> ShardedTensor:
    """Describe a tensor of which each tensor-parallel rank holds a part of ``tp_axis``."""
    offsets = list(prepend_offsets)
    tp_group, dp_cp_group = _given_or_default(tp_group, dp_cp_group)
    if replica_id is None:
        replica_id = (0, 0, group_rank(dp_cp_group))
    if isinstance(tensor, DTensor):
        return _of_dtensor(tensor, key, offsets)
    part = (tp_axis + len(offsets), group_rank(tp_group), group_size(tp_group))
    return ShardedTensor.from_rank_offsets(
        key, tensor, *offsets, part, replica_id=replica_id, prepend_axis_num=len(offsets), **kwargs
    )


def _given_or_default(
    tp_group: ProcessGroup | None, dp_cp_group: ProcessGroup | None
) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Return the groups, or those of ``parallel_state`` for what is left out; as in Megatron-Core None for both means that."""
    if tp_group is None and dp_cp_group is None:
        tp_group = dp_cp_group = DEFAULT_GROUP
    return group_or_default(tp_group, "tp"), group_or_default(dp_cp_group, "dp_cp")


def _of_dtensor(tensor: DTensor, key: str, offsets: list[tuple[int, int, int]]) -> ShardedTensor:
    if offsets:
        raise NotImplementedError(f"{key}: sharded_offsets must be () for sharded parameters, got {offsets}")
    shape = tuple(tensor.shape)
    of_another_stage = getattr(tensor, "canonical_name", None) is not None
    return ShardedTensor(
        key, tensor, tensor.dtype, shape, shape, (0,) * len(shape), None, replica_id=int(of_another_stage)
    )


def make_sharded_object_for_checkpoint(
    obj: Any,
    key: str,
    sharded_offsets: Offsets = (),
    replica_id: ReplicaId | None = None,
    *,
    tp_group: ProcessGroup | None = DEFAULT_GROUP,
    dp_cp_group: ProcessGroup | None = DEFAULT_GROUP,
    **kwargs: Any,
) -> ShardedObject:
    """Describe a plain value that all tensor- and data-parallel ranks have."""
    if replica_id is None:
        replica_id = (0, *map(group_rank, _given_or_default(tp_group, dp_cp_group)))
    shape, offset = _get_extra_state_offsets(sharded_offsets)
    return ShardedObject(key, obj, shape, offset, replica_id, **kwargs)


def _get_extra_state_offsets(sharded_offsets: Offsets) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (shape, offset) of a plain value in the grid that the offsets span."""
    ordered = sorted(sharded_offsets)
    if not ordered:
        return (1,), (0,)
    if [axis for axis, *_ in ordered] != list(range(len(ordered))):
        raise AssertionError(f"the axes of sharded_offsets must be 0, 1, ..., got {ordered}")
    return tuple(parts for *_, parts in ordered), tuple(index for _, index, _ in ordered)


def make_sharded_tensors_for_checkpoint(
    state_dict: Mapping[str, Any],
    prefix: str,
    tensor_parallel_layers_axis_map: Mapping[str, int] | None = None,
    sharded_offsets: Offsets = (),
    extra_state_suffix: str = "_extra_state",
    tp_group: ProcessGroup | None = DEFAULT_GROUP,
    dp_cp_group: ProcessGroup | None = DEFAULT_GROUP,
) -> ShardedStateDict:
    """Describe the entries of a module's state dict.

    Args:
        prefix: goes before the names.
        tensor_parallel_layers_axis_map: axes of tensors that are split over tensor-parallel ranks, by name; those of the
            other entries follow from the parameters' attributes.
    """
    axes = tensor_parallel_layers_axis_map or {}
    found: ShardedStateDict = {}
    groups: dict[str, Any] = {"tp_group": tp_group, "dp_cp_group": dp_cp_group}
    for name, value in state_dict.items():
        key, offsets = prefix + name, list(sharded_offsets)
        if name.endswith(extra_state_suffix):
            found[key] = make_sharded_object_for_checkpoint(value, key, offsets, **groups)
        elif name in axes:
            found[key] = make_tp_sharded_tensor_for_checkpoint(value, key, axes[name], None, offsets, **groups)
        else:
            found[key] = _by_attributes(value, key, offsets, **groups)
    return found


def _by_attributes(
    tensor: torch.Tensor,
    key: str,
    offsets: list[tuple[int, int, int]],
    *,
    tp_group: ProcessGroup | None,
    dp_cp_group: ProcessGroup | None,
) -> Any:
    """Describe a parameter by its attributes, as ``tensor_parallel/layers.py`` sets them."""
    is_expert = not getattr(tensor, "allreduce", True)
    if is_expert:
        tp_group = group_of(None, "expt_tp") if tp_group is DEFAULT_GROUP else tp_group
        dp_cp_group = group_of(None, "expt_dp") if dp_cp_group is DEFAULT_GROUP else dp_cp_group
    groups: dict[str, Any] = {"tp_group": tp_group, "dp_cp_group": dp_cp_group}
    copied = getattr(tensor, "canonical_name", None)
    if copied is not None:
        # The last stage's copy of the first stage's embedding.
        key = copied
    replica = (1 if copied else 0, 0, group_rank(group_or_default(dp_cp_group, "dp_cp")))
    if not getattr(tensor, "tensor_model_parallel", False) or isinstance(tensor, DTensor):
        own = group_rank(group_or_default(tp_group, "tp"))
        return make_sharded_tensor_for_checkpoint(tensor, key, offsets, (replica[0], own, replica[2]), **groups)
    dim, stride = tensor.partition_dim, getattr(tensor, "partition_stride", 1)  # type: ignore[attr-defined]
    if stride == 1:
        return make_tp_sharded_tensor_for_checkpoint(tensor, key, dim, replica, offsets, **groups)
    group = group_or_default(tp_group, "tp")
    return strided(tensor, key, offsets, replica, dim, stride, group_rank(group), group_size(group))


def strided(
    tensor: Any,
    key: str,
    offsets: Sequence[tuple[int, int, int]],
    replica_id: ReplicaId,
    dim: int,
    stride: int,
    rank: int,
    size: int,
) -> ShardedTensorFactory:
    """Describe this of ``size`` ranks' parts of ``stride`` matrices that are concatenated along ``dim``: each is a box of its own."""

    def build(key: str, data: torch.Tensor, replica_id: ReplicaId, _: slice | None) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(
                key,
                part,
                *offsets,
                (dim + len(offsets), index * size + rank, stride * size),
                replica_id=replica_id,
                prepend_axis_num=len(offsets),
            )
            for index, part in enumerate(data.detach().chunk(stride, dim))
        ]

    def merge(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts, dim)

    return ShardedTensorFactory(key, tensor, build, merge, replica_id)


def ensure_metadata_has_dp_cp_group(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """Return ``metadata`` with the data-parallel group of ``parallel_state`` where it has none, and None where there is none."""
    found = {} if metadata is None else metadata
    if "dp_cp_group" not in found:
        group = group_of(None, "dp_cp")
        found["dp_cp_group"] = dist.group.WORLD if group is None and dist.is_initialized() else group
    return found


def sharded_state_dict_default(
    module: torch.nn.Module,
    prefix: str = "",
    sharded_offsets: Offsets = (),
    metadata: dict[str, Any] | None = None,
    tp_group: ProcessGroup | None = DEFAULT_GROUP,
) -> ShardedStateDict:
    """Describe a module and all within it: by its own ``sharded_state_dict``, or else by the attributes of its parameters.

    Args:
        prefix: goes before the names.
        metadata: ``dp_cp_group`` is the group of the ranks that hold the same.
        tp_group: of tensors of modules that have no ``tp_group`` of their own.
    """
    offsets = tuple(sharded_offsets)
    own: Any = getattr(module, "sharded_state_dict", None)
    if own is not None:
        described: ShardedStateDict = own(prefix=prefix, sharded_offsets=offsets, metadata=metadata)
        return described
    return describe_module(module, prefix, offsets, metadata, tp_group=tp_group)


def describe_module(
    module: torch.nn.Module,
    prefix: str = "",
    sharded_offsets: Offsets = (),
    metadata: dict[str, Any] | None = None,
    *,
    tp_group: ProcessGroup | None = DEFAULT_GROUP,
) -> ShardedStateDict:
    """Describe a module's own tensors, and its children by ``sharded_state_dict_default``."""
    metadata, offsets = ensure_metadata_has_dp_cp_group(metadata), tuple(sharded_offsets)
    tp_group = getattr(module, "tp_group", tp_group)
    names: dict[str, Any] = {}
    module._save_to_state_dict(names, "", keep_vars=True)
    experts = {name: value for name, value in names.items() if not getattr(value, "allreduce", True)}
    dense = {name: value for name, value in names.items() if name not in experts}
    found = make_sharded_tensors_for_checkpoint(
        dense, prefix, None, offsets, tp_group=tp_group, dp_cp_group=metadata["dp_cp_group"]
    )
    expert_group = metadata.get("expt_dp_group", DEFAULT_GROUP)
    found |= make_sharded_tensors_for_checkpoint(
        experts, prefix, None, offsets, tp_group=tp_group, dp_cp_group=expert_group
    )
    for name, child in module.named_children():
        whole = f"{prefix}{child_name(module, name)}."
        described = sharded_state_dict_default(child, whole, offsets, metadata, tp_group)
        # ``load_state_dict`` takes names on this rank; in the checkpoint a tensor has the one in the whole model.
        found |= {f"{prefix}{name}.{key.removeprefix(whole)}": entry for key, entry in described.items()}
    return found
