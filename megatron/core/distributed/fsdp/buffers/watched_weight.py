"""Unsharded weights under the debug mode: reading one, or a tensor that shares its memory, after its unit was left is an error."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup

# What makes another tensor over the same memory, or asks no values.
_READS_NOTHING = frozenset(
    {
        "detach",
        "view",
        "view_as",
        "t",
        "transpose",
        "requires_grad_",
        "size",
        "stride",
        "storage_offset",
        "dim",
        "numel",
    }
    | {
        "data_ptr",
        "untyped_storage",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "register_hook",
        "as_subclass",
    }
    | {"__get__", "__set__", "__delete__", "__hash__"}
)


_ASSIGNMENTS = frozenset(
    {"__setitem__", *(f"__i{name}__" for name in ("add", "and", "div", "mul", "or", "pow", "sub", "truediv", "xor"))}
)


@dataclass
class DebugCost:
    """What the debug mode has cost the host: operations on weights that were looked at, and seconds."""

    num_operations: int = 0
    seconds: float = 0.0


class WatchedTensor(torch.Tensor):
    """A tensor that shares memory with an unsharded weight."""

    _fsdp_watch: tuple[weakref.ref[FsdpParameterGroup], str, DebugCost]

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        begin = time.perf_counter()
        found = [*args, *(kwargs or {}).values()]
        found += [item for value in found if isinstance(value, list | tuple) for item in value]
        watched = [value for value in found if isinstance(value, torch.Tensor) and hasattr(value, "_fsdp_watch")]
        if function.__name__ not in _READS_NOTHING:
            for value in watched:
                _check(value, function.__name__)
            if watched and found and watched[0] is found[0] and _writes(function.__name__):
                _refuse_write(watched[0], function.__name__)
        seconds = time.perf_counter() - begin
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            begin = time.perf_counter()
            for value in watched:
                _watch_aliases(result, value)
        for value in watched[:1]:
            cost = value._fsdp_watch[2]
            cost.num_operations += 1
            cost.seconds += seconds + time.perf_counter() - begin
        return result


class WatchedWeight(WatchedTensor, nn.Parameter):
    """An unsharded weight."""


def watch(group: FsdpParameterGroup, cost: DebugCost) -> None:
    """Let reads of the group's unsharded weights fail, by name, when no forward or backward uses them.

    Raises (from such a read):
        RuntimeError: also of a tensor that was detached from the weight, or is a view of it.
    """
    if not group.weights.needs_gather:
        return
    for index, parameter in enumerate(group.unsharded):
        if type(parameter) is not nn.Parameter:
            continue  # a subclass has operations of its own
        parameter._fsdp_watch = (weakref.ref(group), group.name_of(index), cost)  # type: ignore[attr-defined]
        parameter.__class__ = WatchedWeight


def _check(value: Any, use: str) -> None:
    reference, name, _ = value._fsdp_watch
    group = reference()
    if group is None:
        return
    weights = group.weights
    if not (weights.num_forwards or weights.num_backwards or weights.held_by_user):
        raise RuntimeError(
            f"the unsharded weight {name} must be read within the forward or backward of its unit, got {use!r} of it, or of a tensor "
            "that shares its memory, after it was released; clone() it there, read the sharded parameter, or call unshard() first"
        )


def _writes(name: str) -> bool:
    """Return whether an operation of this name writes to its first argument: ``clamp_``, ``__iadd__``."""
    return name in _ASSIGNMENTS if name.startswith("__") else name.endswith("_")


def _refuse_write(value: Any, use: str) -> None:
    reference, name, _ = value._fsdp_watch
    group = reference()
    if group is not None and group.weights.num_forwards and group.weights.loses_writes:
        raise RuntimeError(
            f"forward must not write to the weights of its unit, got {use!r} of {name}, or of a tensor that shares its memory, which "
            "would be lost when they are resharded; write to the parameters between steps, or hold what forward updates in a buffer"
        )


def _watch_aliases(result: Any, value: Any) -> None:
    for item in result if isinstance(result, list | tuple) else (result,):
        if type(item) is torch.Tensor and _storage_of(item) == _storage_of(value) != 0:
            item.__class__ = WatchedTensor
            item._fsdp_watch = value._fsdp_watch  # type: ignore[attr-defined]


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
