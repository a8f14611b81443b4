"""The memory inside of tensor subclasses that wrap other tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def memory_of(tensor: torch.Tensor, *, writes: bool = True) -> torch.Tensor:
    """Return the plain tensor that holds a shard's values: the tensor itself, or the one that a subclass wraps.

    A subclass whose values are computed when they are read has a method ``fsdp_memory``, which returns memory that may be written.

    Args:
        writes: it may be written. Else a tensor that computes its values when it is read stays what it is.
    """
    if hasattr(type(tensor), "fsdp_memory"):
        return tensor.fsdp_memory() if writes else tensor  # type: ignore[attr-defined]
    while type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, key) for key in tensor.__tensor_flatten__()[0]]
        tensor = next(each for each in inner if looks_like(each, tensor))
    return tensor


def looks_like(inner: object, outer: torch.Tensor) -> bool:
    """Return whether ``inner`` is a tensor of the shape and dtype of ``outer``."""
    return isinstance(inner, torch.Tensor) and inner.shape == outer.shape and inner.dtype == outer.dtype


def leaves_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory of their own of which a wrapper subclass consists; the tensor itself if it is none."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for key in tensor.__tensor_flatten__()[0]:
        yield from leaves_of(getattr(tensor, key))
