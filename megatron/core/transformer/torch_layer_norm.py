"""Megatron-Core's older name of ``WrappedTorchNorm``."""

from megatron.core.transformer.torch_norm import WrappedTorchNorm as WrappedTorchLayerNorm

__all__ = ["WrappedTorchLayerNorm"]
