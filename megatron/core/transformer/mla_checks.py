"""Checks of an MLATransformerConfig: a table of (condition, message), one test for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.core.transformer.fp8_widths import FP8_MULTIPLE, uneven_in_fp8

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")

MLACondition = Callable[["MLATransformerConfig"], bool]


def _at_least_one(field: str) -> tuple[MLACondition, str]:
    return (
        lambda c: getattr(c, field) is not None and getattr(c, field) < 1,
        f"{field} must be at least 1, got {{{field}}}",
    )


def _of_heads(config: MLATransformerConfig) -> list[int]:
    """Widths of all heads of a rank, before and behind the projections."""
    heads = config.num_attention_heads // max(1, config.tensor_model_parallel_size)
    query, value = config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    return [heads * query, heads * (config.qk_head_dim + value), heads * value]


MLA_CONTRADICTIONS: list[tuple[MLACondition, str]] = [
    *map(_at_least_one, (*_SIZES, "rotary_base")),
    (
        lambda c: c.qk_pos_emb_head_dim % 2 != 0,
        "qk_pos_emb_head_dim must be even, since its channels turn in pairs, got {qk_pos_emb_head_dim}",
    ),
    (lambda c: c.rope_type not in ("rope", "yarn"), "rope_type must be 'rope' or 'yarn', got {rope_type!r}"),
    (
        lambda c: c.rope_type == "yarn" and c.rotary_percent != 1.0,
        "rotary_percent must be 1 with rope_type='yarn', got {rotary_percent}; use rope_type='rope'",
    ),
    (
        lambda c: c.rotary_scaling_factor <= 0.0 or c.original_max_position_embeddings < 1,
        "rotary_scaling_factor and original_max_position_embeddings must be positive, got {rotary_scaling_factor} and"
        " {original_max_position_embeddings}",
    ),
    (
        lambda c: not 0.0 < c.beta_slow <= c.beta_fast,
        "beta_slow must be positive and at most beta_fast, got {beta_slow} and {beta_fast}",
    ),
    (
        lambda c: c.rotary_interleaved,
        "rotary_interleaved must be False with multi_latent_attention, got True: neighbouring channels always turn together;"
        " leave it out",
    ),
    (
        lambda c: c.num_query_groups not in (None, c.num_attention_heads),
        "num_query_groups must be None with multi_latent_attention, got {num_query_groups}: each head has its own keys and"
        " values; leave it out",
    ),
    (
        lambda c: c.add_qkv_bias,
        "add_qkv_bias must be False with multi_latent_attention, got True: its projections have no bias; leave it out",
    ),
    (
        lambda c: c.attention_output_gate or c.qk_l2_norm or c.no_rope_freq is not None,
        "attention_output_gate, qk_l2_norm and no_rope_freq must be off with multi_latent_attention, got"
        " {attention_output_gate}, {qk_l2_norm} and {no_rope_freq}: they are of other attentions; leave them out",
    ),
    (
        lambda c: c.softmax_scale is not None and not c.use_mup,
        "softmax_scale must be None with multi_latent_attention, got {softmax_scale}: it follows from qk_head_dim,"
        " qk_pos_emb_head_dim and mscale_all_dim; leave it out",
    ),
    (
        lambda c: c.window_rotary_base is not None,
        "window_rotary_base must be None with multi_latent_attention, got {window_rotary_base}: all layers turn alike; leave it out",
    ),
    (
        lambda c: c.use_mup,
        "use_mup must be False with multi_latent_attention, got True: its softmax_scale follows from qk_head_dim,"
        " qk_pos_emb_head_dim and mscale_all_dim; leave it out",
    ),
    (
        lambda c: uneven_in_fp8(c, c.q_lora_rank or 0, c.kv_lora_rank, c.kv_lora_rank + c.qk_pos_emb_head_dim),
        f"fp8 must go with latent vectors of a multiple of {FP8_MULTIPLE}, got q_lora_rank {{q_lora_rank}}, kv_lora_rank"
        f" {{kv_lora_rank}} and qk_pos_emb_head_dim {{qk_pos_emb_head_dim}}; its GEMMs read {FP8_MULTIPLE} bytes at a time",
    ),
    (
        lambda c: uneven_in_fp8(c, *_of_heads(c)),
        f"fp8 must go with widths of a rank's heads of a multiple of {FP8_MULTIPLE}, got num_attention_heads"
        " {num_attention_heads} of qk_head_dim {qk_head_dim}, qk_pos_emb_head_dim {qk_pos_emb_head_dim} and v_head_dim"
        " {v_head_dim} on tensor_model_parallel_size {tensor_model_parallel_size}"
        f"; its GEMMs read {FP8_MULTIPLE} bytes at a time",
    ),
]
"""Rows like those of ``config_checks.CONTRADICTIONS``."""
