"""The column-parallel linear function, whose collectives overlap its matrix products.

[Note: what runs beside what] Backward launches, in this order (collectives run on the process group's own stream):

    all-gather of the input again (sequence parallelism)  ||  input gradient = output gradient x weight
    sum of the input gradient over ranks                  ||  weight gradient = output gradient^T x input

The input is gathered again because forward keeps this rank's part of it alone.

Shapes: s sequence, i input size, o output size, n ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed import ProcessGroup

from megatron.core.tensor_parallel.collectives import begin_gather, begin_sum, begin_sum_and_scatter
from megatron.core.tensor_parallel.linear_function import _rows, _weight_gradient
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: ProcessGroup,
    *,
    sequence_parallel: bool,
    write_main_grad: bool = True,
) -> torch.Tensor:
    """Compute x weight^T + bias for this rank's output features.

    Backward sums the gradient of x over the process group. With ``write_main_grad`` the weight gradient follows [Note: main
    gradient contract] in linear_function.py.

    Args:
        x: [s, ..., i]; with ``sequence_parallel`` this rank's part [s/n, ..., i].
        weight: [o/n, i].
        bias: [o/n] or None.

    Returns:
        [s, ..., o/n].

    Ranks: all of the group, in forward and in backward.
    Source: Megatron-Core's linear_with_grad_accumulation_and_async_allreduce (arXiv:2205.05198, section 4.2.2).
    """
    if torch.is_autocast_enabled(x.device.type):
        # Autocast's own casts are differentiated by autograd.
        enter = gather_from_sequence_parallel_region if sequence_parallel else copy_to_tensor_model_parallel_region
        return F.linear(enter(x, group=group), weight, bias)
    output: torch.Tensor = _ColumnParallelLinear.apply(x, weight, bias, group, sequence_parallel, write_main_grad)  # type: ignore[no-untyped-call, unused-ignore]
    return output


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: ProcessGroup,
        sequence_parallel: bool,
        write_main_grad: bool,
    ) -> torch.Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        # As in linear_function.py: save_for_backward has the weight, the Parameter object has the attributes.
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.weight = weight if write_main_grad else None
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return F.linear(begin_gather(x, group).wait() if sequence_parallel else x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_output,), (x, weight) = grad_outputs, ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gathering = begin_gather(x, ctx.group) if needs_weight and ctx.sequence_parallel else None
        summing = grad_weight = grad_bias = None
        if needs_x:
            begin = begin_sum_and_scatter if ctx.sequence_parallel else begin_sum
            summing = begin(grad_output.matmul(weight).contiguous(), ctx.group)
        if needs_weight:
            total = x if gathering is None else gathering.wait()
            grad_weight = _weight_gradient(ctx.weight, _rows(grad_output), _rows(total))
        if needs_bias:
            grad_bias = _rows(grad_output).sum(0)
        return None if summing is None else summing.wait(), grad_weight, grad_bias, None, None, None
