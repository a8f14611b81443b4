"""Fused rotary position embedding, which includes the split of the query-key-value projection.

Shapes: s sequence, b batch, n query heads, g key and value heads (groups), d head width, r rotated width.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.fusions.backward_launch import join_and_rotate_back
from megatron.core.jit import Fusible


def fused_split_and_rotate(
    mixed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    num_groups: int,
    head_width: int,
    interleaved: bool = False,
    compiled: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split a query-key-value projection and rotate queries and keys.

    Only the tables are kept for backward, which writes the gradient as one tensor.

    Args:
        mixed: [s, b, (n + 2g) * d]: for each group its queries, its key, its value.
        cos: [s, r/2] table, fp32.
        sin: [s, r/2] table, fp32.

    Returns:
        Rotated queries [s, b, n, d] and keys [s, b, g, d], and values [s, b, g, d], all contiguous.
    """
    shape = (num_groups, head_width, interleaved)
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    heads = _SplitAndRotate.apply(mixed, cos, sin, shape, compiled)  # type: ignore[no-untyped-call, unused-ignore]
    return heads


def fused_rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False, compiled: bool = True
) -> torch.Tensor:
    """Rotate the first r channels of heads [s, b, ..., d] by tables [s, r/2]; contiguous, in the dtype of x."""
    rotated: torch.Tensor = _Rotate.apply(x, cos, sin, interleaved, compiled)  # type: ignore[no-untyped-call, unused-ignore]
    return rotated


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate [s, b, ..., d] by tables, in fp32; return the dtype of x.

    Written elementwise as x * cos + swapped * (-sin, sin): two halves that are computed separately and concatenated would
    be separate kernels and copies.
    """
    half = cos.shape[-1]
    wide, pair = x[..., : 2 * half].float(), -1 if interleaved else -2
    wide = wide.reshape(*x.shape[:-1], *((half, 2) if interleaved else (2, half)))
    sign = (2 * torch.arange(2, device=x.device) - 1).float()
    shape = (cos.shape[0],) + (1,) * (x.dim() - 2)
    cos, sin = (table.view(*shape, *((half, 1) if interleaved else (1, half))) for table in (cos, sin))
    turned = wide * cos + wide.flip(pair) * (sin * sign.view((1, 2) if interleaved else (2, 1)))
    turned = turned.to(x.dtype).reshape(*x.shape[:-1], 2 * half)
    return torch.cat((turned, x[..., 2 * half :]), dim=-1) if x.shape[-1] > 2 * half else turned


@Fusible
def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return turn(x, cos, sin, interleaved).contiguous()


@Fusible
def _rotate_back(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return turn(x, cos, -sin, interleaved).contiguous()


@Fusible
def _split_and_rotate(
    mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_groups: int, head_width: int, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = mixed.view(*mixed.shape[:2], num_groups, -1, head_width)
    query = turn(heads[:, :, :, :-2].flatten(2, 3), cos, sin, interleaved)
    key = turn(heads[:, :, :, -2], cos, sin, interleaved)
    # A view would keep the whole query-key-value projection in memory until backward.
    return query.contiguous(), key.contiguous(), heads[:, :, :, -1].clone(memory_format=torch.contiguous_format)


@Fusible
def _join_and_rotate_back(
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    sequence, batch, num_groups, head_width = grad_key.shape
    query = turn(grad_query, cos, -sin, interleaved).view(sequence, batch, num_groups, -1, head_width)
    key = turn(grad_key, cos, -sin, interleaved)
    return torch.cat((query, key.unsqueeze(3), grad_value.unsqueeze(3)), dim=3).flatten(2)


_join_and_rotate_back.kernel = join_and_rotate_back


class _Rotate(torch.autograd.Function):
    """The rotation as an autograd function; backward is the inverse rotation, so only the tables are kept."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, compiled: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.compiled = interleaved, compiled
        rotated: torch.Tensor = _rotate(compiled, x, cos, sin, interleaved)
        return rotated

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate_back(ctx.compiled, grad_outputs[0], cos, sin, ctx.interleaved), None, None, None, None


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        shape: tuple[int, int, bool],
        compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.compiled = shape[2], compiled
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _split_and_rotate(compiled, mixed, cos, sin, *shape)
        return heads

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = _join_and_rotate_back(ctx.compiled, *grad_outputs, *ctx.saved_tensors, ctx.interleaved)
        return grad, None, None, None, None
