"""Finds who kept an unsharded weight that was released, when a gradient comes that may be computed with it."""

from __future__ import annotations

import gc
from types import FrameType, GeneratorType
from typing import Any

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup

# Looks at all of Python's objects take long, and the same code comes here in each step.
_MAX_SEARCHES = 8


class KeptWeights:
    """Refuses gradients of released weights that a custom ``autograd.Function`` kept without ``save_for_backward``.

    What autograd saves has a version that resharding changes ([Note: version fence] in DESIGN.md); what users keep on ``ctx`` or in
    a closure has none, and its memory holds other weights by then. Backwards that come through a unit's outputs unshard it first.
    """

    def __init__(self) -> None:
        self._num_searches = 0

    def check(self, group: FsdpParameterGroup, arenas: list[torch.Tensor]) -> None:
        """Check that nobody kept the group's weights, of which a gradient has come that no output of the unit announced.

        Raises:
            RuntimeError: somebody did; the message names a weight and who kept it.
        """
        if group.weights.is_unsharded or self._num_searches == _MAX_SEARCHES:
            return
        self._num_searches += 1
        for name, holder in _holders(group, arenas):
            kind = type(holder).__name__
            raise RuntimeError(
                f"backward came to {name} by another way than its unit's outputs, after the weight was released, and "
                f"{f'the autograd.Function {kind}' if _is_function(holder) else f'a {kind}'} kept it, so that the gradient may be computed "
                "with other weights. Use ctx.save_for_backward, return the tensor that the loss is made of from the unit's forward "
                "too, or keep the weights: fully_shard(..., reshard_after_forward=False)"
            )


def _holders(group: FsdpParameterGroup, arenas: list[torch.Tensor]) -> list[tuple[str, Any]]:
    """Return (weight, object) for the user's objects that hold an unsharded weight of the group, or a tensor in its memory; slow."""
    weights, objects = group.weights, gc.get_objects()
    parts = (
        group,
        weights,
        weights.full,
        weights.full_storage,
        group.param_slots,
        *([group.grads] if group.trainable else ()),
    )
    values = [value for part in parts if part is not None for value in vars(part).values()]
    values += [value for entry in weights._gathers for value in (entry, *entry)]
    kept: list[torch.Tensor] = list(group.unsharded)
    own = set(map(id, (objects, kept, *values, *group.param_slots.holders, *arenas)))
    names = {id(parameter): group.name_of(index) for index, parameter in enumerate(kept)}
    spans = [(_span(parameter), group.name_of(index)) for index, parameter in enumerate(kept)]
    for tensor in objects:
        # Subclasses may have no memory, or hide it.
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and id(tensor) not in own and id(tensor) not in names:
            place = _span(tensor)
            found = [name for span, name in spans if span[0] == place[0] and place[1] < span[2] and span[1] < place[2]]
            if found:
                names[id(tensor)] = found[0]
                kept.append(tensor)
    functions = {id(vars(holder)): holder for holder in objects if _is_function(holder)}
    holders: list[tuple[str, Any]] = []
    for referrer in gc.get_referrers(*kept):
        if id(referrer) not in own and not isinstance(referrer, FrameType | GeneratorType):
            name = next(names[id(item)] for item in gc.get_referents(referrer) if id(item) in names)
            holders.append((name, functions.get(id(referrer), referrer)))
    return holders


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the memory in which a tensor lies, and its first and last byte there."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return 0, 0, 0
    begin, numel = int(tensor.storage_offset()) * tensor.element_size(), max(int(tensor.numel()), 1)
    return tensor.untyped_storage()._cdata, begin, begin + numel * tensor.element_size()


def _is_function(holder: object) -> bool:
    return issubclass(type(holder), torch._C._FunctionBase)
