"""Rows that travel between ranks, as many to each as the sender says, with their gradients back.

Shapes: n rows of this rank, r rows that arrive, g ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_to_all_rows(x: torch.Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> torch.Tensor:
    """[n, ...] rows in the order of the ranks that they go to -> [r, ...] in the order of those that they came from.

    Args:
        sent: [g] rows for each rank, n together. received: [g] rows from each rank, r together.

    Ranks: all of the group, in forward and, the other way, in backward. The host does not wait on CUDA.
    """
    rows: torch.Tensor = _AllToAll.apply(x, list(sent), list(received), group)  # type: ignore[no-untyped-call, unused-ignore]
    return rows


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> torch.Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(x: torch.Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> torch.Tensor:
    rows = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(rows, x.contiguous(), received, sent, group=group)
    return rows
