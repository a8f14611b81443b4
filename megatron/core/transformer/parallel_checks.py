"""Checks of a TransformerConfig's parallel degrees and expert layout: a table of (condition, message), one test a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.core.transformer.context_parallel import comm_types

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

Condition = Callable[["TransformerConfig"], bool]

_DEGREES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def _positive(field: str) -> tuple[Condition, str]:
    return (
        lambda c: getattr(c, field) is not None and getattr(c, field) < 1,
        f"{field} must be at least 1, got {{{field}}}",
    )


def _uneven(size: int | None, parts: int) -> bool:
    return size is not None and size % parts != 0


def _has_experts(config: TransformerConfig) -> bool:
    return config.num_moe_experts is not None


def _expert_tensor_size(config: TransformerConfig) -> int:
    return config.expert_tensor_parallel_size or config.tensor_model_parallel_size


def sizes_in_effect(config: TransformerConfig) -> dict[str, int]:
    """Return sizes that have defaults made of others, for messages."""
    ffn = config.ffn_hidden_size or 4 * config.hidden_size
    heads = max(1, config.num_attention_heads)
    return {
        "of_head": config.kv_channels or max(1, config.hidden_size // heads),
        "of_ffn": ffn,
        "of_groups": config.num_query_groups or config.num_attention_heads,
        "of_expert": config.moe_ffn_hidden_size or ffn,
        "of_expert_ranks": _expert_tensor_size(config),
    }


def has_dense_layers(config: TransformerConfig) -> bool:
    """Return whether some layers have an MLP instead of experts."""
    freq = config.moe_layer_freq
    return not _has_experts(config) or (freq > 1 if isinstance(freq, int) else 0 in freq)


PARALLEL_CONTRADICTIONS: list[tuple[Condition, str]] = [
    *map(_positive, _DEGREES),
    (
        lambda c: c.num_attention_heads % c.tensor_model_parallel_size != 0,
        "num_attention_heads must be a multiple of tensor_model_parallel_size, got {num_attention_heads} and"
        " {tensor_model_parallel_size}",
    ),
    (
        lambda c: _uneven(c.num_query_groups, c.tensor_model_parallel_size),
        "num_query_groups must be a multiple of tensor_model_parallel_size, got {num_query_groups} and"
        " {tensor_model_parallel_size}; key and value heads are not replicated",
    ),
    (
        lambda c: has_dense_layers(c) and _uneven(c.ffn_hidden_size or 4 * c.hidden_size, c.tensor_model_parallel_size),
        "ffn_hidden_size, by default 4 * hidden_size, must be a multiple of tensor_model_parallel_size, got {of_ffn} and"
        " {tensor_model_parallel_size}",
    ),
    (
        lambda c: (
            "a2a" in comm_types(c.cp_comm_type)
            and _uneven(
                c.num_query_groups or c.num_attention_heads, c.tensor_model_parallel_size * c.context_parallel_size
            )
        ),
        "cp_comm_type='a2a' must go with num_query_groups, by default num_attention_heads, that tensor_model_parallel_size *"
        " context_parallel_size divides, got {of_groups} and {tensor_model_parallel_size} * {context_parallel_size}; use 'p2p' or"
        " 'all_gather'",
    ),
    (
        lambda c: not _has_experts(c) and c.expert_model_parallel_size != 1,
        "expert_model_parallel_size must be 1 without num_moe_experts, got {expert_model_parallel_size}; set num_moe_experts",
    ),
    (
        lambda c: _uneven(c.num_moe_experts, c.expert_model_parallel_size),
        "num_moe_experts must be a multiple of expert_model_parallel_size, got {num_moe_experts} and"
        " {expert_model_parallel_size}",
    ),
    (
        lambda c: (
            _has_experts(c)
            and _uneven(c.moe_ffn_hidden_size or c.ffn_hidden_size or 4 * c.hidden_size, _expert_tensor_size(c))
        ),
        "moe_ffn_hidden_size, by default ffn_hidden_size, must be a multiple of expert_tensor_parallel_size, by default"
        " tensor_model_parallel_size, got {of_expert} and {of_expert_ranks}",
    ),
    (
        lambda c: _uneven(c.moe_shared_expert_intermediate_size, c.tensor_model_parallel_size),
        "moe_shared_expert_intermediate_size must be a multiple of tensor_model_parallel_size, got"
        " {moe_shared_expert_intermediate_size} and {tensor_model_parallel_size}",
    ),
    (
        lambda c: _has_experts(c) and c.tensor_model_parallel_size > 1 and not c.sequence_parallel,
        "sequence_parallel must be on with experts and tensor_model_parallel_size > 1, got it off with"
        " {tensor_model_parallel_size}; each rank then routes its own part of the tokens",
    ),
    (
        lambda c: not isinstance(c.moe_layer_freq, int) and not set(c.moe_layer_freq) <= {0, 1},
        "moe_layer_freq must be a number, or hold 1 for layers with experts and 0 for others, got {moe_layer_freq}",
    ),
]
"""Rows like those of ``config_checks.CONTRADICTIONS``."""
