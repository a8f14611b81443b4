"""Megatron-Core's names of GELU (in its tanh form) of a sum with a bias."""

from __future__ import annotations

import torch

from megatron.core.fusions import bias_activation


def bias_gelu_impl(input: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Compute gelu(input + bias) for [..., h]."""
    return bias_activation.bias_gelu(input, bias)


def bias_gelu(bias: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute gelu(y + bias) for [..., h]."""
    return bias_activation.bias_gelu(y, bias)
