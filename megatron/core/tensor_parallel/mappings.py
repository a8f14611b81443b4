"""Transitions into and out of tensor-parallel regions: pairs of a forward and a backward communication.

| region (``..._region``)            | forward                         | backward                        |
|------------------------------------|---------------------------------|---------------------------------|
| copy_to_tensor_model_parallel      | identity                        | sum over ranks                  |
| reduce_from_tensor_model_parallel  | sum over ranks                  | identity                        |
| scatter_to_tensor_model_parallel   | this rank's part of the last dim | gather the last dim            |
| gather_from_tensor_model_parallel  | gather the last dim             | this rank's part of the last dim |
| scatter_to_sequence_parallel       | this rank's part of the first dim | gather the first dim          |
| gather_from_sequence_parallel      | gather the first dim            | sum, this rank's part (or the part alone) |
| reduce_scatter_to_sequence_parallel | sum, this rank's part of the first dim | gather the first dim      |

With ``group`` None or of one rank all return their input. None of them writes into its input. Ranks: all of the group,
in forward and in backward.

Source: Megatron-Core's functions of these names (arXiv:1909.08053 section 3, arXiv:2205.05198 section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import group_size
from megatron.core.tensor_parallel.collectives import (
    begin_gather,
    begin_sum,
    begin_sum_and_scatter,
    rows_of_a_part,
)
from megatron.core.tensor_parallel.partition import partition

Map = Callable[[torch.Tensor, ProcessGroup], torch.Tensor]


def copy_to_tensor_model_parallel_region(input_: torch.Tensor, group: ProcessGroup | None = None) -> torch.Tensor:
    """Return the input of split layers, which each rank has whole; backward sums its gradient over ranks."""
    return _apply(input_, group, _same, _sum)


def reduce_from_tensor_model_parallel_region(input_: torch.Tensor, group: ProcessGroup | None = None) -> torch.Tensor:
    """Sum the inputs over ranks; each rank gets the whole sum."""
    return _apply(input_, group, _sum, _same)


def scatter_to_tensor_model_parallel_region(input_: torch.Tensor, group: ProcessGroup | None = None) -> torch.Tensor:
    """Return this rank's part of the last dim: [..., i] -> [..., i/n].

    Raises:
        ValueError: i is not a multiple of the number of ranks.
    """
    return _apply(input_, group, _part_of_last, _gather_last)


def gather_from_tensor_model_parallel_region(input_: torch.Tensor, group: ProcessGroup | None = None) -> torch.Tensor:
    """Gather the last dim: [..., o/n] -> [..., o]; the gradient must be the same on all ranks."""
    return _apply(input_, group, _gather_last, _part_of_last)


def scatter_to_sequence_parallel_region(input_: torch.Tensor, group: ProcessGroup | None = None) -> torch.Tensor:
    """Return this rank's part of the first dim: [s, ...] -> [s/n, ...].

    Raises:
        ValueError: s is not a multiple of the number of ranks.
    """
    return _apply(input_, group, _part_of_first, _gather_first)


def gather_from_sequence_parallel_region(
    input_: torch.Tensor, tensor_parallel_output_grad: bool = True, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Gather the first dim: [s/n, ...] -> [s, ...].

    Args:
        tensor_parallel_output_grad: True where ranks use the result differently, so that backward sums their gradients;
            False where all use it alike and each has the whole gradient.
    """
    return _apply(input_, group, _gather_first, _sum_and_scatter if tensor_parallel_output_grad else _part_of_first)


def reduce_scatter_to_sequence_parallel_region(input_: torch.Tensor, group: ProcessGroup | None = None) -> torch.Tensor:
    """Sum over ranks and return this rank's part of the first dim: [s, ...] -> [s/n, ...].

    Raises:
        ValueError: s is not a multiple of the number of ranks.
    """
    return _apply(input_, group, _sum_and_scatter, _gather_first)


def _apply(input_: torch.Tensor, group: ProcessGroup | None, forward: Map, backward: Map) -> torch.Tensor:
    if group_size(group) == 1:
        return input_
    output: torch.Tensor = _Region.apply(input_, group, forward, backward)  # type: ignore[no-untyped-call, unused-ignore]
    return output


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: ProcessGroup, forward: Map, backward: Map) -> torch.Tensor:
        ctx.group, ctx.map = group, backward
        return forward(x, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.map(grad_outputs[0], ctx.group), None, None, None


def _same(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    return x.view_as(x)


def _sum(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    # A copy: autograd may use the same gradient elsewhere, and the input belongs to the caller.
    return begin_sum(x.clone(memory_format=torch.contiguous_format), group).wait()


def _part_of_last(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    return partition(x, -1, 1, group.rank(), group.size()).contiguous()


def _gather_last(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    parts = begin_gather(x.unsqueeze(0), group).wait()
    return torch.cat(parts.unbind(0), -1)


def _part_of_first(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    rows = rows_of_a_part(x, group)
    # A copy, so that the whole tensor can be freed.
    return x.narrow(0, group.rank() * rows, rows).clone()


def _gather_first(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    return begin_gather(x, group).wait()


def _sum_and_scatter(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    return begin_sum_and_scatter(x, group).wait()
