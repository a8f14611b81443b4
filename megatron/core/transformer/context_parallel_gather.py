"""Attention over keys and values gathered from all context-parallel ranks.

The early chunks of lower ranks are one block that all queries see. Both chunks of higher ranks are one block that the late
queries see (``context_parallel_ring.py`` explains why). The order of keys within a block does not matter, so they stay as
gathered. Backward gathers them again instead of keeping them.

Shapes: l tokens of this rank, c = l / 2, b batch, n query heads, g key and value heads, d head width.
Source: Llama 3 (arXiv:2407.21783) section 3.3.2 for the all-gather.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.tensor_parallel.collectives import begin_gather, begin_sum_and_scatter
from megatron.core.transformer.attention_kernels import Attended, BlockKernel
from megatron.core.transformer.block_attention import BlockAttention, BlockGradients


def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None = None,
    *,
    cp_group: ProcessGroup,
    kernel: BlockKernel,
    scale: float,
) -> Tensor:
    """Compute causal attention [l, b, n, d] of query [l, b, n, d] over the key and value [l, b, g, d] of all ranks.

    Args:
        sinks: [n] (see ``attention_sinks.py``), or None.

    Ranks: all of ``cp_group``, in forward and backward; on CUDA it does not block the host.
    """
    context: Tensor = _GatheredAttention.apply(query, key, value, sinks, cp_group, kernel, scale)  # type: ignore[no-untyped-call, unused-ignore]
    return context


class _GatheredAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        cp_group: ProcessGroup,
        kernel: BlockKernel,
        scale: float,
    ) -> Tensor:
        key, value, query = key.contiguous(), value.contiguous(), _heads_first(query)
        gathers = [begin_gather(x, cp_group) for x in (key, value)]
        # The rank's own block is computed while the others are gathered.
        attention = BlockAttention(kernel, query, _heads_first(key), _heads_first(value), scale=scale)
        keys, values = (gather.wait() for gather in gathers)
        size, rank = cp_group.size(), cp_group.rank()
        if rank > 0:
            attention.add(_heads_first(_before(keys, size, rank)), _heads_first(_before(values, size, rank)))
        if rank < size - 1:
            attention.add(
                _heads_first(_behind(keys, size, rank)), _heads_first(_behind(values, size, rank)), late_only=True
            )
        output, logsumexp, state = attention.result(sinks)
        ctx.save_for_backward(query, key, value, output, logsumexp, sinks, *state)
        ctx.cp_group, ctx.kernel, ctx.scale = cp_group, kernel, scale
        return rearrange(output, "b h s d -> s b h d")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logsumexp, sinks, *state = ctx.saved_tensors
        grad, size, rank = _heads_first(grad_outputs[0]), ctx.cp_group.size(), ctx.cp_group.rank()
        gathers = [begin_gather(x, ctx.cp_group) for x in (key, value)]
        gradients = BlockGradients(ctx.kernel, query, Attended(output, logsumexp, state), grad, scale=ctx.scale)
        own = gradients.add(_heads_first(key), _heads_first(value), causal=True)
        gathered = [gather.wait() for gather in gathers]
        # Sums over ranks are in fp32 and rounded once, at the end.
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in gathered]
        parts: list[tuple[list[Tensor], tuple[Tensor, Tensor]]] = [
            ([torch.unflatten(x, 0, (size, -1))[rank] for x in sums], own)
        ]
        if rank > 0:
            keys, values = (_heads_first(_before(x, size, rank)) for x in gathered)
            parts.append(([_early_chunks(x, size, rank) for x in sums], gradients.add(keys, values)))
        if rank < size - 1:
            keys, values = (_heads_first(_behind(x, size, rank)) for x in gathered)
            parts.append(([_behind(x, size, rank) for x in sums], gradients.add(keys, values, late_only=True)))
        for into, part in parts:
            for total, x in zip(into, part, strict=True):
                total.copy_(rearrange(x, "b h s d -> s b h d").view(total.shape))
        scatters = [begin_sum_and_scatter(x, ctx.cp_group) for x in sums]
        grad_key, grad_value = (scatter.wait().to(key.dtype) for scatter in scatters)
        grad_query = rearrange(gradients.grad_query, "b h s d -> s b h d").to(query.dtype)
        return grad_query, grad_key, grad_value, gradients.of_sinks(sinks), None, None, None


def _early_chunks(gathered: Tensor, size: int, rank: int) -> Tensor:
    """Return the early chunks of lower ranks: [ranks * l, b, g, d] -> [rank, c, b, g, d], a view."""
    return torch.unflatten(gathered, 0, (size, 2, -1))[:rank, 0]


def _before(gathered: Tensor, size: int, rank: int) -> Tensor:
    """Return the early chunks of lower ranks: [ranks * l, b, g, d] -> [rank * c, b, g, d]."""
    return _early_chunks(gathered, size, rank).flatten(0, 1)


def _behind(gathered: Tensor, size: int, rank: int) -> Tensor:
    """Return all chunks of higher ranks: [ranks * l, b, g, d] -> [(ranks - 1 - rank) * l, b, g, d], a view."""
    return gathered[(rank + 1) * (gathered.shape[0] // size) :]


def _heads_first(x: Tensor) -> Tensor:
    """Permute [k, b, g, d] to [b, g, k, d], a view."""
    return rearrange(x, "k b g d -> b g k d")
