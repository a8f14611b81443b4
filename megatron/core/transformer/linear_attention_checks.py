"""Checks of a TransformerConfig's linear attention: a table of (condition, message), one test for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F

from megatron.core.transformer.attention_patterns import is_pattern
from megatron.core.transformer.fp8_widths import uneven_in_fp8
from megatron.core.transformer.parallel_checks import Condition

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

LINEAR_ATTENTION_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""Fields without effect unless layers have linear attention, with their defaults."""


def _has(config: TransformerConfig) -> bool:
    return config.experimental_attention_variant is not None


def _positive(field: str) -> tuple[Condition, str]:
    return (lambda c: _has(c) and getattr(c, field) < 1, f"{field} must be at least 1, got {{{field}}}")


def _projected_rows(config: TransformerConfig) -> int:
    """Rows of the first projection on a rank, before they are divided."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * (config.linear_value_head_dim + 1)
    return (2 * keys + 2 * values) // config.tensor_model_parallel_size


LINEAR_ATTENTION_CONTRADICTIONS: list[tuple[Condition, str]] = [
    (
        lambda c: not _has(c) and c.linear_attention_freq is not None,
        "linear_attention_freq must be None without experimental_attention_variant, got {linear_attention_freq!r}; set"
        " experimental_attention_variant='gdn'",
    ),
    *map(_positive, LINEAR_ATTENTION_SIZES),
    (
        lambda c: (
            _has(c) and (c.linear_attention_freq is None or not is_pattern(c.linear_attention_freq, c.num_layers))
        ),
        "linear_attention_freq must be positive, or hold 1 (linear attention) or 0 for each of num_layers ({num_layers}), with"
        " experimental_attention_variant, got {linear_attention_freq!r}",
    ),
    (
        lambda c: _has(c) and c.linear_num_value_heads % c.linear_num_key_heads != 0,
        "linear_num_value_heads must be a multiple of linear_num_key_heads, got {linear_num_value_heads} and"
        " {linear_num_key_heads}",
    ),
    (
        lambda c: _has(c) and c.linear_num_key_heads % c.tensor_model_parallel_size != 0,
        "linear_num_key_heads must be a multiple of tensor_model_parallel_size, got {linear_num_key_heads} and"
        " {tensor_model_parallel_size}; heads of linear attention are divided over ranks",
    ),
    (
        lambda c: _has(c) and c.context_parallel_size > 1,
        "context_parallel_size must be 1 with experimental_attention_variant, got {context_parallel_size}: states go through the"
        " whole sequence; use tensor_model_parallel_size with sequence_parallel",
    ),
    (
        lambda c: _has(c) and c.activation_func not in ("silu", "swish", F.silu),
        "activation_func must be SiLU with experimental_attention_variant, got {activation_func!r}: its convolution and its gates"
        " have the activation of the MLP",
    ),
    (
        lambda c: _has(c) and uneven_in_fp8(c, _projected_rows(c)),
        "fp8 must go with linear attention whose projection has a multiple of 16 rows on each tensor-parallel rank, got heads"
        " {linear_num_key_heads} of {linear_key_head_dim} and {linear_num_value_heads} of {linear_value_head_dim} on"
        " {tensor_model_parallel_size} ranks",
    ),
]
"""Rows like those of ``config_checks.CONTRADICTIONS``."""
