"""What each layer of a hybrid model is, and the checks of its settings: a table of (condition, message), one test for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.transformer.fp8_widths import uneven_in_fp8
from megatron.core.transformer.parallel_checks import Condition

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

MAMBA, ATTENTION, MLP, EXPERTS = "M*-E"
LAYER_KINDS = (MAMBA, ATTENTION, MLP, EXPERTS)
_SIZES = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups")
MAMBA_SIZES = {"mamba_state_dim": 128, "mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_num_heads": None}
"""Fields without effect unless there is a pattern, with their defaults."""
KERNEL = 4
"""Tokens that Mamba's convolution sees."""


def layers_of_pattern(pattern: str | None) -> str:
    """Return the layers of a pattern without the borders of pipeline stages."""
    return (pattern or "").replace("|", "")


def kind_of_layer(config: TransformerConfig, layer_number: int) -> str | None:
    """Return one of ``LAYER_KINDS`` for a layer (counted from 1) of a hybrid model; None in others."""
    if config.hybrid_layer_pattern is None:
        return None
    return layers_of_pattern(config.hybrid_layer_pattern)[layer_number - 1]


def num_mamba_heads(config: TransformerConfig) -> int:
    """Return ``mamba_num_heads``, or those of twice the hidden size."""
    return config.mamba_num_heads or 2 * config.hidden_size // config.mamba_head_dim


def _has(config: TransformerConfig, kind: str = "") -> bool:
    return config.hybrid_layer_pattern is not None and kind in config.hybrid_layer_pattern


def _positive(field: str) -> tuple[Condition, str]:
    return (lambda c: _has(c, MAMBA) and getattr(c, field) < 1, f"{field} must be at least 1, got {{{field}}}")


def _projected_rows(config: TransformerConfig) -> int:
    """Rows of the first projection on a rank."""
    heads = num_mamba_heads(config)
    rows = 2 * heads * config.mamba_head_dim + 2 * config.mamba_num_groups * config.mamba_state_dim + heads
    return rows // config.tensor_model_parallel_size


def _not_with(field: str, default: object, why: str) -> tuple[Condition, str]:
    return (
        lambda c: _has(c) and getattr(c, field) != default,
        f"{field} must be {default!r} with hybrid_layer_pattern, got {{{field}!r}}: {why}",
    )


HYBRID_CONTRADICTIONS: list[tuple[Condition, str]] = [
    (
        lambda c: _has(c) and not set(layers_of_pattern(c.hybrid_layer_pattern)) <= set(LAYER_KINDS),
        "hybrid_layer_pattern must be of M (Mamba), * (attention), - (MLP) and E (experts), with | between pipeline stages, got"
        " {hybrid_layer_pattern!r}; other layers, and patterns of multi-token prediction behind /, are not served",
    ),
    (
        lambda c: _has(c) and len(layers_of_pattern(c.hybrid_layer_pattern)) != c.num_layers,
        "num_layers must be the number of layers of hybrid_layer_pattern, got {num_layers} and {hybrid_layer_pattern!r}",
    ),
    (
        lambda c: _has(c) and _has(c, EXPERTS) != (c.num_moe_experts is not None),
        "num_moe_experts must be given where hybrid_layer_pattern has E, and there alone, got {num_moe_experts} and"
        " {hybrid_layer_pattern!r}",
    ),
    *map(_positive, _SIZES),
    (
        lambda c: _has(c, MAMBA) and c.mamba_num_heads is not None and c.mamba_num_heads < 1,
        "mamba_num_heads must be at least 1 (or None for 2 * hidden_size / mamba_head_dim), got {mamba_num_heads}",
    ),
    (
        lambda c: _has(c, MAMBA) and c.mamba_num_heads is None and 2 * c.hidden_size % c.mamba_head_dim != 0,
        "2 * hidden_size must be a multiple of mamba_head_dim, got hidden_size {hidden_size} and {mamba_head_dim}; change one or"
        " set mamba_num_heads",
    ),
    (
        lambda c: _has(c, MAMBA) and num_mamba_heads(c) % c.mamba_num_groups != 0,
        "the heads of Mamba must be a multiple of mamba_num_groups, got mamba_num_heads {mamba_num_heads} (None: 2 *"
        " hidden_size / mamba_head_dim) and {mamba_num_groups}",
    ),
    (
        lambda c: _has(c, MAMBA) and c.mamba_num_groups % c.tensor_model_parallel_size != 0,
        "mamba_num_groups must be a multiple of tensor_model_parallel_size, got {mamba_num_groups} and"
        " {tensor_model_parallel_size}; groups are divided over ranks",
    ),
    (
        lambda c: _has(c, MAMBA) and uneven_in_fp8(c, _projected_rows(c)),
        "fp8 must go with Mamba layers whose projection has a multiple of 16 rows on each tensor-parallel rank, got state"
        " {mamba_state_dim}, groups {mamba_num_groups}, heads {mamba_num_heads} of {mamba_head_dim}",
    ),
    _not_with("context_parallel_size", 1, "states go through the whole sequence; use tensor and sequence parallelism"),
    _not_with("mtp_num_layers", None, "its layers are those of other models"),
    _not_with("moe_layer_freq", 1, "the pattern says which layers have experts"),
    _not_with("sandwich_layernorm", False, "layers have one norm"),
    _not_with("experimental_attention_variant", None, "attention layers attend to all tokens"),
    _not_with("multi_latent_attention", False, "attention layers have plain heads"),
]
"""Rows like those of ``config_checks.CONTRADICTIONS``."""
