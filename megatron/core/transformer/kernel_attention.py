"""Causal attention by one call of a kernel that returns its log-sum-exp: within a window, with sinks, or both.

Shapes: b batch, n query heads, g key and value heads, q queries, k keys, d head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.attention_kernels import Attended, Block, BlockKernel
from megatron.core.transformer.attention_sinks import gradient_of_sinks, with_sinks


def kernel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    *,
    kernel: BlockKernel,
    scale: float,
    window: int | None,
) -> Tensor:
    """Compute causal attention [b, n, q, d] of query [b, n, q, d] over [b, g, k, d]; the queries' own keys are the last q.

    Args:
        sinks: [n], or None.
        window: positions before its own that a query sees; None: all.
    """
    context: Tensor = _KernelAttention.apply(query, key, value, sinks, kernel, scale, window)  # type: ignore[no-untyped-call, unused-ignore]
    return context


class _KernelAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        kernel: BlockKernel,
        scale: float,
        window: int | None,
    ) -> Tensor:
        rows = kernel.forward(Block(query, key, value, scale, True, window))
        if sinks is not None:
            rows = with_sinks(rows, sinks)
        ctx.save_for_backward(query, key, value, sinks, rows.output, rows.logsumexp, *rows.state)
        ctx.kernel, ctx.scale, ctx.window = kernel, scale, window
        return rows.output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, output, logsumexp, *state = ctx.saved_tensors
        rows, grad = Attended(output, logsumexp, state), grad_outputs[0]
        grads = ctx.kernel.backward(Block(query, key, value, ctx.scale, True, ctx.window), rows, grad)
        heads = [x.to(query.dtype) for x in grads]
        return *heads, None if sinks is None else gradient_of_sinks(rows, grad, sinks), None, None, None
