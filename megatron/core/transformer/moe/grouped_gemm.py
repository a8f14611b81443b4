"""One matrix multiplication for all experts of a rank: rows of consecutive experts times each expert's own weight.

Shapes: r rows, l experts, i input size, o output size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# torch's kernel reads matrices by TMA, whose addresses and strides are multiples of 16 bytes.
_ALIGN_NBYTES = 16


def can_group(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Whether torch has one kernel for these: bf16 on Hopper, in sizes that it reads.

    Other devices that have ``torch._grouped_mm`` loop over experts inside of it, or (Blackwell, torch 2.11) leave the
    gradients of experts without rows unwritten.
    """
    if not (x.is_cuda and x.dtype is torch.bfloat16 and hasattr(torch, "_grouped_mm")):
        return False
    return torch.cuda.get_device_capability(x.device)[0] == 9 and are_aligned(weights)


def are_aligned(weights: Sequence[torch.Tensor]) -> bool:
    """Whether rows and columns of these [o, i] matrices are multiples of 16 bytes."""
    unit = _ALIGN_NBYTES // weights[0].element_size()
    return all(extent % unit == 0 for extent in weights[0].shape)


def grouped_linear(x: torch.Tensor, weights: Sequence[torch.Tensor], ends: torch.Tensor) -> torch.Tensor:
    """[r, i] and l times [o, i] -> [r, o]: each expert's rows times its weight, transposed.

    The gradients of weights of experts without rows are zeros. The host does not wait.

    Args:
        weights: of one shape.
        ends: [l] int32, on x's device: where each expert's rows end; the last is r.
    """
    output: torch.Tensor = _GroupedLinear.apply(x, ends, *weights)  # type: ignore[no-untyped-call, unused-ignore]
    return output


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        # The weights one by one, not their stack: autograd sees writes into them, and a copy would be kept.
        ctx.save_for_backward(x, ends, *weights)
        if x.shape[0] == 0:
            return x.new_empty(0, weights[0].shape[0])
        return torch._grouped_mm(x, stacked(weights).transpose(1, 2), offs=ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        grad, needs_x = grads[0].contiguous(), ctx.needs_input_grad[0]
        if x.shape[0] == 0:
            return (torch.zeros_like(x) if needs_x else None, None, *map(torch.zeros_like, weights))
        grad_x = torch._grouped_mm(grad, stacked(weights), offs=ends) if needs_x else None
        # Both operands cut by rows: [o, r] as a view of [r, o], so that an expert may have any number of rows.
        grad_weights = torch._grouped_mm(grad.t(), x, offs=ends)
        return (grad_x, None, *grad_weights.unbind())


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """[l, o, i] of l matrices [o, i]: a view where they lie at even, aligned distances in one storage, else a copy."""
    first = weights[0]
    distance = int(weights[1].storage_offset() - first.storage_offset()) if len(weights) > 1 else first.numel()
    if not _lie_evenly(weights, distance):
        return torch.stack(list(weights))
    return first.as_strided((len(weights), *first.shape), (distance, *first.stride()))


def _lie_evenly(weights: Sequence[torch.Tensor], distance: int) -> bool:
    first = weights[0]
    if first.data_ptr() % _ALIGN_NBYTES != 0 or distance * first.element_size() % _ALIGN_NBYTES != 0:
        return False
    storage, start = first.untyped_storage().data_ptr(), first.storage_offset()
    return distance >= first.numel() and all(
        w.is_contiguous()
        and w.storage_offset() == start + index * distance
        and w.untyped_storage().data_ptr() == storage
        for index, w in enumerate(weights)
    )
