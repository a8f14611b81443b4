"""Megatron-FSDP's import path of small functions and of its index of meshes."""

from megatron.core.distributed.fsdp.src.elsewhere import told_by
from megatron.core.distributed.fsdp.src.version1 import (
    FSDPDistributedIndex,
    contains_submesh,
    find_megatron_fsdp,
    get_cuda_rng_tracker,
    get_mcore_tensor_parallel_partition_dim,
    get_mesh_names,
    get_te_version,
    is_mcore_tensor_model_parallel,
    is_mcore_tensor_parallel_duplicated,
    is_submodule,
    is_te_min_version,
    is_torch_min_version,
    log_single_rank,
    safe_get_rank,
    using_tensor_parallel,
)

__all__ = [
    "FSDPDistributedIndex",
    "contains_submesh",
    "find_megatron_fsdp",
    "get_cuda_rng_tracker",
    "get_mcore_tensor_parallel_partition_dim",
    "get_mesh_names",
    "get_te_version",
    "is_mcore_tensor_model_parallel",
    "is_mcore_tensor_parallel_duplicated",
    "is_submodule",
    "is_te_min_version",
    "is_torch_min_version",
    "log_single_rank",
    "safe_get_rank",
    "using_tensor_parallel",
]

__getattr__ = told_by("utils", __all__)
