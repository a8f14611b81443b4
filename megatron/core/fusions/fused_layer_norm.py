"""Megatron-Core's name of the LayerNorm whose kernels are fused by ``config.persist_layer_norm``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.transformer.torch_norm import LayerNorm

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class FusedLayerNorm(LayerNorm):
    """A LayerNorm with the configuration's settings.

    Args:
        persist_layer_norm, zero_centered_gamma, normalization: ignored, as in Megatron-Core: the configuration says them.

    Raises:
        ValueError: the configuration asks for another norm.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = True,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> None:
        if config.normalization != "LayerNorm":
            raise ValueError(f"FusedLayerNorm needs normalization='LayerNorm', got {config.normalization!r}")
        super().__init__(config, hidden_size, eps)
