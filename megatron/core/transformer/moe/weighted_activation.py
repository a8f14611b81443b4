"""SwiGLU of an expert times the rows' factors: one function in forward, one in backward; only the inputs are kept.

As separate operations the product is written and read in the factors' dtype, fp32, once in forward and three times in
backward.

Shapes: r rows, f width of an expert; the input holds [gate; up] in its last dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.jit import Fusible


def weighted_swiglu(x: torch.Tensor, probs: torch.Tensor, *, compiled: bool = True) -> torch.Tensor:
    """Compute silu(gate) * up * probs from [r, 2f] and [r]: [r, f] in the dtype of x, computed in fp32.

    Source: arXiv:2002.05202; Megatron-Core's weighted_bias_swiglu_impl, which includes the product.
    """
    weighted: torch.Tensor = _WeightedSwiGLU.apply(x, probs, compiled)  # type: ignore[no-untyped-call, unused-ignore]
    return weighted


@Fusible
def _weighted_swiglu(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up * probs.unsqueeze(1)).to(x.dtype)


@Fusible
def _weighted_swiglu_backward(
    grad: torch.Tensor, x: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.float().chunk(2, dim=-1)
    sigmoid, wide = torch.sigmoid(gate), grad.float()
    silu, weighted = gate * sigmoid, wide * probs.unsqueeze(1)
    grad_gate = weighted * up * sigmoid * (1 + gate * (1 - sigmoid))
    grad_x = torch.cat((grad_gate, weighted * silu), dim=-1).to(x.dtype)
    return grad_x, (wide * silu * up).sum(dim=-1).to(probs.dtype)


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, probs: torch.Tensor, compiled: bool) -> torch.Tensor:
        ctx.save_for_backward(x, probs)
        ctx.compiled = compiled
        weighted: torch.Tensor = _weighted_swiglu(compiled, x, probs)
        return weighted

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_weighted_swiglu_backward(ctx.compiled, grads[0], *ctx.saved_tensors), None
