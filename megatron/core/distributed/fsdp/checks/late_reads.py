"""Reads of a unit's weights after the unit was left, which the debug mode turns into errors with a name.

``watch`` does so for reads by user code, of an unsharded weight or a tensor that shares its memory. ``explain_late_backwards``
does so for a backward that comes to resharded weights by a way that starts no unshard: autograd refuses it in any case
([Note: version fence]), but names no weight.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.buffers.weight_state import RESHARDED
from megatron.core.distributed.fsdp.dtensor.torch_shims import wrap_backward
from megatron.core.distributed.fsdp.runtime.unit import UnitRegistry

# ---- reads by user code ---------------------------------------------------------------------------------------------

# What makes another tensor over the same memory, or asks no values.
_READS_NOTHING = {"detach", "view", "view_as", "t", "transpose", "requires_grad_", "as_subclass", "register_hook"}
_READS_NOTHING |= {"size", "stride", "storage_offset", "dim", "numel", "data_ptr", "untyped_storage", "is_contiguous"}
_READS_NOTHING |= {"is_floating_point", "is_complex", "__get__", "__set__", "__delete__", "__hash__"}

_ASSIGNMENTS = {f"__i{name}__" for name in ("add", "and", "div", "mul", "or", "pow", "sub", "truediv", "xor")}
_ASSIGNMENTS |= {"__setitem__"}


@dataclass
class DebugCost:
    """What the debug mode has cost the host: operations on weights that were looked at, and seconds."""

    num_operations: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count an operation."""
        self.num_operations += 1
        self.seconds += seconds


@dataclass(frozen=True)
class _Watch:
    """The unsharded weight whose memory a tensor shares."""

    group: weakref.ref[FsdpParameterGroup]
    name: str
    cost: DebugCost

    def check(self, use: str, *, writes: bool) -> None:
        """Refuse a use after the weight's unit was left, and a write within its forward that resharding would lose."""
        group = self.group()
        if group is None:
            return
        weights = group.weights
        if not weights.holders.is_used:
            raise RuntimeError(
                f"the unsharded weight {self.name} must be read within the forward or backward of its unit, got {use!r} of it, or of a "
                "tensor that shares its memory, after it was released; clone() it there, read the sharded parameter, or call unshard() "
                "first"
            )
        if writes and weights.holders.forwards and weights.loses_writes:
            raise RuntimeError(
                f"forward must not write to the weights of its unit, got {use!r} of {self.name}, or of a tensor that shares its memory, "
                "which would be lost when they are resharded; write to the parameters between steps, or hold what forward updates in "
                "a buffer"
            )


class WatchedTensor(torch.Tensor):
    """A tensor that shares memory with an unsharded weight."""

    _fsdp_watch: _Watch

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Arguments of one nesting: lists of tensors (torch.cat). Deeper ones are no operation's.
        begin, name = time.perf_counter(), function.__name__
        found = [*args, *(kwargs or {}).values()]
        found += [item for value in found if isinstance(value, list | tuple) for item in value]
        watched = [value for value in found if isinstance(value, torch.Tensor) and hasattr(value, "_fsdp_watch")]
        if name not in _READS_NOTHING:
            # A trailing underscore marks an operation in place; Python's own names have two, and only some of them write.
            is_write = name in _ASSIGNMENTS if name.startswith("__") else name.endswith("_")
            for value in watched:
                value._fsdp_watch.check(name, writes=is_write and value is found[0])
        seconds = time.perf_counter() - begin
        # What the operation calls inside is not looked at again, and results are plain tensors but for views, marked below.
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
            begin = time.perf_counter()
            for item in result if isinstance(result, list | tuple) else (result,):
                for value in watched:
                    if type(item) is torch.Tensor and _storage_of(item) == _storage_of(value) != 0:
                        _mark(item, value._fsdp_watch, WatchedTensor)
        for value in watched[:1]:
            value._fsdp_watch.cost.add(seconds + time.perf_counter() - begin)
        return result


class WatchedWeight(WatchedTensor, nn.Parameter):
    """An unsharded weight."""


def watch(group: FsdpParameterGroup, cost: DebugCost) -> None:
    """Let reads of the group's unsharded weights fail, by name, when no forward or backward uses them.

    Raises (from such a read):
        RuntimeError: also of a tensor that was detached from the weight, or is a view of it.
    """
    for index, parameter in enumerate(group.unsharded if group.weights.needs_gather else ()):
        if type(parameter) is nn.Parameter:  # a subclass has operations of its own
            _mark(parameter, _Watch(weakref.ref(group), group.name_of(index), cost), WatchedWeight)


def _mark(tensor: Any, watch: _Watch, kind: type[WatchedTensor]) -> None:
    # The class changes in place: the group, modules and callers refer to this very object, which no other one can replace.
    tensor.__class__, tensor._fsdp_watch = kind, watch


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


# ---- late backwards -------------------------------------------------------------------------------------------------

_MARK = f"is at version {RESHARDED}; expected version"
"""Of autograd's error for a tensor whose version counter went back, which only resharding does: [Note: version fence]."""

# Weak: the wrapped entry point lives as long as the process, and must keep no model.
_registries: weakref.WeakSet[UnitRegistry] = weakref.WeakSet()


