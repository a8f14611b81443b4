"""Makes ``gradient.data = value`` right on sharded gradients, and refuses ``parameter.data = value`` on sharded parameters.

torch takes both and changes the shell of the DTensor alone: the values, in its local tensor, stay, and some operations on it end
the process afterwards. A gradient takes the value's local tensor; the engine leaves the memory that it had to the user. A
parameter's memory is what is gathered. It is not served by a copy either, since who swaps weights (averaged ones, for an
evaluation) keeps ``parameter.data`` from before, which would be overwritten. What it has already, it may be given:
``parameter.data += 1`` ends with that.
Delete this file when torch refuses ``dtensor.data = value``.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.dtensor.random_fill import is_engines

_DATA: Any = torch.Tensor.data


def set_shell(tensor: torch.Tensor, value: DTensor) -> None:
    """Do what torch does for ``tensor.data = value``: take its dtype and shape; the caller replaces the local tensor."""
    _DATA.__set__(tensor, value)


def _get(self: DTensor) -> Any:
    return _DATA.__get__(self)


def _set(self: DTensor, value: Any) -> None:
    group = getattr(self, "_fsdp_group", lambda: None)()  # of sharded parameters alone; copies of them have none
    if group is not None:
        if not _is_same(self, value):
            _refuse(next((group.name_of(at) for at, own in enumerate(group.sharded) if own is self), "a parameter"))
        return
    grads = (getattr(self, "_fsdp_gradients", None) or (lambda: None))()  # of main gradients alone
    if grads is not None:
        grads.leave_main()
    _DATA.__set__(self, value)
    if is_engines(self) and isinstance(value, DTensor):
        self._local_tensor, self._spec = value._local_tensor, value._spec


def _is_same(tensor: DTensor, value: Any) -> bool:
    """Return whether ``value`` is the tensor's own memory, seen in the same way; alike on all ranks, also on those without rows."""
    if not isinstance(value, DTensor) or value._spec != tensor._spec:
        return False
    own, other = tensor._local_tensor, value._local_tensor
    return own.untyped_storage()._cdata == other.untyped_storage()._cdata and _view_of(own) == _view_of(other)


def _view_of(local: torch.Tensor) -> tuple[Any, ...]:
    return local.storage_offset(), local.shape, local.stride(), local.dtype


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"the data of the sharded parameter {name} must not be replaced, got an assignment to .data, which no forward would see; "
        "write to it in place: `with torch.no_grad(): parameter.copy_(value)` with a DTensor, load_state_dict with full tensors; to have "
        "the old values later, clone() them before"
    )


DTensor.data = property(_get, _set)  # type: ignore[assignment]
