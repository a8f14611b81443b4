"""Norms and counts over the whole model, each element counted once, without a host synchronisation.

A sharded tensor is a DTensor. Over the mesh axes where it is sharded, each rank has another part, so local results are summed
by one small all-reduce for each axis. Over replicated axes all ranks have the same values, so nothing is summed. Ranks that
own no rows of a tensor take part in the sums.

Where the model itself is split (tensor, expert, pipeline parallelism), one rank counts each element, and one small all-reduce
sums over all ranks of the model, also those without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import NormScope, counts_in_norm, group_of, norm_scope_of, sum_grads


def get_grad_norm(params: Iterable[Tensor]) -> Tensor:
    """Compute the 2-norm of all gradients: [] fp32, on their device.

    Args:
        params: parameters; those without a gradient are skipped.

    Ranks: all ranks of the gradients' meshes, with the same parameters in the same order; does not block the host.
    """
    return _sum_over_model(_with_gradients(params), _sum_of_squares).sqrt()


def get_params_norm(params: Iterable[Tensor]) -> Tensor:
    """Compute the 2-norm of all parameters: [] fp32. Ranks: as ``get_grad_norm``."""
    return _sum_over_model([(param, param.detach()) for param in params], _sum_of_squares).sqrt()


def count_zeros(params: Iterable[Tensor]) -> Tensor:
    """Count the zeros in all gradients: [] fp32. Ranks: as ``get_grad_norm``."""
    return _sum_over_model(_with_gradients(params), _number_of_zeros)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Compute the factor [] that scales gradients of norm [] to at most ``max_norm``; NaN for NaN."""
    return torch.clamp(max_norm / (norm + 1.0e-6), max=1.0)


def clip_grad_by_total_norm(params: Iterable[Tensor], max_norm: float, total_norm: Tensor) -> None:
    """Scale gradients in place so that their norm is at most ``max_norm``.

    Args:
        total_norm: [] result of ``get_grad_norm`` for these parameters; NaN makes all gradients NaN.

    Ranks: local.
    """
    scale_gradients(params, clip_factor(total_norm, max_norm))


def scale_gradients(params: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place by ``factor``, one element on the device. Ranks: local."""
    for tensors in _by_dtype([_local(gradient) for gradient in _gradients(params)]):
        torch._foreach_mul_(tensors, factor.view(()).to(tensors[0].device))


def _gradients(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def _with_gradients(params: Iterable[Tensor]) -> list[tuple[Tensor, Tensor | None]]:
    """Sum the gradients over all ranks of the model where needed, and pair the parameters with them."""
    params = list(params)
    sum_grads(dict.fromkeys(group for param in params if (group := group_of(param)) is not None), in_use=True)
    return [(param, param.grad) for param in params]


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())


def _sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32)).square().sum()


def _number_of_zeros(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([tensor.numel() - torch.count_nonzero(tensor) for tensor in tensors]).sum().float()


def _sum_over_model(
    values: Sequence[tuple[Tensor, Tensor | None]], measure: Callable[[Sequence[Tensor]], Tensor]
) -> Tensor:
    """Sum ``measure`` over the parameters' values: for each scope locally, then over the ranks of the scope."""
    by_scope: dict[NormScope, list[Tensor]] = {}
    device = None
    for param, value in values:
        placed = param if value is None or group_of(param) is not None else value
        scope = norm_scope_of(placed)
        if value is None and not scope.is_model:
            continue
        own, device = by_scope.setdefault(scope, []), device or _local(placed).device
        if value is not None:
            _check_reduced(value)
            if counts_in_norm(placed):
                own.append(_local(value))
    total = torch.zeros((), dtype=torch.float32, device=device)
    for scope, locals_ in by_scope.items():
        part = torch.zeros_like(total)
        for same_dtype in _by_dtype(locals_):
            part = part + measure(same_dtype)
        scope.sum(part)
        total = total + part
    return total


def _check_reduced(tensor: Tensor) -> None:
    for axis, placement in enumerate(tensor.placements if isinstance(tensor, DTensor) else ()):
        if placement.is_partial():
            raise RuntimeError(
                f"gradients must be reduced before their norm is computed, got one of shape {tuple(tensor.shape)} with a "
                f"partial sum over mesh axis {axis}; run the backward of the last microbatch first"
            )
