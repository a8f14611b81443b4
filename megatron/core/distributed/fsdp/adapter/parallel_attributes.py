"""Megatron-FSDP's small functions of meshes, modules, and of how tensor parallelism splits a parameter."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.adapter.distributed_index import FSDPDistributedIndex, axis_names
from megatron.core.distributed.fsdp.adapter.megatron_fsdp import MegatronFSDP


def get_mcore_tensor_parallel_partition_dim(param: torch.Tensor) -> int | None:
    """Return the dim along which tensor-parallel ranks share a parameter; None where each has all of it."""
    of_mode = {"column": 0, "row": 1}.get(getattr(param, "_tensor_parallel_mode", ""))
    if of_mode is not None:
        return of_mode
    dim: int = getattr(param, "partition_dim", -1) if getattr(param, "tensor_model_parallel", False) else -1
    return dim if dim >= 0 else None


def is_mcore_tensor_model_parallel(param: torch.Tensor) -> bool:
    """Return whether tensor-parallel ranks share a parameter."""
    return get_mcore_tensor_parallel_partition_dim(param) is not None


def is_mcore_tensor_parallel_duplicated(param: torch.Tensor) -> bool:
    """Return whether each tensor-parallel rank has all of a parameter."""
    return get_mcore_tensor_parallel_partition_dim(param) is None


def using_tensor_parallel(dist_index: FSDPDistributedIndex, is_expert_parallel: bool = False) -> bool:
    """Return whether there is more than one tensor-parallel rank."""
    if dist_index.tp_dim is None:
        return False
    submesh: Any = dist_index.get_submesh(dist_index.tp_dim, is_expert_parallel=is_expert_parallel)
    return bool(submesh.mesh.numel() > 1)


def get_mesh_names(device_mesh: DeviceMesh | None = None, only_submesh_dims: bool = False) -> list[str]:
    """Return the names of a mesh's axes, and of axes that were flattened into one."""
    if device_mesh is None:
        return []
    return list(device_mesh.mesh_dim_names or ()) if only_submesh_dims else list(axis_names(device_mesh))


def contains_submesh(device_mesh: DeviceMesh | None, submesh_names: str | Sequence[str] | None) -> bool:
    """Return whether a mesh has axes of these names, flattened ones included."""
    if device_mesh is None or submesh_names is None:
        return False
    names = (submesh_names,) if isinstance(submesh_names, str) else submesh_names
    return set(names) <= set(get_mesh_names(device_mesh))


def is_submodule(module: nn.Module, parent_module: nn.Module, strict: bool = True) -> bool:
    """Return whether a module is in another one; ``strict``: and is not that itself."""
    return any(one is module for one in parent_module.modules()) and not (strict and module is parent_module)


def find_megatron_fsdp(model: Any) -> MegatronFSDP | None:
    """Return the ``MegatronFSDP`` among a model and what it wraps as ``.module``; None where there is none."""
    while model is not None and not isinstance(model, MegatronFSDP):
        model = getattr(model, "module", None)
    return model


def safe_get_rank() -> int:
    """Return this rank; before torch.distributed is initialised that of torchrun's environment, or 0."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
