"""Weights that somebody kept where autograd checks no version, and whose gradient comes after they were released."""

from __future__ import annotations

import gc
import sys
import weakref

import torch

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup

# A look at all of Python's objects takes long, and the same code comes here in each step.
_MAX_SEARCHES = 8


class KeptWeights:
    """Refuses gradients of released weights that are kept where autograd checks no version.

    What autograd saves has a version that resharding changes ([Note: version fence]). What a custom
    ``autograd.Function`` keeps on ``ctx``, and what ``saved_tensors_hooks`` have packed, has none, and its memory holds other weights
    by now. Backwards that come through a unit's outputs unshard it first.
    """

    def __init__(self) -> None:
        self._num_searches = 0
        self._at_rest: weakref.WeakKeyDictionary[FsdpParameterGroup, list[int]] = weakref.WeakKeyDictionary()

    def add(self, group: FsdpParameterGroup) -> None:
        """Count the references to the group's unsharded parameters [T]: at this time only their accumulation nodes hold some."""
        if group not in self._at_rest:
            self._at_rest[group] = list(map(sys.getrefcount, group.unsharded))

    def check(self, group: FsdpParameterGroup, arenas: list[torch.Tensor]) -> None:
        """Check that nobody kept the group's weights, of which a gradient has come that no output of the unit announced.

        Raises:
            RuntimeError: somebody did; the message names a weight.
        """
        if group.weights.is_unsharded or group not in self._at_rest or self._num_searches == _MAX_SEARCHES:
            return
        # References are cheap to count and find most; the search of all objects finds views, and is slow.
        self._num_searches += 1
        references = list(map(sys.getrefcount, group.unsharded))
        held = [index for index, number in enumerate(self._at_rest[group]) if references[index] > number]
        held += [] if held else _with_aliases(group, arenas)
        if held:
            raise RuntimeError(
                f"backward came to {group.name_of(held[0])} by another way than its unit's outputs, after the weight was released, and "
                "somebody kept the weight, or a tensor in its memory, where PyTorch checks no version (an autograd.Function on ctx, "
                "saved_tensors_hooks): the gradient may be computed with other weights. Use ctx.save_for_backward, return the tensor "
                "that the loss is made of from the unit's forward too, or keep the weights: fully_shard(..., reshard_after_forward=False)"
            )


def _with_aliases(group: FsdpParameterGroup, arenas: list[torch.Tensor]) -> list[int]:
    """Return the group's unsharded parameters [T] whose memory another tensor of Python's refers to, by number; slow."""
    weights = group.weights
    ours = [weights.full.local, *arenas, *group.unsharded, *(item for entry in weights._gathers for item in entry)]
    ours += [] if weights.full_storage is None else [weights.full_storage.flat]
    own = set(map(id, ours))
    others = [
        _span(tensor)
        for tensor in gc.get_objects()
        if type(tensor) in (torch.Tensor, torch.nn.Parameter)  # subclasses may have no memory, or hide it
        and id(tensor) not in own
    ]
    found = []
    for index, (memory, begin, end) in enumerate(map(_span, group.unsharded)):
        if any(span[0] == memory and span[1] < end and begin < span[2] for span in others):
            found.append(index)
    return found


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return the memory in which a tensor lies, and its first and last byte there."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return 0, 0, 0
    begin, numel = int(tensor.storage_offset()) * tensor.element_size(), max(int(tensor.numel()), 1)
    return tensor.untyped_storage()._cdata, begin, begin + numel * tensor.element_size()
