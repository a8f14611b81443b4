"""The linear function whose backward writes the weight gradient into the main gradient.

[Note: main gradient contract] A weight may have attributes that its owner (a sharding engine) set:

- ``weight.get_main_grad()`` returns a tensor of the weight's full shape, of any float dtype.
- ``weight.overwrite_main_grad``, valid right after that call, is true if the gradient must overwrite the tensor, and false
  if it must be added. An owner whose weights transformer-engine may use makes it an object that answers when it is asked:
  there it is taken in forward.
- ``weight.__fsdp_param__`` tells transformer-engine that there is a ``get_main_grad``.
- ``weight.grad_added_to_main_grad`` is set to True here after the gradient was written; autograd then gets no gradient for
  the weight. transformer-engine gives autograd a dummy where a weight has this attribute, so owners do not make it.

Each use of a weight in a backward pass calls ``get_main_grad`` once. So the first use of a weight overwrites, the second adds.

Shapes: i input size, o output size, t tokens (all leading dims together).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel.accumulating_gemm import write_product

# On a device, the gradient of a smaller weight is left to autograd: copying it (4 bytes an element: 25 us for this many)
# takes less time than the Python of this function's forward and backward takes on the host (60 us and more).
IN_PLACE_MIN_NUMEL = 3 * 2**23

Later = Callable[[Callable[[], None]], bool]
"""Takes a computation and runs it later in the same backward; returns False if the caller must run it now."""


def linear_with_main_grad(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    write_main_grad: bool = True,
    min_numel: int | None = None,
    later: Later | None = None,
) -> torch.Tensor:
    """Compute x [..., i] times weight [o, i] transposed plus bias [o]: [..., o].

    Args:
        write_main_grad: follow the contract; False leaves the weight gradient to autograd.
        min_numel: a weight of fewer elements leaves it to autograd, too; None: ``IN_PLACE_MIN_NUMEL`` on a device, 0 on a CPU.
        later: may run the computation of the weight gradient later in backward, also for weights of fewer elements.
    """
    if later is not None and weight.is_leaf:
        delayed: torch.Tensor = _apply(x, weight, bias, write_main_grad, later)
        return delayed
    if weight.numel() < min_numel if min_numel is not None else x.is_cuda and weight.numel() < IN_PLACE_MIN_NUMEL:
        return F.linear(x, weight, bias)
    # Not x.device.type, which makes two objects: this line runs for each layer of a step.
    if torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu") or torch._C._are_functorch_transforms_active():
        return F.linear(x, weight, bias)
    output: torch.Tensor = _apply(x, weight, bias, write_main_grad, None)
    return output


class _LinearWithMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        write_main_grad: bool,
        later: Later | None,
    ) -> torch.Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        # The weight is saved so that autograd notices writes into it; the attributes of the contract are on the Parameter
        # object, which saved tensors do not keep.
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.weight = weight if write_main_grad else None
        ctx.later, ctx.parameter = later, (None if later is None else weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override, unused-ignore]
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            grad_x = grad_output.matmul(weight)
        if needs_weight:
            compute = partial(_weight_gradient, ctx.weight, _rows(grad_output), _rows(x))
            if ctx.later is None or not ctx.later(partial(_add_gradient, ctx.parameter, compute)):
                grad_weight = compute()
        if needs_bias:
            grad_bias = _rows(grad_output).sum(0)
        return grad_x, grad_weight, grad_bias, None, None


# The C++ method that Function.apply calls in the end. It skips the checks for functorch's transforms and for default
# arguments (3 us of 10 for each call), which do not occur here. Where torch lacks it, Function.apply itself.
_apply: Any = getattr(super(torch.autograd.Function, _LinearWithMainGrad), "apply", _LinearWithMainGrad.apply)


def _weight_gradient(weight: Any, grad_rows: torch.Tensor, x_rows: torch.Tensor) -> torch.Tensor | None:
    """Compute the weight gradient [o, i] of [t, o] and [t, i]; return None if it was written into the main gradient."""
    get_main_grad = getattr(weight, "get_main_grad", None)
    # With create_graph the gradient must be differentiable, which a write into a buffer is not.
    if get_main_grad is None or torch.is_grad_enabled():
        return grad_rows.t().mm(x_rows)
    main_grad = get_main_grad()
    write_product(main_grad, grad_rows, x_rows, overwrites=bool(weight.overwrite_main_grad))
    weight.grad_added_to_main_grad = True
    return None


def _add_gradient(weight: torch.Tensor, compute: Callable[[], torch.Tensor | None]) -> None:
    """Compute a gradient and add it to ``weight.grad`` as autograd would, unless it was written into the main gradient."""
    gradient = compute()
    if gradient is not None:
        add_to_grad(weight, gradient)


def add_to_grad(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient to ``weight.grad``, as autograd does for a leaf."""
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad.add_(gradient)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])
