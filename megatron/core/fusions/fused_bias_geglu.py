"""Megatron-Core's names of GEGLU (in its tanh form) of a sum with a bias."""

from __future__ import annotations

import torch

from megatron.core.activations import quick_gelu
from megatron.core.fusions import bias_activation

__all__ = ["bias_geglu", "bias_geglu_impl", "geglu", "quick_gelu"]


def geglu(y: torch.Tensor) -> torch.Tensor:
    """Compute gelu(a) * b for [..., 2h], whose halves are a and b."""
    return bias_activation.bias_geglu(y)


def bias_geglu(bias: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute ``geglu(y + bias)``."""
    return bias_activation.bias_geglu(y, bias)


def bias_geglu_impl(input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute ``geglu(input + bias)``."""
    return bias_activation.bias_geglu(input, bias)
