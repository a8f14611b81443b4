"""Layer specs of models with linear attention, under Megatron-Core's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron.core.extensions import why_missing
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.attention_patterns import is_linear

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig


def get_transformer_block_with_experimental_attention_variant_spec(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> TransformerBlockSubmodules:
    """Return what ``get_gpt_decoder_block_spec`` does, of transformer-engine's layers where that can be used.

    Source: Megatron-Core's function of this name, which needs transformer-engine.
    """
    use_transformer_engine = torch.cuda.is_available() and why_missing("transformer_engine_layers") is None
    return get_gpt_decoder_block_spec(config, use_transformer_engine, vp_stage=vp_stage, pp_rank=pp_rank)


def is_gated_delta_net_variant(experimental_attention_variant: str | None) -> bool:
    """Return whether a value of ``experimental_attention_variant`` is gated delta net."""
    return experimental_attention_variant in ("gdn", "gated_delta_net")


def is_linear_attention_variant(experimental_attention_variant: str | None) -> bool:
    """Return whether a value of ``experimental_attention_variant`` is linear attention."""
    return is_gated_delta_net_variant(experimental_attention_variant)


def get_linear_attention_pattern(config: TransformerConfig) -> list[int]:
    """Return 1 for each layer with linear attention, and 0 for others."""
    return [int(is_linear(config, number)) for number in range(1, config.num_layers + 1)]
