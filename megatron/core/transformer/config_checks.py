"""Checks of a TransformerConfig: tables of (condition, message), one test for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megatron.core.activations import ACTIVATIONS, fast_gelu, quick_gelu
from megatron.core.served_arguments import ANY, Served
from megatron.core.transformer.attention_checks import ATTENTION_CONTRADICTIONS
from megatron.core.transformer.context_parallel import COMM_TYPES, comm_types
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.fp8_checks import FP8_CONTRADICTIONS
from megatron.core.transformer.hybrid_layers import HYBRID_CONTRADICTIONS
from megatron.core.transformer.linear_attention_checks import LINEAR_ATTENTION_CONTRADICTIONS
from megatron.core.transformer.moe.moe_config_checks import MOE_CONTRADICTIONS
from megatron.core.transformer.offload.offload_checks import OFFLOAD_CONTRADICTIONS
from megatron.core.transformer.parallel_checks import PARALLEL_CONTRADICTIONS, Condition, sizes_in_effect
from megatron.core.transformer.pipeline_checks import problems_of_stages
from megatron.core.transformer.recomputation import recomputes

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

NOT_SERVED: Served = {
    "apply_residual_connection_post_layernorm": ((False,), "only pre-norm layers are served"),
    "fp4": ((None,), "FP4 needs Blackwell, and no recipe for it is served; use fp8"),
    "fp8_recipe": (
        ("delayed", "tensorwise", "blockwise"),
        "mxfp8 needs Blackwell (Hopper has no such GEMM), and quantizers of one's own (custom) are not served",
    ),
    "fp8_wgrad": ((True,), "transformer-engine no longer has a setting for weight gradients alone"),
    "fp8_output_proj": ((False,), "in Megatron-Core it goes with mxfp8 alone, which needs Blackwell"),
    "moe_input_jitter_eps": ((None,), "routers add no noise to their input"),
    "multi_latent_attention": ((False,), "its settings are those of MLATransformerConfig; use that class"),
    "moe_permute_fusion": (ANY, "tokens are permuted by one gather, in backward as well"),
    "moe_router_fusion": (ANY, "routing after the choice of experts is one compiled function"),
    "clone_scatter_output_in_embedding": (ANY, "parts of the sequence are always copied"),
    "disable_parameter_transpose_cache": (ANY, "the engine decides what of FP8 weights rests"),
    "transformer_impl": (("local", "transformer_engine"), "the layer spec says which layers are built"),
    "cuda_graph_impl": (
        ("none", "local", "transformer_engine", "full_iteration"),
        "graphs change no number; FullCudaGraphConfig captures the whole step",
    ),
    "cuda_graph_warmup_steps": (ANY, "the training loop has its own setting"),
    **dict.fromkeys(
        ("cuda_graph_modules", "enable_cuda_graph", "external_cuda_graph"),
        (ANY, "graphs of parts of a step change no number; full_iteration captures all of it"),
    ),
    "distribute_saved_activations": (
        ANY,
        "recomputed layers keep their whole input, or sequence parallelism divides it",
    ),
    "config_logger_dir": (ANY, "a caller's log_config_to_disk writes there"),
    "moe_shared_expert_overlap": (ANY, "shared experts run before the routed ones, which gives the same"),
    "moe_per_layer_logging": (ANY, "auxiliary losses are logged as means over layers"),
    **dict.fromkeys(
        (
            "moe_enable_deepep",
            "moe_flex_dispatcher_backend",
            "moe_permute_fusion_into_hybridep",
            "moe_hybridep_pad_uneven_dispatch_inputs",
            "moe_flex_dispatcher_num_sms",
            "moe_deepep_num_sms",
            "moe_hybridep_num_sms",
            "moe_hybridep_num_blocks_permute",
            "moe_hybridep_num_blocks_unpermute",
            "moe_hybridep_num_sms_preprocessing",
            "moe_ncclep_zero_copy",
        ),
        (ANY, "tokens are dispatched by one all-to-all, which gives the same"),
    ),
    **dict.fromkeys(
        (
            "disable_bf16_reduced_precision_matmul",
            "flash_attention_version",
            "fused_residual_rmsnorm",
            "high_priority_a2a_comm_stream",
            "moe_router_padding_for_fp8",
            "moe_router_padding_for_quantization",
            "moe_use_grouped_tensor",
            "symmetric_ar_type",
            "test_mode",
            "use_fused_weighted_squared_relu",
            "use_grouped_gemm_for_dense_mlp",
            "use_grouped_gemm_for_shared_expert",
            "use_te_activation_func",
        ),
        (ANY, "a hint about kernels: what runs here gives the same"),
    ),
    "experimental_attention_variant": (
        (None, "gdn", "gated_delta_net"),
        "of these variants gated delta net is served, neither its second version nor sparse attention",
    ),
    "use_mamba_mem_eff_path": (ANY, "a hint about kernels: what runs here gives the same"),
    "mamba_training_ssm_states_dtype": ((None, torch.float32), "states are in fp32"),
    "memory_efficient_layer_norm": (
        (False,),
        "norms keep their input for an exact backward, not their output; use recompute_granularity",
    ),
}
"""Maps a field to (values that are served, why others are not)."""

_MTP = "gradients of multi-token prediction go through the whole model, from the layers' own hidden states"
_VARIANT = "this variant of attention is not served"
_STATE_SPACE = "this setting of state-space layers is not served"
_DISPATCH = "tokens are dispatched by one all-to-all"

FAMILIES: tuple[tuple[str, str], ...] = (
    ("mtp_", _MTP),
    ("dsa_", _VARIANT),
    ("linear_", _VARIANT),
    ("experimental_attention", _VARIANT),
    ("qk_clip", _VARIANT),
    ("mrope_", _VARIANT),
    ("mup_", "maximal update parametrisation is not served"),
    ("mamba_", _STATE_SPACE),
    ("gdp_", _STATE_SPACE),
    ("inference_", "inference has no settings of its own"),
    ("use_inference", "inference has no settings of its own"),
    ("flash_decode", "inference has no settings of its own"),
    ("moe_hybridep", _DISPATCH),
    ("moe_deepep", _DISPATCH),
    ("moe_enable_deepep", _DISPATCH),
    ("moe_flex", _DISPATCH),
    ("moe_ncclep", _DISPATCH),
    ("moe_", "this setting of experts is not served"),
    ("mhc_", "one residual stream is served"),
    ("enable_mhc", "one residual stream is served"),
    ("cuda_graph", "graphs of parts of a step are not served"),
    ("enable_cuda_graph", "graphs of parts of a step are not served"),
    ("external_cuda_graph", "graphs of parts of a step are not served"),
    ("fp4_", "FP4 needs Blackwell, and no recipe for it is served; use fp8"),
    ("fp8_", "this setting of FP8 is not served"),
    ("use_kitchen", "the kitchen package is not served"),
    ("kitchen_", "the kitchen package is not served"),
    ("delay_offload", "copies to the host are not delayed; graphs of parts of a step are not served"),
    ("delta_offload", "all pipeline ranks offload the same"),
    ("heter", "all layers have one configuration"),
    ("hetere", "all layers have one configuration"),
)
"""(Start of a field's name, why other values than its default are not served)."""

CONTRADICTIONS: list[tuple[Condition, str]] = [
    (lambda c: c.num_layers < 1, "num_layers must be at least 1, got {num_layers}"),
    (lambda c: c.hidden_size < 0, "hidden_size must be at least 1 (0: there is no transformer), got {hidden_size}"),
    (lambda c: c.num_attention_heads < 1, "num_attention_heads must be at least 1, got {num_attention_heads}"),
    (
        lambda c: c.ffn_hidden_size is not None and c.ffn_hidden_size < 1,
        "ffn_hidden_size must be at least 1 (or None for 4 * hidden_size), got {ffn_hidden_size}",
    ),
    (
        lambda c: c.kv_channels is not None and c.kv_channels < 1,
        "kv_channels must be at least 1 (or None for hidden_size // num_attention_heads), got {kv_channels}",
    ),
    (
        lambda c: c.kv_channels is None and not c.multi_latent_attention and c.hidden_size % c.num_attention_heads != 0,
        "hidden_size must be a multiple of num_attention_heads, got {hidden_size} and {num_attention_heads}; change"
        " one of them or set kv_channels",
    ),
    (
        lambda c: c.num_query_groups is not None and c.num_query_groups < 1,
        "num_query_groups must be at least 1 (or None for as many as heads), got {num_query_groups}",
    ),
    (
        lambda c: c.num_query_groups is not None and c.num_attention_heads % c.num_query_groups != 0,
        "num_attention_heads must be a multiple of num_query_groups, got {num_attention_heads} and {num_query_groups}",
    ),
    (lambda c: not 0.0 <= c.hidden_dropout < 1.0, "hidden_dropout must be in [0, 1), got {hidden_dropout}"),
    (lambda c: not 0.0 <= c.attention_dropout < 1.0, "attention_dropout must be in [0, 1), got {attention_dropout}"),
    (lambda c: c.layernorm_epsilon <= 0.0, "layernorm_epsilon must be positive, got {layernorm_epsilon}"),
    (lambda c: not c.init_method_std >= 0.0, "init_method_std must not be negative, got {init_method_std}"),
    (
        lambda c: c.normalization not in ("LayerNorm", "RMSNorm"),
        "normalization must be 'LayerNorm' or 'RMSNorm', got {normalization!r}",
    ),
    (
        lambda c: isinstance(c.activation_func, str) and c.activation_func not in ACTIVATIONS,
        "activation_func must be a function or one of gelu, silu, swish, relu, squared_relu, quick_gelu, fast_gelu, got {activation_func!r}",
    ),
    (
        lambda c: isinstance(c.attention_backend, str) and c.attention_backend not in AttnBackend.__members__,
        "attention_backend must be one of flash, fused, unfused, local, auto, got {attention_backend!r}",
    ),
    (
        lambda c: c.bias_activation_fusion and not _fusible_activation(c),
        "bias_activation_fusion must go with GELU (without a gate with add_bias_linear; with one without clamps and offset)"
        " or gated SiLU or quick GELU, got {activation_func!r}; turn the fusion off",
    ),
    (
        lambda c: c.params_dtype not in (torch.float32, torch.bfloat16, torch.float16),
        "params_dtype must be torch.float32, torch.bfloat16 or torch.float16, got {params_dtype}",
    ),
    (lambda c: c.context_parallel_size < 1, "context_parallel_size must be at least 1, got {context_parallel_size}"),
    (
        lambda c: not set(comm_types(c.cp_comm_type)) <= set(COMM_TYPES),
        "cp_comm_type must be of p2p, all_gather and a2a, got {cp_comm_type!r}",
    ),
    (
        lambda c: len(comm_types(c.cp_comm_type)) not in (1, c.num_layers),
        "cp_comm_type must be one for all layers or one for each of num_layers ({num_layers}), got {cp_comm_type!r}",
    ),
    (
        lambda c: (
            c.context_parallel_size > 1 and c.attention_dropout > 0.0 and set(comm_types(c.cp_comm_type)) != {"a2a"}
        ),
        "attention_dropout must be 0 with context_parallel_size > 1, got {attention_dropout}: only cp_comm_type='a2a' has whole"
        " sequences on a rank, of which it can drop probabilities",
    ),
    (
        lambda c: c.mup_width_mult not in (1.0, c.hidden_size / (c.mup_base_hidden_size or c.hidden_size or 1)),
        "mup_width_mult must be left out, got {mup_width_mult}: it is hidden_size / mup_base_hidden_size with use_mup",
    ),
    (
        lambda c: c.use_mup and min(c.mup_base_hidden_size or 1, c.mup_base_head_dim or 1) <= 0,
        "mup_base_hidden_size and mup_base_head_dim must be positive, got {mup_base_hidden_size} and {mup_base_head_dim}",
    ),
    (
        lambda c: c.recompute_granularity not in (None, "full", "selective"),
        "recompute_granularity must be 'full', 'selective' or None, got {recompute_granularity!r}",
    ),
    (
        lambda c: c.recompute_method not in (None, "uniform", "block"),
        "recompute_method must be 'uniform', 'block' or None, got {recompute_method!r}",
    ),
    (
        lambda c: c.recompute_granularity == "full" and c.recompute_method is None,
        "recompute_granularity='full' must go with recompute_method 'uniform' or 'block', got {recompute_method!r}",
    ),
    (
        lambda c: c.recompute_granularity == "full" and not 1 <= (c.recompute_num_layers or 0) <= c.num_layers,
        "recompute_granularity='full' must go with recompute_num_layers from 1 to num_layers ({num_layers}), got"
        " {recompute_num_layers}",
    ),
    (
        lambda c: c.recompute_modules is not None and not _recomputable(c.recompute_modules),
        "recompute_modules must be of 'core_attn', 'mla_up_proj', 'mlp_act', 'mlp' and 'moe', at least one, got {recompute_modules!r};"
        " use recompute_granularity='full' for more",
    ),
    (
        lambda c: recomputes(c, "mlp_act") and c.num_moe_experts is not None,
        "recompute_modules must not have 'mlp_act' with num_moe_experts, got {recompute_modules!r}: experts keep their"
        " activations; leave it out, or use recompute_granularity='full'",
    ),
]

CONTRADICTIONS += [
    *MOE_CONTRADICTIONS,
    *PARALLEL_CONTRADICTIONS,
    *FP8_CONTRADICTIONS,
    *ATTENTION_CONTRADICTIONS,
    *OFFLOAD_CONTRADICTIONS,
    *LINEAR_ATTENTION_CONTRADICTIONS,
    *HYBRID_CONTRADICTIONS,
]


def contradictions(config: TransformerConfig, *, has_faults: bool) -> list[str]:
    """Return the messages of the rows of ``CONTRADICTIONS`` that hold.

    Args:
        has_faults: fields have values that are not served; rows that cannot be computed then are left out.
    """
    found: list[str] = []
    # A function's own representation ends in an address.
    values = {name: getattr(value, "__name__", value) for name, value in vars(config).items()}
    for holds, message in CONTRADICTIONS:
        try:
            if holds(config):
                found.append("TransformerConfig." + message.format_map({**values, **sizes_in_effect(config)}))
        except (TypeError, ZeroDivisionError):
            if not (has_faults or found):
                raise  # rows may rely on those before them
    if not found:
        found += [f"TransformerConfig.{problem}" for problem in problems_of_stages(config)]
    return found


def _recomputable(modules: Sequence[str]) -> bool:
    return bool(modules) and set(modules) <= {"core_attn", "mla_up_proj", "mlp_act", "mlp", "moe"}


def _fusible_activation(config: TransformerConfig) -> bool:
    function = config.activation_func
    if function in ("gelu", torch.nn.functional.gelu):
        return _is_plain(config) if config.gated_linear_unit else config.add_bias_linear
    if function in ("fast_gelu", fast_gelu):
        return config.gated_linear_unit and _is_plain(config)
    gated = ("silu", "swish", torch.nn.functional.silu, "quick_gelu", quick_gelu)
    return function in gated and config.gated_linear_unit


def _is_plain(config: TransformerConfig) -> bool:
    return config.glu_linear_offset == 0.0 and config.activation_func_clamp_value is None
