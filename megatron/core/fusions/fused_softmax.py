"""Fused softmax of scaled and masked scores.

Shapes: b batch, n query heads, s sequence.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.jit import Fusible

MASKED = -10000.0  # Megatron-Core's value: a row that is masked everywhere becomes uniform, not NaN.


def scaled_masked_softmax(
    scores: torch.Tensor, mask: torch.Tensor, scale: float, *, compiled: bool = True
) -> torch.Tensor:
    """Compute softmax(scores * scale) of [b, n, s, s] in fp32, in the dtype of the scores; mask (bool): True is hidden.

    Backward needs the probabilities alone. Source: Megatron-Core's FusedScaleMaskSoftmax.
    """
    probs: torch.Tensor = _Softmax.apply(scores, mask, scale, compiled)  # type: ignore[no-untyped-call, unused-ignore]
    return probs


@Fusible
def _softmax(scores: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return (scores.float() * scale).masked_fill(mask, MASKED).softmax(dim=-1).to(scores.dtype)


@Fusible
def _softmax_backward(grad: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    wide = probs.float()
    product = grad.float() * wide
    grad_scores = (product - wide * product.sum(-1, keepdim=True)) * scale
    return grad_scores.masked_fill(mask, 0.0).to(probs.dtype)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, mask: torch.Tensor, scale: float, compiled: bool) -> torch.Tensor:
        probs: torch.Tensor = _softmax(compiled, scores, mask, scale)
        ctx.save_for_backward(probs, mask)
        ctx.scale, ctx.compiled = scale, compiled
        return probs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probs, mask = ctx.saved_tensors
        return _softmax_backward(ctx.compiled, grad_outputs[0], probs, mask, ctx.scale), None, None, None
