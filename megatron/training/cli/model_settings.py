"""The model that flags say: from their values to its settings."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.transformer.hybrid_layers import MAMBA_SIZES
from megatron.core.transformer.linear_attention_checks import LINEAR_ATTENTION_SIZES
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.cli.flags_attention import yarn_settings
from megatron.training.cli.flags_experts import expert_settings
from megatron.training.cli.flags_fp8 import fp8_settings
from megatron.training.cli.flags_hybrid import check_spec
from megatron.training.cli.flags_mla import mla_settings
from megatron.training.cli.flags_model import ffn_hidden_size, position_embedding_type
from megatron.training.cli.flags_offload import activation_offload_settings
from megatron.training.cli.flags_parallel import parallel_settings
from megatron.training.launch.gpt_config import GPTConfig


def gpt_config(args: Namespace) -> GPTConfig:
    """Return the model's settings that these flags say."""
    return GPTConfig(
        transformer=_transformer(args),
        max_position_embeddings=args.max_position_embeddings,
        position_embedding_type=position_embedding_type(args),
        rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        rotary_seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        make_vocab_size_divisible_by=args.make_vocab_size_divisible_by if args.pad_vocab_size else None,
        model_vocab_size=args.padded_vocab_size,
        init_on_meta_device=args.init_model_with_meta_device,
        transformer_impl=args.transformer_impl,
    )


_SAME_NAME_IN_TRANSFORMER_CONFIG = (
    "num_layers",
    "mtp_num_layers",
    "mtp_loss_scaling_factor",
    "mtp_use_repeated_layer",
    "hidden_size",
    "num_attention_heads",
    "kv_channels",
    "rotary_interleaved",
    "normalization",
    "qk_layernorm",
    "qk_l2_norm",
    "softmax_type",
    "window_size",
    "window_attn_skip_freq",
    "no_rope_freq",
    "attention_output_gate",
    "experimental_attention_variant",
    "linear_attention_freq",
    *LINEAR_ATTENTION_SIZES,
    "hybrid_layer_pattern",
    "is_hybrid_model",
    *MAMBA_SIZES,
    "glu_linear_offset",
    "activation_func_clamp_value",
    "window_rotary_base",
    "sandwich_layernorm",
    "embedding_scale",
    "embedding_init_method_std",
    "softmax_scale",
    "add_bias_linear",
    "add_qkv_bias",
    "attention_backend",
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "use_cpu_initialization",
    "perform_initialization",
    "init_model_with_meta_device",
    "use_mup",
    "mup_base_hidden_size",
    "mup_embedding_mult",
    "mup_output_mult",
    "mup_base_head_dim",
    "mup_attn_scale_power",
    "bf16",
    "fp16",
    "fp32_residual_connection",
    "apply_query_key_layer_scaling",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "persist_layer_norm",
    "cross_entropy_loss_fusion",
    "cross_entropy_fusion_impl",
    "disable_jit_fuser",
    "gradient_accumulation_fusion",
    "gradient_accumulation_fusion_min_numel",
    "deterministic_mode",
    "calculate_per_token_loss",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)


def _transformer(args: Namespace) -> TransformerConfig:
    check_spec(args)
    settings: dict[str, Any] = {name: getattr(args, name) for name in _SAME_NAME_IN_TRANSFORMER_CONFIG}
    settings |= parallel_settings(args) | expert_settings(args) | fp8_settings(args) | yarn_settings(args)
    settings |= activation_offload_settings(args)
    if args.swiglu:
        settings |= {"gated_linear_unit": True, "activation_func": F.silu}
        settings["bias_activation_fusion"] = args.bias_swiglu_fusion
    elif args.squared_relu:
        settings["activation_func"] = squared_relu
    elif args.geglu:
        settings |= {"gated_linear_unit": True, "activation_func": fast_gelu}
        settings["bias_activation_fusion"] = args.bias_gelu_fusion
    elif args.quick_geglu:
        settings |= {"gated_linear_unit": True, "activation_func": quick_gelu}
        settings["bias_activation_fusion"] = args.bias_gelu_fusion
    else:
        # Without a bias there is nothing to fuse with GELU, and Megatron-LM uses the exact GELU then.
        settings["bias_activation_fusion"] = args.bias_gelu_fusion and args.add_bias_linear
    kind: type[TransformerConfig] = TransformerConfig
    if args.multi_latent_attention:
        kind, settings = MLATransformerConfig, settings | mla_settings(args)
    return kind(
        **settings,
        ffn_hidden_size=ffn_hidden_size(args),
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        layernorm_epsilon=args.norm_epsilon,
        layernorm_zero_centered_gamma=args.apply_layernorm_1p,
        params_dtype=compute_dtype(args),
        attention_softmax_in_fp32=args.attention_softmax_in_fp32,
        init_seed=args.seed,
    )


def compute_dtype(args: Namespace) -> torch.dtype:
    """Return the dtype in which the model computes."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
