"""Widths that FP8 GEMMs can multiply: a table of (condition, message), one test for each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from megatron.core.transformer.parallel_checks import Condition, has_dense_layers, sizes_in_effect

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

FP8_MULTIPLE = 16
"""Elements of one byte that FP8 GEMMs read at a time, along rows and columns."""

_Widths = Callable[["TransformerConfig", int], list[int]]
"""Widths on one rank, of a config and its tensor-parallel degree."""


def uneven_in_fp8(config: TransformerConfig, *widths: int) -> bool:
    """Return whether FP8 GEMMs are asked for and cannot multiply matrices of one of these widths."""
    return config.fp8 is not None and any(width % FP8_MULTIPLE for width in widths)


def _heads(config: TransformerConfig, ranks: int) -> list[int]:
    if config.multi_latent_attention:  # ``mla_checks`` has its widths
        return []
    sizes = sizes_in_effect(config)
    queries = config.num_attention_heads // ranks * sizes["of_head"]
    keys = sizes["of_groups"] // ranks * sizes["of_head"]
    return [queries, 2 * keys]  # a projection has both, and those of gates


def _ffn(config: TransformerConfig, ranks: int) -> list[int]:
    return [sizes_in_effect(config)["of_ffn"] // ranks] if has_dense_layers(config) else []


def _expert(config: TransformerConfig, ranks: int) -> list[int]:
    if config.num_moe_experts is None:
        return []
    sizes = sizes_in_effect(config)
    return [sizes["of_expert"] // sizes["of_expert_ranks"]]


def _shared_expert(config: TransformerConfig, ranks: int) -> list[int]:
    return [(config.moe_shared_expert_intermediate_size or 0) // ranks]


_TABLE: list[tuple[_Widths, str, str]] = [
    (lambda c, ranks: [c.hidden_size], "a width of hidden states", "hidden_size {hidden_size}"),
    (
        _heads,
        "widths of a rank's heads",
        "num_attention_heads {num_attention_heads}, num_query_groups {of_groups} and kv_channels {of_head} on"
        " tensor_model_parallel_size {tensor_model_parallel_size}",
    ),
    (
        _ffn,
        "a width of a rank's part of the MLP",
        "ffn_hidden_size {of_ffn} on tensor_model_parallel_size {tensor_model_parallel_size}",
    ),
    (
        _expert,
        "a width of a rank's part of an expert",
        "moe_ffn_hidden_size {of_expert} on expert_tensor_parallel_size {of_expert_ranks}",
    ),
    (
        _shared_expert,
        "a width of a rank's part of the shared expert",
        "moe_shared_expert_intermediate_size {moe_shared_expert_intermediate_size} on tensor_model_parallel_size"
        " {tensor_model_parallel_size}",
    ),
    (lambda c, ranks: [c.moe_latent_size or 0], "a width of experts' inputs", "moe_latent_size {moe_latent_size}"),
]


def _row(widths: _Widths, what: str, got: str) -> tuple[Condition, str]:
    return (
        lambda c: uneven_in_fp8(c, *widths(c, max(1, c.tensor_model_parallel_size))),
        f"fp8 must go with {what} of a multiple of {FP8_MULTIPLE}, got {got}; its GEMMs read {FP8_MULTIPLE} bytes at a time",
    )


FP8_WIDTHS: list[tuple[Condition, str]] = [_row(*entry) for entry in _TABLE]
"""Rows like those of ``config_checks.CONTRADICTIONS``."""
