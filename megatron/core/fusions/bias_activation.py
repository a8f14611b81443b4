"""Activations of the MLP as single functions that keep only their input for backward.

Shapes: s sequence, b batch, f MLP width; a gated input holds [gate; up] in its last dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """[..., 2f] -> [..., f]: silu(gate) * up. Source: arXiv:2002.05202."""
    activated: torch.Tensor = _SwiGLU.apply(x)  # type: ignore[no-untyped-call, unused-ignore]
    return activated


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        (grad,), (x,) = grad_outputs, ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return grad_x


def bias_gelu(bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """gelu(x + bias) in the tanh form, which is what Megatron-Core's fused function computes."""
    return F.gelu(x + bias, approximate="tanh")


def geglu(x: torch.Tensor) -> torch.Tensor:
    """[..., 2f] -> [..., f]: gelu(gate) * up in the tanh form, as Megatron-Core's fused function."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def bias_geglu(bias: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``geglu`` of x + bias."""
    return geglu(x + bias)
