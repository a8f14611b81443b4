"""Checks of a TransformerConfig's FP8 settings: a table of (condition, message), one test a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from megatron.core.activations import ACTIVATIONS
from megatron.core.transformer.fp8_widths import FP8_WIDTHS
from megatron.core.transformer.parallel_checks import Condition
from megatron.core.transformer.recomputation import recomputes

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def _in_fp8(activation: object) -> bool:
    served = {name: function for name, function in ACTIVATIONS.items() if name not in ("quick_gelu", "fast_gelu")}
    return activation in served or activation in served.values()


def _num_bf16_layers(config: TransformerConfig) -> int:
    return config.num_layers_at_start_in_bf16 + config.num_layers_at_end_in_bf16


FP8_CONTRADICTIONS: list[tuple[Condition, str]] = [
    (lambda c: c.fp8 not in (None, "e4m3", "hybrid"), "fp8 must be 'e4m3', 'hybrid' or None, got {fp8!r}"),
    (
        lambda c: c.fp8 is not None and not (c.bf16 and c.params_dtype is torch.bfloat16),
        "fp8 must go with bf16=True and params_dtype=torch.bfloat16, got {bf16} and {params_dtype}: gradients of weights and all that is not multiplied in FP8 is in bf16",
    ),
    (
        lambda c: c.layer_kernels not in ("fastest", "transformer_engine"),
        "layer_kernels must be 'fastest' or 'transformer_engine', got {layer_kernels!r}",
    ),
    (
        lambda c: c.fp8 is not None and vars(c)["transformer_impl"] == "local",
        "fp8 must go with transformer_impl='transformer_engine', got 'local', whose layers have no FP8; leave one of the two out",
    ),
    (lambda c: c.fp8_amax_history_len < 1, "fp8_amax_history_len must be at least 1, got {fp8_amax_history_len}"),
    (lambda c: c.fp8_margin < 0, "fp8_margin must not be negative, got {fp8_margin}"),
    (
        lambda c: c.fp8_amax_compute_algo not in ("most_recent", "max"),
        "fp8_amax_compute_algo must be 'most_recent' or 'max', got {fp8_amax_compute_algo!r}",
    ),
    (
        lambda c: c.fp8_dot_product_attention and c.fp8_recipe == "blockwise",
        "fp8_dot_product_attention must be off with fp8_recipe='blockwise', got it on: transformer-engine has no such kernel",
    ),
    (
        lambda c: c.fp8_multi_head_attention and not c.fp8_dot_product_attention,
        "fp8_multi_head_attention must go with fp8_dot_product_attention, got it off; turn both on",
    ),
    (
        lambda c: c.fp8_dot_product_attention and c.attention_dropout > 0.0,
        "attention_dropout must be 0 with fp8_dot_product_attention, got {attention_dropout}",
    ),
    (
        lambda c: c.fp8 is not None and recomputes(c, "mlp_act") and not c.use_transformer_engine_op_fuser,
        "recompute_modules with 'mlp_act' must go with use_transformer_engine_op_fuser in FP8, got it off: the linear layer"
        " behind the activation keeps a copy in FP8 then; turn it on",
    ),
    (
        lambda c: c.activation_func_fp8_input_store and not c.use_transformer_engine_op_fuser,
        "activation_func_fp8_input_store must go with use_transformer_engine_op_fuser, got it off; turn it on, or leave the other out",
    ),
    (
        lambda c: c.activation_func_fp8_input_store and recomputes(c, "mlp_act"),
        "recompute_modules must not have 'mlp_act' with activation_func_fp8_input_store: what is recomputed would not be what"
        " was computed in forward; leave one of them out",
    ),
    (
        lambda c: (
            c.use_transformer_engine_op_fuser and c.activation_func in (F.gelu, "gelu") and not c.bias_activation_fusion
        ),
        "use_transformer_engine_op_fuser must go with bias_activation_fusion where the activation is GELU, got it off:"
        " transformer-engine computes the tanh form alone, which that setting asks for; turn it on, or leave the fuser out",
    ),
    (
        lambda c: (
            c.use_transformer_engine_op_fuser
            and (
                not _in_fp8(c.activation_func)
                or c.glu_linear_offset != 0.0
                or c.activation_func_clamp_value is not None
            )
        ),
        "use_transformer_engine_op_fuser must go with GELU, SiLU, ReLU or squared ReLU, without clamps and offset, got"
        " {activation_func!r}, {activation_func_clamp_value} and {glu_linear_offset}; leave it out",
    ),
    (
        lambda c: c.first_last_layers_bf16 and c.fp8_recipe == "delayed",
        "first_last_layers_bf16 must go with fp8_recipe='tensorwise' or 'blockwise', got 'delayed', whose scales are made for"
        " all layers at once",
    ),
    (
        lambda c: c.first_last_layers_bf16 and min(c.num_layers_at_start_in_bf16, c.num_layers_at_end_in_bf16) < 0,
        "num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16 must not be negative, got {num_layers_at_start_in_bf16}"
        " and {num_layers_at_end_in_bf16}",
    ),
    (
        lambda c: c.first_last_layers_bf16 and _num_bf16_layers(c) > c.num_layers,
        "num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16 must be num_layers ({num_layers}) together at most, got"
        " {num_layers_at_start_in_bf16} and {num_layers_at_end_in_bf16}",
    ),
    (
        lambda c: c.fp8 is not None and c.num_moe_experts is not None and not c.moe_grouped_gemm,
        "fp8 must go with moe_grouped_gemm where there are experts, got it off: rows of single experts are not padded to what"
        " FP8 GEMMs need",
    ),
    *FP8_WIDTHS,
]
"""Rows like those of ``config_checks.CONTRADICTIONS``."""
