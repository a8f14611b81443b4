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

With ``group`` None or of one rank all return their input; left out, it is the tensor-parallel group of ``parallel_state``. None of them writes into its input. Ranks: all of the group,
in forward and in backward.

Source: Megatron-Core's functions of these names (arXiv:1909.08053 section 3, arXiv:2205.05198 section 4.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import DEFAULT_GROUP, group_or_default, group_size
from megatron.core.tensor_parallel.collectives import (
    begin_gather,
    begin_sum,
    begin_sum_and_scatter,
    rows_of_a_part,
)
from megatron.core.tensor_parallel.partition import partition

Map = Callable[[torch.Tensor, ProcessGroup], torch.Tensor]


def copy_to_tensor_model_parallel_region(
    input_: torch.Tensor, group: ProcessGroup | None = DEFAULT_GROUP
) -> torch.Tensor:
    """Return the input of split layers, which each rank has whole; backward sums its gradient over ranks."""
    return _apply(input_, group, _same, _sum)


def reduce_from_tensor_model_parallel_region(
    input_: torch.Tensor, group: ProcessGroup | None = DEFAULT_GROUP
) -> torch.Tensor:
    """Sum the inputs over ranks; each rank gets the whole sum."""
    return _apply(input_, group, _sum, _same)


def scatter_to_tensor_model_parallel_region(
    input_: torch.Tensor, group: ProcessGroup | None = DEFAULT_GROUP
) -> torch.Tensor:
    """Return this rank's part of the last dim: [..., i] -> [..., i/n].

    Raises:
        ValueError: i is not a multiple of the number of ranks.
    """
    return _apply(input_, group, _part_of_last, _gather_last)


def gather_from_tensor_model_parallel_region(
    input_: torch.Tensor, group: ProcessGroup | None = DEFAULT_GROUP
) -> torch.Tensor:
    """Gather the last dim: [..., o/n] -> [..., o]; the gradient must be the same on all ranks."""
    return _apply(input_, group, _gather_last, _part_of_last)


def scatter_to_sequence_parallel_region(
    input_: torch.Tensor, group: ProcessGroup | None = DEFAULT_GROUP
) -> torch.Tensor:
    """Return this rank's part of the first dim: [s, ...] -> [s/n, ...].

    Raises:
        ValueError: s is not a multiple of the number of ranks.
    """
    return _apply(input_, group, _part_of_first, _gather_first)


def gather_from_sequence_parallel_region(
    input_: torch.Tensor,
    tensor_parallel_output_grad: bool = True,
    group: ProcessGroup | None = DEFAULT_GROUP,
    output_split_sizes: None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """Gather the first dim: [s/n, ...] -> [s, ...].

    Args:
        tensor_parallel_output_grad: True where ranks use the result differently, so that backward sums their gradients;
            False where all use it alike and each has the whole gradient.
        output_split_sizes: must be None: parts are equal.
        use_global_buffer: accepted; the result has its own memory.
    """
    _refuse_splits("output_split_sizes", output_split_sizes)
    return _apply(input_, group, _gather_first, _sum_and_scatter if tensor_parallel_output_grad else _part_of_first)


def reduce_scatter_to_sequence_parallel_region(
    input_: torch.Tensor,
    group: ProcessGroup | None = DEFAULT_GROUP,
    input_split_sizes: None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """Sum over ranks and return this rank's part of the first dim: [s, ...] -> [s/n, ...].

    Args:
        input_split_sizes: must be None: parts are equal.
        use_global_buffer: accepted; the result has its own memory.

    Raises:
        ValueError: s is not a multiple of the number of ranks.
    """
    _refuse_splits("input_split_sizes", input_split_sizes)
    return _apply(input_, group, _sum_and_scatter, _gather_first)


def all_to_all(
    group: ProcessGroup | None,
    input_: torch.Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    use_nccl_stream: bool = False,
) -> torch.Tensor:
    """Send parts of the first dim to each rank and return what all sent to this one, in rank order.

    Args:
        output_split_sizes_, input_split_sizes: [n] rows from and to each rank; None: equal parts.
        use_nccl_stream: accepted; the backend has its own stream.
    """
    if group_size(group) == 1:
        return input_
    received, sent = output_split_sizes_, input_split_sizes
    output: torch.Tensor = _Region.apply(  # type: ignore[no-untyped-call, unused-ignore]
        input_, group, partial(_exchange, received, sent), partial(_exchange, sent, received)
    )
    return output


def _refuse_splits(name: str, sizes: object) -> None:
    if sizes is not None:
        raise NotImplementedError(f"{name} must be None, got {sizes!r}: parts are equal; use all_to_all for others")


def _exchange(
    received: Sequence[int] | None, sent: Sequence[int] | None, x: torch.Tensor, group: ProcessGroup
) -> torch.Tensor:
    rows = x.new_empty(x.shape[0] if received is None else sum(received), *x.shape[1:])
    splits = (None if received is None else list(received), None if sent is None else list(sent))
    dist.all_to_all_single(rows, x.contiguous(), *splits, group=group)
    return rows


def _apply(input_: torch.Tensor, group: ProcessGroup | None, forward: Map, backward: Map) -> torch.Tensor:
    group = group_or_default(group, "tp")
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
