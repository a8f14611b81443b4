"""The model that flags say: from their values to its settings."""

from __future__ import annotations

from argparse import Namespace

import torch
import torch.nn.functional as F

from megatron.core.activations import fast_gelu, quick_gelu, squared_relu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.cli.flags_attention import YARN, yarn_settings
from megatron.training.cli.flags_model import check_spec, ffn_hidden_size, position_embedding_type
from megatron.training.cli.flags_parallel import parallel_settings
from megatron.training.cli.served_flags import same_named
from megatron.training.launch.gpt_config import GPTConfig


def gpt_config(args: Namespace) -> GPTConfig:
    """Return the model's settings that these flags say."""
    return GPTConfig(
        **same_named(GPTConfig, args, but=("position_embedding_type", "make_vocab_size_divisible_by")),
        transformer=_transformer(args),
        position_embedding_type=position_embedding_type(args),
        rope_scaling=args.use_rope_scaling,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        make_vocab_size_divisible_by=args.make_vocab_size_divisible_by if args.pad_vocab_size else None,
        model_vocab_size=args.padded_vocab_size,
        init_on_meta_device=args.init_model_with_meta_device,
    )


_NOT_OF_THE_MODEL = (
    "cuda_graph_impl",
    "cuda_graph_scope",
    "cuda_graph_warmup_steps",
    "multi_latent_attention",
    "transformer_impl",
)
"""Flags that are in effect elsewhere, with the names of fields."""


def _transformer(args: Namespace) -> TransformerConfig:
    check_spec(args)
    kind = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    settings = same_named(kind, args, but=(*_NOT_OF_THE_MODEL, *YARN)) | parallel_settings(args) | yarn_settings(args)
    if args.multi_latent_attention:
        settings["rope_type"] = args.rope_type or "yarn"
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
    settings |= {
        "ffn_hidden_size": ffn_hidden_size(args),
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "num_moe_experts": args.num_experts,
        "fp8": args.fp8_format,
        "fp8_param": args.fp8_param_gather,
        "cpu_offloading": args.cpu_offloading_num_layers > 0,
        "layernorm_epsilon": args.norm_epsilon,
        "layernorm_zero_centered_gamma": args.apply_layernorm_1p,
        "params_dtype": compute_dtype(args),
        "init_seed": args.seed,
    }
    return kind(**settings)


def compute_dtype(args: Namespace) -> torch.dtype:
    """Return the dtype in which the model computes."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
