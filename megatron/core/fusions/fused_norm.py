"""Fused RMSNorm and LayerNorm, which include the residual sum before the norm and the sum of its gradients.

Shapes: s sequence, b batch, h the normalised size.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.jit import Fusible


def fused_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    eps: float,
    centered: bool,
    compiled: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute x + residual and its norm.

    Backward adds the gradients of both outputs within the norm's own kernel. Statistics are in fp32.

    Args:
        x: [..., h].
        residual: [..., h] added to x first, or None.
        weight: [h].
        bias: [h] or None.
        centered: subtract the mean first (LayerNorm).

    Returns:
        (norm in the dtype of the weight, x + residual or x), both [..., h].
    """
    outputs: tuple[torch.Tensor, torch.Tensor]
    outputs = _Norm.apply(x, residual, weight, bias, eps, centered, compiled)  # type: ignore[no-untyped-call, unused-ignore]
    return outputs


@Fusible
def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Compute the norm, the sum (None where nothing is added), 1 / deviation [..., 1] and mean [..., 1] in fp32."""
    total = None if residual is None else residual + x
    wide = (x if total is None else total).float()
    mean = wide.mean(-1, keepdim=True) if centered else None
    if mean is not None:
        wide = wide - mean
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * inverse * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    return normed.to(weight.dtype), total, inverse, mean


@Fusible
def _norm_backward(
    grad: torch.Tensor,
    grad_total: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor,
    inverse: torch.Tensor,
    mean: torch.Tensor | None,
    has_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute the gradients of the sum, in its dtype, of the weight, and of the bias where there is one."""
    normal = total.float() * inverse if mean is None else (total.float() - mean) * inverse
    wide = grad.float()
    scaled = wide * weight.float()
    grad_input = scaled - normal * (scaled * normal).mean(-1, keepdim=True)
    if mean is not None:
        grad_input = grad_input - scaled.mean(-1, keepdim=True)
    grad_input = grad_input * inverse
    if grad_total is not None:
        grad_input = grad_input + grad_total.float()
    grad_weight = (wide * normal).flatten(0, -2).sum(0).to(weight.dtype)
    grad_bias = wide.flatten(0, -2).sum(0).to(weight.dtype) if has_bias else None
    return grad_input.to(total.dtype), grad_weight, grad_bias


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        centered: bool,
        compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total, inverse, mean = _norm(compiled, x, residual, weight, bias, eps, centered)
        if total is None:
            total = x
        ctx.save_for_backward(total, weight, inverse, mean)
        ctx.set_materialize_grads(False)
        ctx.has_bias, ctx.compiled = bias is not None, compiled
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        return normed, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (grad, grad_total), (total, weight, inverse, mean) = grad_outputs, ctx.saved_tensors
        grad_weight = grad_bias = None
        if grad is None:
            grad_sum = grad_total
        else:
            grad_sum, grad_weight, grad_bias = _norm_backward(
                ctx.compiled, grad, grad_total, total, weight, inverse, mean, ctx.has_bias
            )
        of_x, of_residual = ctx.dtypes
        grad_residual = None if of_residual is None or grad_sum is None else grad_sum.to(of_residual)
        return None if grad_sum is None else grad_sum.to(of_x), grad_residual, grad_weight, grad_bias, None, None, None
