"""Make the submodules of Megatron-FSDP's two packages from tables: what each of them exports, and what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

from packaging.version import Version

from megatron.core import __version__, utils
from megatron.core.distributed import distributed_data_parallel_config
from megatron.core.distributed.fsdp.adapter import (
    distributed_index,
    megatron_fsdp,
    megatron_fsdp_v2,
    megatron_names,
    uneven_dtensors,
)
from megatron.core.distributed.fsdp.buffers.parameter_group import group_of
from megatron.core.distributed.fsdp.compat import chunk_packing, context, dbuffer, parameter_group
from megatron.core.distributed.fsdp.config import mixed_precision, placement
from megatron.core.distributed.fsdp.fsdp2.methods import FSDPModule
from megatron.core.elsewhere import elsewhere
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker


def _of(module: ModuleType, names: str) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names.split()}


_version = Version(__version__)
_pre_release = "".join(map(str, _version.pre or ()))
PACKAGE_INFO: dict[str, Any] = {
    "MAJOR": _version.major,
    "MINOR": _version.minor,
    "PATCH": _version.micro,
    "PRE_RELEASE": _pre_release,
    "VERSION": (_version.major, _version.minor, _version.micro, _pre_release),
    "__version__": __version__,
    "__shortversion__": _version.base_version,
    "__package_name__": "megatron.core.distributed.fsdp",
    "__description__": "Fully sharded data parallelism for PyTorch modules",
    "__keywords__": "deep learning, pytorch, fsdp, zero, sharding",
}
"""Megatron-FSDP's ``package_info``, with the facts of this package."""

VERSION_1: dict[str, dict[str, Any]] = {
    "distributed_data_parallel_config": _of(distributed_data_parallel_config, "DistributedDataParallelConfig"),
    "fully_shard": {
        **_of(megatron_fsdp, "ShardingStrategy fully_shard fully_shard_model fully_shard_optimizer"),
        **_of(mixed_precision, "MixedPrecisionPolicy"),
    },
    "megatron_fsdp": _of(megatron_fsdp, "MegatronFSDP"),
    "mixed_precision": {
        "HAVE_TE_MXFP8TENSOR": False,  # weights in transformer-engine's MXFP8 tensors are not gathered without conversion
        **_of(mixed_precision, "MixedPrecisionPolicy"),
        **_of(utils, "is_te_min_version"),
    },
    "package_info": PACKAGE_INFO,
    "param_and_grad_buffer": _of(megatron_names, "ParamAndGradBuffer") | _of(utils, "to_local_if_dtensor"),
    "uneven_dtensor": {
        **_of(uneven_dtensors, "filter_unflattened_state_dict gather_and_compute_chunk_metadata"),
        **_of(uneven_dtensors, "gather_uneven_dtensor_to_full_tensor get_unflattened_state_dict"),
        **_of(uneven_dtensors, "preprocess_state_dict_for_uneven_dtensor redistribute_uneven_dtensor_to_replicated"),
        **_of(uneven_dtensors, "split_dtensor uneven_dtensor_to_full_tensor update_uneven_dtensor_chunk_metadata"),
        **_of(uneven_dtensors, "validate_uneven_dtensor"),
    },
    "utils": {
        "get_cuda_rng_tracker": get_cuda_rng_tracker,
        **_of(distributed_index, "FSDPDistributedIndex"),
        **_of(megatron_fsdp, "contains_submesh find_megatron_fsdp get_mcore_tensor_parallel_partition_dim"),
        **_of(megatron_fsdp, "get_mesh_names is_mcore_tensor_model_parallel is_submodule safe_get_rank"),
        **_of(megatron_fsdp, "is_mcore_tensor_parallel_duplicated using_tensor_parallel"),
        **_of(utils, "get_te_version is_te_min_version is_torch_min_version log_single_rank"),
    },
}
"""For each submodule of version 1: what it exports."""

