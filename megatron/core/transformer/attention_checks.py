"""Checks of a TransformerConfig's variants of attention and MLP: a table of (condition, message), one test for each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron.core.transformer.attention_patterns import is_pattern
from megatron.core.transformer.parallel_checks import Condition

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def _is_window(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) == 2
        and all(isinstance(end, int) for end in value)
        and value[0] >= -1
        and value[1] in (0, -1)
    )


def _skips_unevenly(config: TransformerConfig) -> bool:
    return isinstance(config.no_rope_freq, int) and config.num_layers % config.no_rope_freq != 0


ATTENTION_CONTRADICTIONS: list[tuple[Condition, str]] = [
    (
        lambda c: c.softmax_scale is not None and not c.softmax_scale > 0,
        "softmax_scale must be above 0, got {softmax_scale}",
    ),
    (
        lambda c: c.window_size is not None and not _is_window(c.window_size),
        "window_size must be two numbers, the positions before a query (or -1 for all) and 0, since attention is causal, got"
        " {window_size!r}",
    ),
    (
        lambda c: c.window_attn_skip_freq is not None and c.window_size is None,
        "window_attn_skip_freq must go with window_size, got None; give both, or none",
    ),
    (
        lambda c: c.window_attn_skip_freq is not None and not is_pattern(c.window_attn_skip_freq, c.num_layers),
        "window_attn_skip_freq must be positive, or hold 1 (window) or 0 (none) for each of num_layers ({num_layers}), got"
        " {window_attn_skip_freq!r}",
    ),
    (
        lambda c: c.window_rotary_base is not None and c.window_size is None,
        "window_rotary_base must go with window_size, got {window_rotary_base} and None; leave it out",
    ),
    (
        lambda c: c.no_rope_freq is not None and not is_pattern(c.no_rope_freq, c.num_layers),
        "no_rope_freq must be positive, or hold 1 (no rotary positions) or 0 for each of num_layers ({num_layers}), got"
        " {no_rope_freq!r}",
    ),
    (
        _skips_unevenly,
        "num_layers must be a multiple of no_rope_freq, got {num_layers} and {no_rope_freq}; give a list of layers",
    ),
    (
        lambda c: c.softmax_type not in ("vanilla", "off-by-one", "learnable"),
        "softmax_type must be 'vanilla', 'off-by-one' or 'learnable', got {softmax_type!r}",
    ),
    (
        lambda c: c.softmax_type != "vanilla" and c.fp8_dot_product_attention,
        "softmax_type must be 'vanilla' with fp8_dot_product_attention, got {softmax_type!r}: transformer-engine has no such"
        " kernel on Hopper",
    ),
    (
        lambda c: c.qk_l2_norm and c.qk_layernorm,
        "qk_l2_norm must be off with qk_layernorm, got both: they are two norms of queries and keys; turn one off",
    ),
    (
        lambda c: c.embedding_init_method_std is not None and c.embedding_init_method_std < 0.0,
        "embedding_init_method_std must not be negative, got {embedding_init_method_std}",
    ),
    (
        lambda c: not c.gated_linear_unit and (c.glu_linear_offset != 0.0 or c.activation_func_clamp_value is not None),
        "glu_linear_offset and activation_func_clamp_value must go with gated_linear_unit, got {glu_linear_offset} and"
        " {activation_func_clamp_value} without it",
    ),
    (
        lambda c: c.activation_func_clamp_value is not None and not 0.0 < c.activation_func_clamp_value < math.inf,
        "activation_func_clamp_value must be positive and finite, got {activation_func_clamp_value}",
    ),
]
"""Rows like those of ``config_checks.CONTRADICTIONS``."""
