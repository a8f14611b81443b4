"""Grouped matrix multiplication: the rows of each expert of a rank times its own weight, in one kernel.

Shapes: r rows, l experts, i input size, o output size.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megatron.core.tensor_parallel.linear_function import Later, add_to_grad

# torch's kernel reads matrices by TMA, whose addresses and strides are multiples of 16 bytes.
_ALIGN_NBYTES = 16


def can_group(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Return whether torch has one kernel for these matrices: bf16 on Hopper, with aligned rows and columns.

    On other devices ``torch._grouped_mm`` loops over experts inside, or (Blackwell, torch 2.11) leaves the gradients of
    experts without rows unwritten.
    """
    return x.is_cuda and x.dtype is torch.bfloat16 and _has_kernel(x.device) and are_aligned(weights)


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    return hasattr(torch, "_grouped_mm") and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def are_aligned(weights: Sequence[torch.Tensor]) -> bool:
    """Return whether rows and columns of these [o, i] matrices are multiples of 16 bytes."""
    unit = _ALIGN_NBYTES // weights[0].element_size()
    return all(extent % unit == 0 for extent in weights[0].shape)


def grouped_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], ends: torch.Tensor, later: Later | None = None
) -> torch.Tensor:
    """Multiply each expert's rows of x by its transposed weight.

    The weight gradients of experts without rows are zeros. They follow [Note: main gradient contract] of
    tensor_parallel/linear_function.py: where weights have an owner, they are written or added in its memory, in fp32 if it is so.
    The host does not wait.

    Args:
        x: [r, i] rows in expert order.
        weights: l matrices [o, i].
        ends: [l] index after each expert's last row, int32, on x's device; the last is r.
        later: may run the computation of the weight gradients later in backward; the weights must be leaves.

    Returns:
        [r, o].
    """
    output: torch.Tensor = _GroupedLinear.apply(x, ends, later, *weights)  # type: ignore[no-untyped-call, unused-ignore]
    return output


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, ends: torch.Tensor, later: Later | None, *weights: torch.Tensor
    ) -> torch.Tensor:
        # Saved tensors do not keep the attributes of the contract: the parameters do.
        x, ctx.later, ctx.weights = x.contiguous(), later, weights
        # The weights one by one, not their stack: autograd notices writes into them, and no copy is kept.
        ctx.save_for_backward(x, ends, *weights)
        if x.shape[0] == 0:
            return x.new_empty(0, weights[0].shape[0])
        return torch._grouped_mm(x, stacked(weights).transpose(1, 2), offs=ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, ends, *weights = ctx.saved_tensors
        grad, needs_x, none = grads[0].contiguous(), ctx.needs_input_grad[0], [None] * len(weights)
        if x.shape[0] == 0:
            return (torch.zeros_like(x) if needs_x else None, None, None, *map(torch.zeros_like, weights))
        grad_x = torch._grouped_mm(grad, stacked(weights), offs=ends) if needs_x else None
        if not ctx.needs_input_grad[3]:
            return (grad_x, None, None, *none)
        add = partial(_add_weight_gradients, ctx.weights, grad, x, ends)
        if ctx.later is not None and ctx.later(add):
            return (grad_x, None, None, *none)
        if hasattr(ctx.weights[0], "get_main_grad"):
            add()
            return (grad_x, None, None, *none)
        return (grad_x, None, None, *_weight_gradients(grad, x, ends).unbind())


def _weight_gradients(grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the [l, o, i] products of each expert's rows of [r, o] and [r, i]."""
    # Both operands are grouped along rows ([o, r] is a view of [r, o]), so that an expert may have any number of rows.
    return torch._grouped_mm(grad.t(), x, offs=ends)


def _add_weight_gradients(weights: Sequence[Any], grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> None:
    """Add the gradients of l weights, which are leaves, where their owner wants them, or else to their ``grad``."""
    if not hasattr(weights[0], "get_main_grad"):
        for weight, gradient in zip(weights, _weight_gradients(grad, x, ends), strict=True):
            add_to_grad(weight, gradient)
        return
    totals = [weight.get_main_grad() for weight in weights]
    overwrites = {bool(weight.overwrite_main_grad) for weight in weights}
    together = _in_place(totals) if grad.is_cuda and len(overwrites) == 1 and _has_triton() else None
    if together is not None:
        from megatron.core.transformer.moe.grouped_gemm_kernels import write_weight_gradients

        write_weight_gradients(together, grad, x, ends, overwrites=overwrites.pop())
    else:
        for total, weight, product in zip(totals, weights, _weight_gradients(grad, x, ends), strict=True):
            (total.copy_ if weight.overwrite_main_grad else total.add_)(product)
    for weight in weights:
        weight.grad_added_to_main_grad = True


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack l matrices [o, i] to [l, o, i]: a view where they lie at equal, aligned distances in one storage, else a copy."""
    whole = _in_place(weights)
    return torch.stack(list(weights)) if whole is None else whole


def _in_place(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return l matrices [o, i] as a view [l, o, i]; None where they do not lie at equal, aligned distances in one storage."""
    first = weights[0]
    addresses = [weight.data_ptr() for weight in weights]
    distance = addresses[1] - addresses[0] if len(weights) > 1 else first.nbytes
    if not (_are_even(addresses, distance, first) and all(weight.is_contiguous() for weight in weights)):
        return None
    return first.as_strided((len(weights), *first.shape), (distance // first.element_size(), *first.stride()))


def _are_even(addresses: list[int], distance: int, first: torch.Tensor) -> bool:
    """Return whether matrices like the first lie at aligned addresses ``distance`` bytes apart, within its storage."""
    start = addresses[0]
    if start % _ALIGN_NBYTES != 0 or distance % _ALIGN_NBYTES != 0 or distance < first.nbytes:
        return False
    if any(address != start + index * distance for index, address in enumerate(addresses)):
        return False
    storage = first.untyped_storage()
    # All memory of a storage can be read through it, whichever tensor it belongs to.
    return addresses[-1] + first.nbytes <= storage.data_ptr() + storage.nbytes()
