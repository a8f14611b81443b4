"""The layer specs of hybrid models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def hybrid_stack_spec(config: TransformerConfig, use_transformer_engine: bool = False) -> TransformerBlockSubmodules:
    """Return the specs of the layers of ``hybrid_layer_pattern``, for ``HybridModel``, which also takes this function itself.

    Raises:
        ImportError: transformer-engine cannot be used; gives the reason.
    """
    return get_gpt_decoder_block_spec(config, use_transformer_engine)
