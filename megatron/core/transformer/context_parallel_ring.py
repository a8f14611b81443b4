"""Ring attention: each rank attends to a block of keys and values while the next block arrives from its neighbour.

Four ranks hold chunks (0 7) (1 6) (2 5) (3 4). In step i, rank r has the keys of rank j = r - i:

    j = r   its own keys: causal
    j < r   j's early chunk is before both of r's chunks, j's late chunk after both: all queries, early keys
    j > r   both of j's chunks are between r's two: late queries, all keys

So after step 0 each rank computes half a square in every step. In backward the gradients of keys and values are passed
round one step behind them; each rank adds its part, and the last step returns them to the rank of the keys.

Shapes: l tokens of this rank, c = l / 2, b batch, n query heads, g key and value heads, d head width; that of values may be another.
Source: Ring Attention (arXiv:2310.01889), with Megatron-LM's balanced order of chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from megatron.core.transformer.attention_kernels import Attended, BlockKernel
from megatron.core.transformer.block_attention import BlockAttention, BlockGradients


def ring_attention(
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
    context: Tensor = _RingAttention.apply(query, key, value, sinks, cp_group, kernel, scale)  # type: ignore[no-untyped-call, unused-ignore]
    return context


class _RingAttention(torch.autograd.Function):
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
        pair = _Pair(key.shape, value.shape)
        own = pair.join(key, value)
        query = rearrange(query, "s b h d -> b h s d")
        size, rank = cp_group.size(), cp_group.rank()
        held, attention = own, None
        for step in range(size):
            # Started before the block's kernels: the next block arrives while this one is computed.
            arriving = _Hop(held, cp_group) if step < size - 1 else None
            keys, values = pair.heads_first(held)
            if attention is None:
                attention = BlockAttention(kernel, query, keys, values, scale=scale)
            elif step <= rank:
                attention.add(_early(keys), _early(values))
            else:
                attention.add(keys, values, late_only=True)
            if arriving is not None:
                held = arriving.wait()
        assert attention is not None
        output, logsumexp, state = attention.result(sinks)
        ctx.save_for_backward(query, own, output, logsumexp, sinks, *state)
        ctx.cp_group, ctx.kernel, ctx.scale, ctx.pair = cp_group, kernel, scale, pair
        return rearrange(output, "b h s d -> s b h d")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, own, output, logsumexp, sinks, *state = ctx.saved_tensors
        grad, size, rank = rearrange(grad_outputs[0], "s b h d -> b h s d"), ctx.cp_group.size(), ctx.cp_group.rank()
        gradients = BlockGradients(ctx.kernel, query, Attended(output, logsumexp, state), grad, scale=ctx.scale)
        held, following = own, None
        for step in range(size):
            arriving = _Hop(held, ctx.cp_group) if step < size - 1 else None
            part = _block_gradients(gradients, ctx.pair, held, own=step == 0, earlier=step <= rank)
            if following is not None:
                part += following.wait()
            # Waited for after the next block's kernels; the last one brings the gradients to the keys' own rank.
            following = _Hop(part, ctx.cp_group)
            if arriving is not None:
                held = arriving.wait()
        assert following is not None
        grad_key, grad_value = ctx.pair.split(following.wait().to(own.dtype))
        grad_query = rearrange(gradients.grad_query, "b h s d -> s b h d").to(query.dtype)
        return grad_query, grad_key, grad_value, gradients.of_sinks(sinks), None, None, None


class _Pair:
    """Keys [l, b, g, d] and values of another width, one behind the other in one tensor, which one hop moves."""

    def __init__(self, keys: torch.Size, values: torch.Size) -> None:
        self._shapes = keys, values
        self._numels = [keys.numel(), values.numel()]

    def join(self, keys: Tensor, values: Tensor) -> Tensor:
        """Copy both into one tensor of one dim."""
        return torch.cat((keys.flatten(), values.flatten()))

    def split(self, held: Tensor) -> list[Tensor]:
        """Return keys and values [l, b, g, d], views."""
        return [part.view(shape) for part, shape in zip(held.split(self._numels), self._shapes, strict=True)]

    def heads_first(self, held: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [b, g, l, d], views."""
        keys, values = (rearrange(x, "s b h d -> b h s d") for x in self.split(held))
        return keys, values


def _block_gradients(gradients: BlockGradients, pair: _Pair, held: Tensor, *, own: bool, earlier: bool) -> Tensor:
    """Compute this rank's part, in fp32, of the gradients of the keys and values that it holds, joined as they are."""
    keys, values = pair.heads_first(held)
    if own:
        parts = gradients.add(keys, values, causal=True)
    elif earlier:
        parts = gradients.add(_early(keys), _early(values))
    else:
        parts = gradients.add(keys, values, late_only=True)
    block = torch.zeros(held.shape, dtype=torch.float32, device=held.device)
    for into, part in zip(pair.split(block), parts, strict=True):
        into[: part.shape[2]].copy_(rearrange(part, "b h s d -> s b h d"))
    return block


class _Hop:
    """One step of the ring: a send to the next rank and a receive from the previous one, with references to both tensors."""

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        self._sent, self._received = tensor, torch.empty_like(tensor)
        size, rank = group.size(), group.rank()
        self._works: list[Work] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, group=group, group_peer=(rank + 1) % size),
                dist.P2POp(dist.irecv, self._received, group=group, group_peer=(rank - 1) % size),
            ]
        )

    def wait(self) -> Tensor:
        """Wait and return what the previous rank sent; on CUDA the current stream waits, not the host."""
        for work in self._works:
            work.wait()
        return self._received


def _early(x: Tensor) -> Tensor:
    """Return the earlier of the two chunks: [b, g, l, d] -> [b, g, c, d], a view."""
    return x[:, :, : x.shape[2] // 2]
