"""Copies and pickles of DTensors whose local tensors are parts of larger buffers.

``copy.deepcopy`` and ``pickle`` take a DTensor that begins behind the start of its local tensor's storage for a tensor with
memory of its own, and fail. Ours all lie in flat buffers. A copy has memory of its own, is placed alike, and belongs to no
group: who trains it trains a copy, as with any tensor.
Delete this file when ``copy.deepcopy(DTensor.from_local(flat[8:], ...))`` works.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.codec.hooked_tensor import memory_of


def _apart(tensor: DTensor) -> DTensor:
    """Return a copy with memory of its own and the same attributes, but for weak references to what is not copied."""
    local = memory_of(tensor._local_tensor, writes=False).detach().clone(memory_format=torch.contiguous_format)
    found = DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    found.requires_grad_(tensor.requires_grad)
    found.__dict__.update(
        (name, value) for name, value in tensor.__dict__.items() if not isinstance(value, weakref.ref)
    )
    return found


def _is_part(tensor: DTensor) -> bool:
    local = memory_of(tensor._local_tensor, writes=False)
    holds_references = any(isinstance(value, weakref.ref) for value in tensor.__dict__.values())
    return holds_references or local.untyped_storage().nbytes() != local.nbytes


def _patch_dtensor() -> None:
    reduce_ex, deepcopy = DTensor.__reduce_ex__, DTensor.__deepcopy__

    def reduce_apart(self: DTensor, protocol: Any) -> Any:
        return reduce_ex(_apart(self) if _is_part(self) else self, protocol)

    def deepcopy_apart(self: DTensor, memo: dict[int, Any]) -> Any:
        if not _is_part(self) or not self.is_leaf:
            return deepcopy(self, memo)
        if id(self) not in memo:
            memo[id(self)] = found = _apart(self)
            found.__dict__ = copy.deepcopy(found.__dict__, memo)
            if self.grad is not None:
                found.grad_dtype = None if self.grad.dtype != self.dtype else found.dtype
                found.grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]

    DTensor.__reduce_ex__ = reduce_apart  # type: ignore[method-assign, assignment]
    DTensor.__deepcopy__ = deepcopy_apart  # type: ignore[method-assign, assignment]


_patch_dtensor()
