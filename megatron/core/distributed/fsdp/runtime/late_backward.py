"""What is said of a backward that comes to a unit's weights after they were resharded, by a way that starts no unshard."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import group_of
from megatron.core.distributed.fsdp.buffers.weights import RESHARDED
from megatron.core.distributed.fsdp.runtime.unit import UnitRegistry

_MARK = f"is at version {RESHARDED}; expected version"
"""Of autograd's error for a tensor whose version counter went back, which only resharding does: [Note: version fence]."""

_registries: weakref.WeakSet[UnitRegistry] = weakref.WeakSet()


def explain_late_backwards(registry: UnitRegistry) -> None:
    """Let backwards that meet resharded weights of these units end in an error that names the unit and what to do."""
    _registries.add(registry)


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
            if weights:
                return own or [(unit, weight) for unit, weight, _ in weights]
    return []


def _nodes(roots: Sequence[Any]) -> set[Any]:
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


torch.autograd._engine_run_backward = _explained(torch.autograd._engine_run_backward)
