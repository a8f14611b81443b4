"""Marks of tensors that were given memory and no values yet."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


@torch.no_grad()
def mark_unfilled(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor that holds no values with NaN, or with the smallest number of int32 and int64; return it."""
    mark = mark_of(tensor.dtype)
    return tensor if mark is None else tensor.fill_(mark)


@torch.no_grad()
def is_unfilled(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the meta device, or still holds what it was marked with."""
    tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    mark = mark_of(tensor.dtype)
    if tensor.is_meta or mark is None or tensor.numel() == 0:
        return tensor.is_meta
    if isinstance(mark, int):
        return bool((tensor == mark).all())
    # Of a large tensor that nobody has written the first element tells all. Tensors of other kinds may not let it be read.
    first = tensor[(0,) * tensor.dim()] if type(tensor) in (torch.Tensor, torch.nn.Parameter) else tensor
    return bool(first.isnan().any()) or bool(tensor.isnan().any())


def mark_of(dtype: torch.dtype) -> float | int | None:
    """Return what marks tensors of a dtype; None if nothing can."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).min if dtype in (torch.int32, torch.int64) else None
