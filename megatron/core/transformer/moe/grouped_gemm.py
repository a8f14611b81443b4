"""One matrix multiplication for all experts of a rank: rows of consecutive experts times each expert's own weight.

Shapes: r rows, l experts, i input size, o output size.
"""

from __future__ import annotations

import functools
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
    return x.is_cuda and x.dtype is torch.bfloat16 and _has_kernel(x.device) and are_aligned(weights)


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    return hasattr(torch, "_grouped_mm") and torch.cuda.get_device_capability(device)[0] == 9


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
    addresses = [weight.data_ptr() for weight in weights]
    distance = addresses[1] - addresses[0] if len(weights) > 1 else first.nbytes
    if not (_are_even(addresses, distance, first) and all(weight.is_contiguous() for weight in weights)):
        return torch.stack(list(weights))
    return first.as_strided((len(weights), *first.shape), (distance // first.element_size(), *first.stride()))


def _are_even(addresses: list[int], distance: int, first: torch.Tensor) -> bool:
    """Whether matrices like the first lie so many aligned bytes apart, all of them in the memory of its storage."""
    start = addresses[0]
    if start % _ALIGN_NBYTES != 0 or distance % _ALIGN_NBYTES != 0 or distance < first.nbytes:
        return False
    if any(address != start + index * distance for index, address in enumerate(addresses)):
        return False
    storage = first.untyped_storage()
    # What lies in a storage's memory can be read through it, whichever tensor it belongs to.
    return addresses[-1] + first.nbytes <= storage.data_ptr() + storage.nbytes()
