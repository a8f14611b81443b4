"""From Megatron's process groups to meshes: those over which a model is sharded, and how else it is split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.adapter.distributed_index import FSDPDistributedIndex
from megatron.core.distributed.fsdp.mesh.group_mesh import is_expert
from megatron.core.distributed.fsdp.mesh.model_parallel import ModelParallel
from megatron.core.process_groups_config import ProcessGroupCollection, group_size

AXIS, OUTER_AXIS, TENSOR_AXIS = "dp_cp", "dp_outer", "tp"


def distributed_index(
    groups: ProcessGroupCollection,
    ddp_config: DistributedDataParallelConfig,
    device: torch.device | None,
    *,
    has_experts: bool,
) -> FSDPDistributedIndex:
    """Make the meshes of the process groups, with those of the axes (tp, outer, dp_cp) that are used, also for experts.

    Args:
        device: device of the shards; None: the current CUDA device if the process group uses NCCL, else the CPU.
        has_experts: True if the model has parameters with ``allreduce=False``. They get a mesh of their own if they are
            sharded over other ranks than the other parameters.

    Raises:
        ValueError: a process group is missing, or they are not the axes of a mesh.

    Ranks: all of the process groups; blocks if there is tensor parallelism.
    """
    dense = groups.dp_cp or groups.dp
    if dense is None:
        raise ValueError("pg_collection must hold a data-parallel group in dp_cp or dp, got None in both")
    if device is None:
        is_cuda = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(dense))
        device = torch.device("cuda" if is_cuda else "cpu")
    instances = ddp_config.num_distributed_optimizer_instances
    is_hybrid = instances > 1
    mesh = _mesh(groups, dense, groups.tp, device.type, instances, ("inter_dist_opt", "intra_dp_cp"))
    expert_mesh = None
    if has_experts and _experts_differ(groups, dense):
        assert groups.expt_dp is not None
        names = ("inter_expt_dist_opt", "intra_expt_dp")
        expert_mesh = _mesh(groups, groups.expt_dp, groups.expt_tp, device.type, instances, names)
    return FSDPDistributedIndex(
        mesh,
        dp_shard_dim=AXIS,
        dp_outer_dim=OUTER_AXIS if is_hybrid else None,
        tp_dim=TENSOR_AXIS if group_size(groups.tp) > 1 else None,
        hybrid_fsdp_group=dense if is_hybrid else None,
        hybrid_fsdp_expt_group=groups.expt_dp if is_hybrid and expert_mesh is not None else None,
        hsdp_outer_dp_shard=is_hybrid and ddp_config.outer_dp_sharding_strategy == "optim",
        expt_device_mesh=expert_mesh,
        fsdp_group_ag=groups.dp_cp_ag,
        expt_fsdp_group_ag=groups.expt_dp_ag if expert_mesh is not None else None,
    )


def model_parallel(groups: ProcessGroupCollection, index: FSDPDistributedIndex) -> ModelParallel:
    """Return how the model is split in addition to data parallelism. Does not communicate."""
    return ModelParallel(
        tensor_axis=index.tp_dim or (TENSOR_AXIS if index.expt_device_mesh is not None else None),
        expert_mesh=index.expt_device_mesh,
        expert_group_ag=index.expt_fsdp_group_ag,
        embedding_group=groups.embd,
        model_groups=_model_groups(groups, index),
    )


def check_split(config: object, model: nn.Module, groups: ProcessGroupCollection, *, is_known: bool) -> None:
    """Check that the process groups know how the model is split, so that parts of tensors are not sharded as if they were one.

    Args:
        config: says so by ``tensor_model_parallel_size`` and ``pipeline_model_parallel_size``, the model by the ``tp_group`` of
            its layers.
        is_known: somebody gave the process groups; else all ranks are taken for data-parallel.

    Raises:
        ValueError: the model is split over more ranks than its process groups have.
    """
    found = [
        (getattr(config, f"{kind}_model_parallel_size", 1), group, name, f"the config's {kind}_model_parallel_size")
        for kind, group, name in (("tensor", groups.tp, "tp"), ("pipeline", groups.pp, "pp"))
    ]
    for name, module in model.named_modules():
        own = getattr(module, "tp_group", None)
        marked = any(getattr(p, "tensor_model_parallel", False) for p in module.parameters(recurse=False))
        if isinstance(own, ProcessGroup) and marked:
            is_of_experts = any(is_expert(parameter) for parameter in module.parameters(recurse=False))
            known, its = (groups.expt_tp, "expt_tp") if is_of_experts else (groups.tp, "tp")
            found.append((own.size(), known, its, f"the tp_group of {name}"))
        elif marked and not hasattr(module, "tp_group") and not is_known and dist.get_world_size() > 1:
            raise ValueError(
                f"pg_collection must say which ranks are tensor-parallel, got None and a parameter of {name} with "
                "tensor_model_parallel=True, whose parts on other ranks would be taken for the same; pass the collection that "
                "initialize_model_parallel returns"
            )
    for num_ranks, group, its, what in found:
        if num_ranks > group_size(group):
            raise ValueError(
                f"pg_collection must hold in {its} the ranks over which the model is split, {num_ranks} by {what}, got "
                f"{group_size(group)}; pass the collection that initialize_model_parallel returns"
            )


def has_experts(model: nn.Module) -> bool:
    """Return whether the model has a parameter of an expert."""
    return any(is_expert(parameter) for parameter in model.parameters())


def _model_groups(groups: ProcessGroupCollection, index: FSDPDistributedIndex) -> tuple[ProcessGroup, ...]:
    split = group_size(groups.tp) * group_size(groups.pp)
    if split == 1 and index.expt_device_mesh is None:
        return ()
    dense = index.get_dp_group()
    if dense.size() * split == dist.get_world_size():
        everyone = dist.group.WORLD
        assert everyone is not None
        return (everyone,)
    others: Iterable[ProcessGroup | None] = (groups.mp,) if groups.mp is not None else (groups.tp, groups.pp)
    return tuple(group for group in (dense, *others) if group is not None and group.size() > 1)


def _experts_differ(groups: ProcessGroupCollection, dense: ProcessGroup) -> bool:
    """Return whether experts are sharded over other ranks than the other parameters.

    Raises:
        ValueError: experts are split over ranks, and the process group of the ranks that hold the same ones is missing.
    """
    if groups.expt_dp is None:
        if group_size(groups.ep) > 1:
            raise ValueError(
                "pg_collection must hold expt_dp, the ranks that hold the same experts, if experts are split over "
                f"{group_size(groups.ep)} ranks, got None; make it with build_process_groups"
            )
        return False
    return _ranks(groups.expt_dp) != _ranks(dense) or _ranks(groups.expt_tp) != _ranks(groups.tp)


def _ranks(group: ProcessGroup | None) -> list[int]:
    return [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)


def _mesh(
    groups: ProcessGroupCollection,
    whole: ProcessGroup,
    tensor: ProcessGroup | None,
    device_type: str,
    instances: int,
    names: tuple[str, str],
) -> DeviceMesh:
    """Make the mesh of ``whole``, or of its outer and inner process group of these names, with a tensor-parallel axis before it."""
    if instances == 1:
        mesh = DeviceMesh.from_group(whole, device_type, mesh_dim_names=(AXIS,))
    else:
        outer, inner = (getattr(groups, name) for name in names)
        if outer is None or inner is None or outer.size() != instances:
            sizes = [None if each is None else each.size() for each in (outer, inner)]
            raise ValueError(
                f"num_distributed_optimizer_instances={instances} needs {' and '.join(names)} in pg_collection, the first of {instances} "
                f"ranks, got groups of {sizes[0]} and {sizes[1]} ranks; make them with build_process_groups"
            )
        mesh = mesh_of_groups(whole, [outer, inner], device_type, (OUTER_AXIS, AXIS))
    return mesh if tensor is None or tensor.size() == 1 else _with_tensor_axis(mesh, whole, tensor)


def mesh_of_groups(
    whole: ProcessGroup, groups: Sequence[ProcessGroup], device_type: str, names: Sequence[str]
) -> DeviceMesh:
    """Build the mesh over the ranks of ``whole``, in their order, whose axes are this rank's ``groups``, outermost first.

    Raises:
        ValueError: the process groups are not those of such a mesh.
    """
    shape = [group.size() for group in groups]
    own = [dist.get_process_group_ranks(group) for group in groups]
    ranks = torch.tensor(dist.get_process_group_ranks(whole))
    # A rank compares only its own groups, so others may not raise.
    if math.prod(shape) == whole.size():
        ranks = ranks.view(shape)
        (place,) = (ranks == dist.get_rank()).nonzero().tolist()
        lines = [ranks[(*place[:axis], slice(None), *place[axis + 1 :])].tolist() for axis in range(len(groups))]
        if lines == own:
            return DeviceMesh.from_group(list(groups), device_type, mesh=ranks, mesh_dim_names=tuple(names))
    raise ValueError(
        f"the process groups of {', '.join(names)} must be the axes of a mesh over ranks {ranks.flatten().tolist()}, got "
        f"{' and '.join(map(str, own))} on rank {dist.get_rank()}"
    )


def _with_tensor_axis(mesh: DeviceMesh, whole: ProcessGroup, tensor: ProcessGroup) -> DeviceMesh:
    """Put the axis of the tensor-parallel process groups before the axes of ``mesh``, which ``whole`` spans.

    Raises:
        ValueError: the tensor-parallel process groups differ in size, or hold the ranks of ``mesh`` at different
            places.

    Ranks: all of both; blocks.
    """
    found: list[list[int]] = [[]] * whole.size()
    dist.all_gather_object(found, _ranks(tensor), group=whole)
    lines = dict(zip(_ranks(whole), found, strict=True))
    in_order = mesh.mesh.flatten().tolist()
    if len({len(line) for line in found}) > 1 or [lines[rank][tensor.rank()] for rank in in_order] != in_order:
        raise ValueError(
            f"the tensor-parallel groups of the data-parallel ranks {_ranks(whole)} must be of one size and hold each at one "
            f"place, got {found}"
        )
    table = torch.tensor([lines[rank] for rank in in_order])
    ranks = table.T.reshape(tensor.size(), *mesh.shape).contiguous()
    groups = [tensor, *(mesh.get_group(axis) for axis in range(mesh.ndim))]
    names = (TENSOR_AXIS, *(mesh.mesh_dim_names or ()))
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=names)
