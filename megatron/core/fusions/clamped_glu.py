"""Gated activations of gpt-oss and their like, fused with bias and the rows' factors; only the inputs are kept for backward.

    activated = gate * sigmoid(slope * gate) * (up + offset), where the gate is clamped from above, and up on both sides

A slope of 1 is SiLU, one of 1.702 the quick form of GELU.

Shapes: r rows, f width of the MLP; an input holds [gate; up] in its last dim.
Source: gpt-oss; arXiv:2002.05202 for gates, arXiv:1606.08415 section 2 for the slope.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.jit import Fusible


def clamped_glu(
    x: Tensor,
    bias: Tensor | None = None,
    probs: Tensor | None = None,
    *,
    slope: float,
    limit: float | None = None,
    offset: float = 0.0,
    compiled: bool = True,
) -> Tensor:
    """Activate [..., 2f] to [..., f] in the dtype of x, computed in fp32.

    Args:
        bias: [2f], added first.
        probs: [r], a factor on each row of [r, f].
        limit: gates are at most this, and ups between this and its negative; None: they are not clamped.
    """
    activated: Tensor = _ClampedGLU.apply(x, bias, probs, (slope, limit, offset), compiled)  # type: ignore[no-untyped-call, unused-ignore]
    return activated


@Fusible
def _forward(
    x: Tensor, bias: Tensor | None, probs: Tensor | None, slope: float, limit: float | None, offset: float
) -> Tensor:
    gate, up = _clamped(x, bias, limit)
    activated = gate * torch.sigmoid(slope * gate) * (up + offset)
    return (activated if probs is None else activated * probs.unsqueeze(1)).to(x.dtype)


@Fusible
def _backward(
    grad: Tensor,
    x: Tensor,
    bias: Tensor | None,
    probs: Tensor | None,
    slope: float,
    limit: float | None,
    offset: float,
) -> tuple[Tensor, Tensor | None]:
    gate, up = _clamped(x, bias, limit)
    sigmoid, shifted, wide = torch.sigmoid(slope * gate), up + offset, grad.float()
    glu, grad_probs = gate * sigmoid, None
    if probs is not None:
        grad_probs = (wide * glu * shifted).sum(dim=-1).to(probs.dtype)
        wide = wide * probs.unsqueeze(1)
    grad_gate = wide * shifted * sigmoid * (1 + slope * gate * (1 - sigmoid))
    grad_up = wide * glu
    if limit is not None:
        raw_gate, raw_up = _clamped(x, bias, None)
        grad_gate = grad_gate.masked_fill(raw_gate > limit, 0.0)
        grad_up = grad_up.masked_fill(raw_up.abs() > limit, 0.0)
    return torch.cat((grad_gate, grad_up), dim=-1).to(x.dtype), grad_probs


def _clamped(x: Tensor, bias: Tensor | None, limit: float | None) -> tuple[Tensor, Tensor]:
    gate, up = (x.float() if bias is None else x.float() + bias.float()).chunk(2, dim=-1)
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))


class _ClampedGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, probs: Tensor | None, settings: tuple[Any, ...], compiled: bool
    ) -> Tensor:
        ctx.save_for_backward(x, bias, probs)
        ctx.settings, ctx.compiled = settings, compiled
        activated: Tensor = _forward(compiled, x, bias, probs, *settings)
        return activated

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, probs = ctx.saved_tensors
        grad_x, grad_probs = _backward(ctx.compiled, grads[0], x, bias, probs, *ctx.settings)
        grad_bias = grad_x.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return grad_x, grad_bias, grad_probs, None, None
