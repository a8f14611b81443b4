"""Queries, keys and values of multi-latent attention from the outputs of its up-projections, with rotary embedding.

Shapes: s sequence, b batch, n heads, c width of a head that is not rotated, r width that is, v width of values.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.fusions.fused_rope import turn
from megatron.core.jit import Fusible


def fused_rotate_and_join(
    query: torch.Tensor,
    key_value: torch.Tensor,
    key_position: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    content_width: int,
    compiled: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate the positional parts of queries and keys, and give each head its key.

    Neighbouring channels turn together. Only the tables are kept for backward.

    Args:
        query: [s, b, n, c + r].
        key_value: [s, b, n, c + v].
        key_position: [s, b, r], the part of the keys that all heads share.
        cos: [s, r/2] table, fp32.
        sin: [s, r/2] table, fp32.
        content_width: c.

    Returns:
        Queries and keys [s, b, n, c + r] and values [s, b, n, v], all contiguous.
    """
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    heads = _RotateAndJoin.apply(query, key_value, key_position, cos, sin, content_width, compiled)  # type: ignore[no-untyped-call, unused-ignore]
    return heads


@Fusible
def _rotate_and_join(
    query: torch.Tensor,
    key_value: torch.Tensor,
    key_position: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    content_width: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rotated = turn(query[..., content_width:], cos, sin, True)
    shared = turn(key_position, cos, sin, True).unsqueeze(2).expand(-1, -1, query.shape[2], -1)
    query = torch.cat((query[..., :content_width], rotated), dim=-1)
    key = torch.cat((key_value[..., :content_width], shared), dim=-1)
    # A view would keep the whole projection in memory until backward.
    return query, key, key_value[..., content_width:].clone(memory_format=torch.contiguous_format)


@Fusible
def _part_and_rotate_back(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    content_width: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rotated_back = turn(grad_query[..., content_width:], cos, -sin, True)
    query = torch.cat((grad_query[..., :content_width], rotated_back), dim=-1)
    key_value = torch.cat((grad_key[..., :content_width], grad_value), dim=-1)
    # Turning is linear: the sum over the heads is turned once.
    shared = grad_key[..., content_width:].float().sum(2)
    return query, key_value, turn(shared, cos, -sin, True).to(grad_key.dtype)


class _RotateAndJoin(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key_value: torch.Tensor,
        key_position: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        content_width: int,
        compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.content_width, ctx.compiled = content_width, compiled
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        heads = _rotate_and_join(compiled, query, key_value, key_position, cos, sin, content_width)
        return heads

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grads = _part_and_rotate_back(ctx.compiled, *grad_outputs, cos, sin, ctx.content_width)
        return (*grads, None, None, None, None)
