"""Refuses ``parameter.data = value`` on sharded parameters.

torch takes it and changes the shell of the DTensor alone: the values, in its local tensor, stay, and some operations on it end
the process afterwards. It is not served by a copy either, since who swaps weights (averaged ones, for an evaluation) keeps
``parameter.data`` from before, which would be overwritten.
Delete this file when torch refuses ``dtensor.data = value``.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

_DATA: Any = torch.Tensor.data


def set_shell(tensor: torch.Tensor, value: DTensor) -> None:
    """Do what torch does for ``tensor.data = value``: take its dtype and shape; the caller replaces the local tensor."""
    _DATA.__set__(tensor, value)


def _get(self: DTensor) -> Any:
    return _DATA.__get__(self)


def _set(self: DTensor, value: Any) -> None:
    group = getattr(self, "_fsdp_group", lambda: None)()  # of sharded parameters alone; copies of them have none
    if group is None:
        _DATA.__set__(self, value)
    else:
        _refuse(next((group.name_of(at) for at, own in enumerate(group.sharded) if own is self), "a parameter"))


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"the data of the sharded parameter {name} must not be replaced, got an assignment to .data, which no forward would see; "
        "write to it in place: `with torch.no_grad(): parameter.copy_(value)` with a DTensor, load_state_dict with full tensors; to have "
        "the old values later, clone() them before"
    )


DTensor.data = property(_get, _set)  # type: ignore[assignment]
