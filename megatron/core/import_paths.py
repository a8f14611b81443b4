"""Import paths of Megatron-Core and Megatron-LM whose names lie elsewhere in this package.

Two tables have a row for each path that public code imports: where its names are (``_SERVED``), or what to use instead of a name
that works differently here (``_REFUSED``). A path need not have a file; one that has a file gets these names in addition to its own.
A name whose file needs an optional package can be imported without that package: building it raises ImportError.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from megatron.core.elsewhere import elsewhere, needs_package

_EXTENSIONS = "megatron.core.extensions."
_LAYERS = _EXTENSIONS + "transformer_engine_layers"
_TRANSFORMER_ENGINE = {
    _LAYERS: "TEColumnParallelGroupedLinear TEColumnParallelLinear TEGroupedLinear TELayerNorm TELayerNormColumnParallelLinear "
    "TELinear TENorm TERMSNorm TERowParallelGroupedLinear TERowParallelLinear",
    _EXTENSIONS + "transformer_engine_attention": "TEDotProductAttention",
    _EXTENSIONS + "transformer_engine_mlp": "TEFusedMLP",
    "megatron.core.fp8_utils": "HAVE_TE",
}
_EMBEDDINGS = "megatron.core.models.common.embeddings."

_SERVED: dict[str, dict[str, str]] = {
    "megatron.core.dist_checkpointing.strategies.base": {
        "megatron.core.dist_checkpointing.strategies.async_utils": "async_calls"
    },
    "megatron.core.dist_checkpointing.strategies.common": {
        "megatron.core.dist_checkpointing.serialization": "COMMON_STATE_FNAME load_common=load_common_state_dict"
    },
    "megatron.core.distributed.custom_fsdp": {"megatron.core.distributed.fsdp": "FullyShardedDataParallel"},
    "megatron.core.distributed.finalize_model_grads": {
        "megatron.core.model_wrappers": "get_attr_wrapped_model",
        "torch._utils": "_flatten_dense_tensors _unflatten_dense_tensors",
    },
    "megatron.core.extensions.transformer_engine": _TRANSFORMER_ENGINE,
    "megatron.core.models.common.embeddings": {
        _EMBEDDINGS + "rope_utils": "apply_rotary_pos_emb",
        _EMBEDDINGS + "rotary_pos_embedding": "RotaryEmbedding",
        _EMBEDDINGS + "yarn_rotary_pos_embedding": "YarnRotaryEmbedding _yarn_get_mscale=yarn_mscale",
    },
    "megatron.core.models.gpt.moe_module_specs": {"megatron.core.transformer.mlp": "MLPSubmodules"},
    "megatron.core.optimizer.optimizer": {"megatron.core.optimizer.chained_optimizer": "ChainedOptimizer ProxyDict"},
    "megatron.core.optimizer.optimizer_param_scheduler": {
        "megatron.core.optimizer_param_scheduler": "OptimizerParamScheduler"
    },
    "megatron.core.pipeline_parallel.utils": {"megatron.core.model_wrappers": "unwrap_model"},
    "megatron.core.ssm.mamba_hybrid_layer_allocation": {
        "megatron.core.models.hybrid.hybrid_layer_allocation": "ParsedHybridPattern Symbols get_hybrid_layer_counts "
        "get_hybrid_total_layer_count parse_hybrid_pattern"
    },
    "megatron.core.tokenizers.text.libraries": {
        "megatron.core.tokenizers.huggingface_tokenizer": "HuggingFaceTokenizer"
    },
    "megatron.core.transformer.attention": {
        "megatron.core.nvtx_ranges": "nvtx_range_pop nvtx_range_push",
        "megatron.core.package_versions": "is_fa_min_version",
        "megatron.core.packed_seq_params": "PackedSeqParams",
    },
    "megatron.core.transformer.custom_layers.transformer_engine": _TRANSFORMER_ENGINE,
    "megatron.core.transformer.moe.moe_utils": {
        "megatron.core.transformer.moe.auxiliary_losses": "MoEAuxLossAutoScaler",
        "megatron.core.transformer.moe.loss_tracker": "clear_aux_losses_tracker get_moe_layer_wise_logging_tracker "
        "reduce_aux_losses_tracker_across_ranks save_to_aux_losses_tracker track_moe_metrics",
    },
    "megatron.core.transformer.moe.router": {"megatron.core.transformer.moe.auxiliary_losses": "MoEAuxLossAutoScaler"},
    "megatron.core.transformer.multi_latent_attention": {
        _EMBEDDINGS + "rope_utils": "apply_rotary_pos_emb",
        "megatron.core.tensor_parallel.mappings": "gather_from_tensor_model_parallel_region scatter_to_sequence_parallel_region",
    },
    "megatron.core.transformer.transformer_block": {
        "megatron.core.transformer.pipeline_layers": "get_transformer_layer_offset",
        "megatron.core.transformer.transformer_config": "TransformerConfig",
    },
    "megatron.training.async_utils": {"megatron.training.library.checkpoints": "maybe_finalize_async_save"},
    "megatron.training.checkpointing": {
        "megatron.training.library.checkpoints": "get_checkpoint_name get_checkpoint_tracker_filename "
        "get_load_checkpoint_path_by_args load_checkpoint read_metadata save_checkpoint",
        "os.path": "isfile",
    },
    "megatron.training.global_vars": {"megatron.training.library.state": "_build_tokenizer=rebuild_tokenizer"},
    "megatron.training.tokenizer.tokenizer": {
        "megatron.core.tokenizers.utils.build_tokenizer": "_vocab_size_with_padding=vocab_size_with_padding"
    },
    "megatron.training.utils": {"megatron.core.utils": "get_batch_on_this_cp_rank"},
    "megatron.training.vocab_utils": {"megatron.core.tokenizers.utils.build_tokenizer": "calculate_padded_vocab_size"},
}
"""{import path: {module that has them: names}}; ``name=other`` where the module has it as ``other``."""

_CHECKPOINTED = (
    "use megatron.core.tensor_parallel.checkpoint, or set recompute_granularity in TransformerConfig, which covers FP8"
)
_RECIPE = "TransformerConfig.fp8_recipe and its fields choose the recipe"

_REFUSED: dict[str, dict[str, str]] = {
    "megatron.core.extensions.transformer_engine": {"te_checkpoint": _CHECKPOINTED, "TEDelayedScaling": _RECIPE},
    "megatron.core.transformer.custom_layers.transformer_engine": {"TEDelayedScaling": _RECIPE},
    "megatron.training.initialize": {
        "_initialize_tp_communicators": "--tp-comm-overlap is a hint: layers need no buffers of transformer-engine for it"
    },
}
"""{import path: {name: what to use instead}}."""

_VALUES: dict[str, dict[str, Any]] = {
    # Callers split with torch.split and multiply with torch.matmul where these are None.
    "megatron.core.extensions.transformer_engine": {"SplitAlongDim": None, "te_general_gemm": None},
    "megatron.core.transformer.custom_layers.transformer_engine": {"SplitAlongDim": None},
}
"""{import path: {name: its value}}."""

_PATHS = {
    ".".join(parts[:depth])
    for path in (*_SERVED, *_REFUSED, *_VALUES)
    for parts in [path.split(".")]
    for depth in range(3, len(parts) + 1)
}


@functools.cache
def find_name(path: str, name: str) -> Any:
    """Return what the tables have under a name.

    Raises:
        AttributeError: nothing.
    """
    for home, names in _SERVED.get(path, {}).items():
        known = {theirs: ours or theirs for theirs, _, ours in (one.partition("=") for one in names.split())}
        if name in known:
            try:
                return getattr(importlib.import_module(home), known[name])
            except ImportError as error:
                if not home.startswith(_EXTENSIONS):
                    raise
                return needs_package(path, name, str(error))
    if name in _REFUSED.get(path, {}):
        return elsewhere(path, name, _REFUSED[path][name])
    if name in _VALUES.get(path, {}):
        return _VALUES[path][name]
    raise AttributeError(f"module {path!r} has no attribute {name!r}")


def _add_names(module: ModuleType) -> None:
    own = vars(module).get("__getattr__")

    def find(name: str) -> Any:
        try:
            return find_name(module.__name__, name)
        except AttributeError:
            if own is None:
                raise
        return own(name)

    vars(module)["__getattr__"] = find


class _FileWithNames(SourceFileLoader):
    """Loader of a file whose module gets the tables' names too."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        _add_names(module)


class _NamesOnly(Loader):
    """Loader of a path without a file."""

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = f"Megatron-LM's import path; ``{__name__}`` has its names."
        _add_names(module)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _PATHS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None:
            return ModuleSpec(
                name, _NamesOnly(), origin=__file__, is_package=any(other.startswith(f"{name}.") for other in _PATHS)
            )
        if isinstance(spec.loader, SourceFileLoader):
            spec.loader = _FileWithNames(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Let Python find these paths."""
    if not any(type(finder).__name__ == _Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
