"""Layers and region functions of tensor parallelism, under Megatron-Core's names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.attributes import (
        copy_tensor_model_parallel_attributes,
        param_is_not_tensor_parallel_duplicate,
        set_defaults_if_not_set_tensor_model_parallel_attributes,
        set_tensor_model_parallel_attributes,
    )
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.data import broadcast_data
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.tensor_parallel.mappings import (
        all_to_all,
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
        scatter_to_sequence_parallel_region,
        scatter_to_tensor_model_parallel_region,
    )
    from megatron.core.tensor_parallel.random import (
        checkpoint,
        get_cuda_rng_tracker,
        is_graph_safe_cuda_rng_tracker,
        model_parallel_cuda_manual_seed,
    )
    from megatron.core.tensor_parallel.utils import split_tensor_along_last_dim

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "all_to_all",
    "broadcast_data",
    "checkpoint",
    "copy_tensor_model_parallel_attributes",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "get_cuda_rng_tracker",
    "is_graph_safe_cuda_rng_tracker",
    "model_parallel_cuda_manual_seed",
    "param_is_not_tensor_parallel_duplicate",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
    "split_tensor_along_last_dim",
    "vocab_parallel_cross_entropy",
]

_FILES = {
    "layers": ("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"),
    "cross_entropy": ("vocab_parallel_cross_entropy",),
    "data": ("broadcast_data",),
    "utils": ("split_tensor_along_last_dim",),
    "random": (
        "checkpoint",
        "get_cuda_rng_tracker",
        "is_graph_safe_cuda_rng_tracker",
        "model_parallel_cuda_manual_seed",
    ),
    "attributes": (
        "copy_tensor_model_parallel_attributes",
        "param_is_not_tensor_parallel_duplicate",
        "set_defaults_if_not_set_tensor_model_parallel_attributes",
        "set_tensor_model_parallel_attributes",
    ),
}


def __getattr__(name: str) -> Any:
    # Lazy: the engine imports the geometry of parts (partition.py) from this package and must not import layers with it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = next((file for file, names in _FILES.items() if name in names), "mappings")
    return getattr(importlib.import_module(f"{__name__}.{file}"), name)
