"""Names of Megatron-FSDP that have no counterpart here. They can be imported; who uses them is told what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from megatron.core.elsewhere import elsewhere

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


def told_by(module: str, exported: Iterable[str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of one of Megatron-FSDP's modules, which finds the names that are elsewhere."""
    package = "megatron.core.distributed.fsdp.src.megatron_fsdp"
    names = {name: elsewhere(f"{package}.{module}", name, instead) for name, instead in ELSEWHERE[module].items()}
    assert not names.keys() & set(exported), "a name is served or refused"

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} of Megatron-FSDP has no {name!r} here")
        return names[name]

    return find
