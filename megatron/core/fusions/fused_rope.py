"""Rotary position embedding by one function each way, with the split of the query-key-value projection in it.

Shapes: s sequence, b batch, n query heads, g key and value heads (groups), d head width, r rotated width.
"""

from __future__ import annotations

from typing import Any

import torch

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
    """Rotated queries [s, b, n, d] and keys [s, b, g, d] and plain values [s, b, g, d], all contiguous.

    Nothing but the tables is kept, and the gradient is written as one tensor, where a split would gather three.

    Args:
        mixed: [s, b, (n + 2g) * d]: group after group its queries, its key, its value.
        cos: [s, r/2] in fp32, as ``sin``.
    """
    shape = (num_groups, head_width, interleaved)
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    heads = _SplitAndRotate.apply(mixed, cos, sin, shape, compiled)  # type: ignore[no-untyped-call, unused-ignore]
    return heads


def fused_rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False, compiled: bool = True
) -> torch.Tensor:
    """Heads [s, b, ..., d], their first r channels turned by the angles of [s, r/2]; contiguous, in the dtype of x."""
    rotated: torch.Tensor = _Rotate.apply(x, cos, sin, interleaved, compiled)  # type: ignore[no-untyped-call, unused-ignore]
    return rotated


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """[s, b, ..., d] -> the same shape, in the dtype of x; computed in fp32.

    Written as x * cos + swapped * (-sin, sin), each element by itself: halves that are computed apart and put together
    would be kernels and copies of their own wherever something is still to be done with them.
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
    return _turn(x, cos, sin, interleaved).contiguous()


@Fusible
def _rotate_back(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    return _turn(x, cos, -sin, interleaved).contiguous()


@Fusible
def _split_and_rotate(
    mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_groups: int, head_width: int, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = mixed.view(*mixed.shape[:2], num_groups, -1, head_width)
    query = _turn(heads[:, :, :, :-2].flatten(2, 3), cos, sin, interleaved)
    key = _turn(heads[:, :, :, -2], cos, sin, interleaved)
    # As a view the value would keep the whole projection in memory until backward, for the sake of its third part.
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
    query = _turn(grad_query, cos, -sin, interleaved).view(sequence, batch, num_groups, -1, head_width)
    key = _turn(grad_key, cos, -sin, interleaved)
    return torch.cat((query, key.unsqueeze(3), grad_value.unsqueeze(3)), dim=3).flatten(2)


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back, so nothing but the tables is kept."""

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