def explain_late_backwards(registry: UnitRegistry) -> None:
    """Let backwards that meet resharded weights of these units end in an error that names the unit and what to do.

    Only the debug mode calls this, since it wraps autograd's entry point: torch has no hook for a backward that raises.
    """
    _wrap_autograd()
    _registries.add(registry)


@functools.cache
def _wrap_autograd() -> None:
    wrap_backward(_explained)


def _explained(run: Any) -> Any:
    def run_backward(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        inputs = args[3] if len(args) > 3 else ()
        if inputs and kwargs.get("accumulate_grad"):
            _refuse_no_gradients(inputs, [None] * len(inputs))
        try:
            found = run(roots, *args, **kwargs)
            if inputs and not kwargs.get("accumulate_grad"):
                _refuse_no_gradients(inputs, found)
            return found
        # Only the message is PyTorch's: it has no class for a failed comparison of versions. See [Note: version fence].
        except RuntimeError as error:
            text = str(error)
            if _MARK not in text or "reshard_after_forward=False" in text:  # else by a backward inside of this one
                raise
            raise RuntimeError(f"{_explanation(roots)}. PyTorch says: {error}") from error

    return run_backward


def _refuse_no_gradients(inputs: Sequence[Any], found: Sequence[Any]) -> None:
    """Refuse a backward that was asked for gradients of sharded parameters, none of which is in its graph.

    Args:
        found: the gradients of the inputs.
    """
    missing = []
    for tensor, grad in zip(inputs, found, strict=True):
        group = group_of(tensor)
        at = None if group is None else next((i for i, own in enumerate(group.sharded) if own is tensor), None)
        if group is not None and at is not None:
            if grad is not None:
                return
            missing.append(group.name_of(at))
    if missing:
        raise RuntimeError(
            f"gradients of sharded parameters must be computed by backward() without inputs, got inputs with {missing[0]}, which is not "
            "in the graph: forward computes with unsharded weights. Call backward() and read param.grad; requires_grad_(False) "
            "leaves parameters out"
        )


def _explanation(roots: Sequence[Any]) -> str:
    found = _late_weights(roots)
    names = {weight: unit for unit, weight in found}
    what = (
        f"weights of the unit {' or '.join(dict.fromkeys(names.values()))} ({' or '.join(names)})"
        if found
        else "a unit's weights"
    )
    units = " or ".join(dict.fromkeys(names.values())) or "that unit"
    return (
        f"backward must come to a unit's weights through what the unit's forward returned, which unshards them; it came to {what} by "
        "another way, after they were resharded: through a tensor that forward left elsewhere (on the module, in a cache of keys and "
        "values), or returned in an object that torch's pytree does not know, or through a gradient of create_graph=True. Return that tensor from the unit's forward too, or keep the weights: "
        f"fully_shard(..., reshard_after_forward=False) for {units}"
    )


def _late_weights(roots: Sequence[Any]) -> list[tuple[str, str]]:
    """Return (unit, weight) of the resharded weight that a backward from these roots needed first; several where they share memory."""
    nodes = sorted(_nodes(roots), key=lambda node: -node._sequence_nr())  # the order in which autograd runs them
    for node in nodes:
        for tensor in _waiting(node):
            weights = [] if tensor._version != RESHARDED else _weights_at(tensor)
            reached = {id(after.variable) for after, _ in _around(node) if hasattr(after, "variable")}
            own = [(unit, weight) for unit, weight, parameter in weights if id(parameter) in reached]
            # Several weights may share a range of the arena. Prefer those whose gradients this node computes.
            if weights:
                return own or [(unit, weight) for unit, weight, _ in weights]
    return []


def _nodes(roots: Sequence[Any]) -> set[Any]:
    # A stack, since graphs are deeper than Python's recursion.
    waiting = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in roots]
    found: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found.add(node)
            waiting += [after for after, _ in node.next_functions]
    return {node for node in found if not hasattr(node, "variable")}  # a leaf's node saves nothing


def _around(node: Any) -> Iterator[tuple[Any, int]]:
    """Yield what the node passes gradients to, and what that does: a weight may be transposed before it is multiplied."""
    for after, index in node.next_functions:
        yield after, index
        yield from getattr(after, "next_functions", ())


def _waiting(node: Any) -> Iterator[torch.Tensor]:
    """Yield what the node saved and has not given back, without the check of versions; none that hooks have packed."""
    saved = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
    for one in saved:
        for tensor in one if isinstance(one, tuple | list) else (one,):
            seen: list[torch.Tensor] = []
            try:  # the graph is lost: what its tensors are packed into does not matter any more
                tensor.register_hooks(lambda value, seen=seen: seen.append(value) or value, lambda value: value)
            except (RuntimeError, AttributeError):
                continue
            yield from seen


def _weights_at(tensor: torch.Tensor) -> list[tuple[str, str, torch.Tensor]]:
    """Return (unit, name, parameter) of the resharded weights whose memory this tensor is."""
    place = _place(tensor)
    return [
        (registry.owner(group).name, group.name_of(index), parameter)
        for registry in list(_registries)
        for group in registry.groups
        if not group.weights.is_unsharded
        for index, parameter in enumerate(group.unsharded)
        if _place(parameter) == place
    ]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()
