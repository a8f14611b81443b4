"""Megatron-Core's import path of models of Mamba, attention and expert layers."""

from megatron.core.elsewhere import elsewhere

HybridModel = elsewhere(
    __name__,
    "HybridModel",
    "build a GPTModel with hybrid_layer_pattern in its TransformerConfig; it mixes the same layers",
)

__all__ = ["HybridModel"]