VERSION_2: dict[str, dict[str, Any]] = {
    "checkpoint": _of(megatron_fsdp_v2, "load_checkpoint save_checkpoint"),
    "dbuffer": _of(dbuffer, "DBuffer Flat"),
    "fully_shard": {
        **_of(megatron_fsdp_v2, "fully_shard fully_shard_context microbatch"),
        **_of(placement, "Placements"),
    },
    "indexed_order": _of(context, "IndexedOrder"),
    "layout": _of(chunk_packing, "GlobalLayout non_leading_numel"),
    "module": {"FsdpContext": context.MegatronContext, "FsdpModule": FSDPModule},
    "optimizer": _of(megatron_fsdp_v2, "fully_shard_optimizer"),
    "parameter_group": {
        "FsdpParameterGroup": parameter_group.MegatronParameterGroup,
        "get_containing_parameter_group": group_of,
        **_of(parameter_group, "FsdpParameter sync_model_weights_from_main_weights"),
    },
    "placement": _of(dbuffer, "Flat changed_mesh_axis"),
}
"""For each submodule of version 2: what it exports."""

_PLANNED = "gathers and reductions follow the recorded order of units; FsdpModule.unshard() and reshard() gather a unit at other times"
_BUFFERS = "the flat buffers of a parameter group are main_weight, model_weight and main_grad of model.parameter_groups[i], each a DBuffer"
_ARENA = "gathered weights and gradients lie in one planned arena; nccl_ub=True puts it into symmetric memory"
_QUANTISED = "weights in FP8 are kept by the engine; set fp8_param_gather in DistributedDataParallelConfig, or make them in quantized_model_init"
_META = "fully_shard initialises modules on the meta device unit by unit, by reset_parameters or its init_fn"


def _all(names: str, instead: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), instead)


ELSEWHERE: dict[str, dict[str, str]] = {
    "param_and_grad_buffer": {
        **_all("AllGatherPipeline GradReducePipeline PrefetchOrder BucketStatus", _PLANNED),
        **_all("DataParallelBuffer Bucket build_data_parallel_buffer_index make_fsdp_dtensor", _BUFFERS),
        **_all("MultiGroupUBRAllocator TemporaryBucketAllocator StorageResizeBasedBucketAllocator", _ARENA),
        **_all("RotaryBucketAllocator FixedPoolAllocator MaxPoolAllocator check_gpu_memory", _ARENA),
        "BucketingPolicy": "units are what is gathered and reduced together; name their classes in fsdp_unit_modules",
        "ParameterGroup": "model.parameter_groups lists FsdpParameterGroup objects",
        "ResetParametersContext": _META,
        "gradient_reduce_preprocessing": "gradients are summed on the wire and scaled once, by the reduction",
        "override_sharded_param_methods_with_safety_checks": "sharded parameters are DTensors, which can be used as they are",
    },
    "mixed_precision": {
        **_all(
            "is_float8tensor is_blockwise_float8tensor fp8_need_transpose_data fp8_quantize fp8_dequantize", _QUANTISED
        ),
        **_all("fp8_need_transpose_data_for_meta_device_init fp8_discard_transpose_cache fp8_set_raw_data", _QUANTISED),
        **_all("fp8_create_transpose_cache fp8_get_raw_data get_quantized_model_init_context_cls", _QUANTISED),
    },
    "megatron_fsdp": {
        "TrainingState": "a unit's state is FsdpModule.phase, one of FsdpModule.Phase",
        "RegisterFSDPBackwardFunction": _PLANNED,
        "setup_delayed_wgrad_acc_hook": "set overlap_moe_expert_parallel_comm and delay_wgrad_compute in TransformerConfig",
    },
    "utils": {
        **_all("GlobalMemoryBuffer get_global_memory_buffer", _ARENA),
        "initialize_rng_tracker": "megatron.core.tensor_parallel.get_cuda_rng_tracker makes it",
        "create_updated_function_signature": "use inspect.Signature.replace",
    },
    "fully_shard": {"experimental_api": "nothing here is marked as experimental"},
}
"""For each module of Megatron-FSDP: names and what to use instead."""


def make_submodules(package: str, exports: Mapping[str, dict[str, Any]]) -> None:
    """Make the submodules of a package that is being imported, so that they can be imported like files."""
    for submodule, exported in exports.items():
        full = f"{package}.{submodule}"
        refused = ELSEWHERE.get(submodule, {}) if exports is VERSION_1 else {}
        assert not refused.keys() & exported.keys(), "a name is served or refused"
        made = module_from_spec(ModuleSpec(full, None, origin=__file__))
        made.__dict__.update({name: elsewhere(full, name, instead) for name, instead in refused.items()})
        made.__dict__.update(exported, __all__=sorted(exported), __file__=__file__)
        sys.modules[full] = made
        # Some have the name of a function that the package exports: ``package.fully_shard`` stays the function.
        vars(sys.modules[package]).setdefault(submodule, made)
