"""Norms and counts over the whole model, each element counted once, without a host synchronisation.

A sharded tensor is a DTensor. Over the mesh axes where it is sharded each rank holds another part, so local results
are summed with one small all-reduce for each axis; over replicated axes all ranks hold the same values, which are
counted once by not summing there. Ranks may own no rows of a tensor: they take part in the sums all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_Sharding = tuple[DeviceMesh, tuple[int, ...]] | None


def get_grad_norm(params: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all gradients is in the [] fp32 tensor returned, on the device of the gradients.

    Args:
        params: parameters; those without a gradient are skipped.

    Ranks: all ranks of the gradients' meshes, with the same parameters in the same order; does not block the host.
    """
    return _sum_over_model(_gradients(params), _sum_of_squares).sqrt()


def get_params_norm(params: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all parameters is in the [] fp32 tensor returned. Ranks: as ``get_grad_norm``."""
    return _sum_over_model([param.detach() for param in params], _sum_of_squares).sqrt()


def count_zeros(params: Iterable[Tensor]) -> Tensor:
    """The number of zeros in all gradients is in the [] fp32 tensor returned. Ranks: as ``get_grad_norm``."""
    return _sum_over_model(_gradients(params), _number_of_zeros)


def clip_grad_by_total_norm(params: Iterable[Tensor], max_norm: float, total_norm: Tensor) -> None:
    """Gradients are scaled in place so that their norm is at most ``max_norm``.

    Args:
        total_norm: [] what ``get_grad_norm`` gave for these parameters. If it is NaN, so are the gradients.

    Ranks: local.
    """
    scale = torch.clamp(max_norm / (total_norm + 1.0e-6), max=1.0)
    for tensors in _by_dtype([_local(gradient) for gradient in _gradients(params)]):
        torch._foreach_mul_(tensors, scale.to(tensors[0].device))


def _gradients(params: Iterable[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


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


def _sum_over_model(tensors: Sequence[Tensor], measure: Callable[[Sequence[Tensor]], Tensor]) -> Tensor:
    """Sum ``measure`` over tensors: once per sharding locally, then over the axes of that sharding."""
    by_sharding: dict[_Sharding, list[Tensor]] = {}
    for tensor in tensors:
        by_sharding.setdefault(_sharding(tensor), []).append(_local(tensor))
    total = torch.zeros((), dtype=torch.float32, device=_local(tensors[0]).device if tensors else None)
    for sharding, locals_ in by_sharding.items():
        part = torch.zeros_like(total)
        for same_dtype in _by_dtype(locals_):
            part = part + measure(same_dtype)
        if sharding is not None:
            mesh, axes = sharding
            for axis in axes:
                dist.all_reduce(part, group=mesh.get_group(axis))
        total = total + part
    return total


def _sharding(tensor: Tensor) -> _Sharding:
    """The mesh and the axes over which ranks hold different parts of the tensor; None where all hold all of it."""
    if not isinstance(tensor, DTensor):
        return None
    axes = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise RuntimeError(
                f"gradients must be reduced before their norm is taken, got one of shape {tuple(tensor.shape)} with a "
                f"partial sum over mesh axis {axis}; run the backward of the last microbatch first"
            )
        if placement.is_shard() and tensor.device_mesh.size(axis) > 1:
            axes.append(axis)
    return (tensor.device_mesh, tuple(axes)) if axes else None
