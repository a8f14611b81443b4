"""Bias-dropout-add, the end of a sublayer: residual + dropout(x + bias), in Megatron-Core's order of operations.

Shapes: s sequence, b batch, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.jit import Fusible

BiasDropoutAdd = Callable[[tuple[torch.Tensor, torch.Tensor | None], torch.Tensor, float], torch.Tensor]


def get_bias_dropout_add(training: bool, fused: bool, *, compiled: bool = True) -> BiasDropoutAdd:
    """Return the function that adds (x [s, b, h], bias [h] or None) to a residual [s, b, h] after dropout.

    Args:
        fused: return the fused function, which draws other random numbers than PyTorch's dropout.
        compiled: whether the fused function may be compiled.
    """
    if fused:
        return partial(_fused_bias_dropout_add, training, compiled)
    return _bias_dropout_add_train if training else _bias_dropout_add_inference


def bias_dropout_add_fused_train(
    x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
) -> torch.Tensor:
    """Add x [s, b, h] and its bias to a residual [s, b, h] after dropout, as one function; see ``get_bias_dropout_add``."""
    return _fused_bias_dropout_add(True, True, x_with_bias, residual, prob)


def _bias_dropout_add_train(
    x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
) -> torch.Tensor:
    return _bias_dropout_add(x_with_bias, residual, prob, True)


def _bias_dropout_add_inference(
    x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
) -> torch.Tensor:
    return _bias_dropout_add(x_with_bias, residual, prob, False)


def _bias_dropout_add(
    x_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float, training: bool
) -> torch.Tensor:
    x, bias = x_with_bias
    if bias is not None:
        x = x + bias
    # An fp32 residual (config.fp32_residual_connection) stays fp32: the sum takes the wider dtype.
    return residual + F.dropout(x, p=prob, training=training)


def _fused_bias_dropout_add(
    training: bool,
    compiled: bool,
    x_with_bias: tuple[torch.Tensor, torch.Tensor | None],
    residual: torch.Tensor,
    prob: float,
) -> torch.Tensor:
    x, bias = x_with_bias
    if not training:
        prob = 0.0
    if bias is None and prob == 0.0:
        return residual + x  # one kernel already
    total: torch.Tensor = _BiasDropoutAdd.apply(x, bias, residual, prob, compiled)  # type: ignore[no-untyped-call, unused-ignore]
    return total


@Fusible
def _add(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return (residual.float() + (x.float() + bias.float())).to(torch.promote_types(x.dtype, residual.dtype))


@Fusible
def _drop_and_add(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, prob: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the sum, and a mask of the elements that were kept (bool)."""
    kept = torch.rand_like(x, dtype=torch.float32) >= prob
    wide = x.float() if bias is None else x.float() + bias.float()
    total = residual.float() + torch.where(kept, wide / (1.0 - prob), 0.0)
    return total.to(torch.promote_types(x.dtype, residual.dtype)), kept


@Fusible
def _drop_backward(grad: torch.Tensor, kept: torch.Tensor, prob: float, dtype: torch.dtype) -> torch.Tensor:
    return torch.where(kept, grad.float() / (1.0 - prob), 0.0).to(dtype)


class _BiasDropoutAdd(torch.autograd.Function):
    """Fused bias-dropout-add; it keeps one byte for each element with dropout, and nothing without."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, prob: float, compiled: bool
    ) -> torch.Tensor:
        ctx.prob, ctx.compiled, ctx.dtypes = prob, compiled, (x.dtype, residual.dtype)
        total: torch.Tensor
        if prob > 0.0:
            total, kept = _drop_and_add(compiled, x, bias, residual, prob)
            ctx.save_for_backward(kept)
        else:
            total = _add(compiled, x, bias, residual)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (of_x, of_residual) = grad_outputs, ctx.dtypes
        if ctx.prob > 0.0:
            grad_x = _drop_backward(ctx.compiled, grad, ctx.saved_tensors[0], ctx.prob, of_x)
        else:
            grad_x = grad.to(of_x)
        grad_bias = grad_x.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return grad_x, grad_bias, grad.to(of_residual), None, None
