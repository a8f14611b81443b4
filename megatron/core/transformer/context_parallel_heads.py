"""All-to-alls between a split of the sequence and a split of the heads, around attention over whole sequences.

Shapes: s sequence, l = s / ranks tokens of this rank, c = l / 2, b batch, n heads, d head width.
Source: DeepSpeed Ulysses (arXiv:2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.transformer.context_parallel import chunk_order


def scatter_heads(x: Tensor, cp_group: ProcessGroup) -> Tensor:
    """Exchange this rank's tokens of all heads [l, b, n, d] for all tokens, in order, of its heads [s, b, n / ranks, d].

    Ranks: all of ``cp_group``, in forward and backward.
    """
    scattered: Tensor = _Swap.apply(x, cp_group, True)  # type: ignore[no-untyped-call, unused-ignore]
    return scattered


def gather_heads(x: Tensor, cp_group: ProcessGroup) -> Tensor:
    """Undo ``scatter_heads``: [s, b, n / ranks, d] -> [l, b, n, d]. Ranks: all of ``cp_group``."""
    gathered: Tensor = _Swap.apply(x, cp_group, False)  # type: ignore[no-untyped-call, unused-ignore]
    return gathered


class _Swap(torch.autograd.Function):
    """One of the two exchanges; the backward of each is the other, since elements only move."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp_group: ProcessGroup, scatters: bool) -> Tensor:
        ctx.cp_group, ctx.scatters = cp_group, scatters
        return _scatter(x, cp_group) if scatters else _gather(x, cp_group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        swap = _gather if ctx.scatters else _scatter
        return swap(grad_outputs[0], ctx.cp_group), None, None


def _scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    size = group.size()
    received = _all_to_all(torch.unflatten(x, 2, (size, -1)).movedim(2, 0), group)
    chunks = torch.unflatten(received, 1, (2, -1)).flatten(0, 1)
    # No index tensor: on CUDA it would have to be copied from the host.
    return torch.cat([chunks[place] for place in _inverse(chunk_order(size))])


def _gather(x: Tensor, group: ProcessGroup) -> Tensor:
    size = group.size()
    chunks = torch.unflatten(x, 0, (2 * size, -1))
    ordered = torch.cat([chunks[chunk] for chunk in chunk_order(size)])
    received = _all_to_all(torch.unflatten(ordered, 0, (size, -1)), group)
    return received.movedim(0, 2).flatten(2, 3)


def _all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    """Send part i of [ranks, ...] to rank i and return the parts that the ranks sent."""
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
