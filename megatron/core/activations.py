"""Activation functions by the names that a TransformerConfig may give."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Compute relu(x)^2, elementwise. Source: Primer (arXiv:2109.08668)."""
    return torch.square(F.relu(x))


QUICK_SLOPE = 1.702


def quick_gelu(y: torch.Tensor) -> torch.Tensor:
    """Compute y * sigmoid(1.702 y), elementwise. Source: arXiv:1606.08415 section 2."""
    return y * torch.sigmoid(QUICK_SLOPE * y)


def fast_gelu(x: torch.Tensor) -> torch.Tensor:
    """Compute GELU in its tanh form, elementwise. Source: arXiv:1606.08415 section 2."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
    "fast_gelu": fast_gelu,
}
