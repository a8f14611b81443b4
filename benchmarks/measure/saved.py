"""What forward saves for backward, by the module that saves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class SavedTensor(NamedTuple):
    """A tensor that autograd keeps from forward to backward."""

    module: str
    """Name of the innermost module in whose forward it was saved."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    of_weights: bool
    """It lies in memory of the module's parameters, so it is not kept for backward alone."""


@dataclass
class Saved:
    """The tensors that one forward saved; each memory counts once, where it was saved first."""

    tensors: list[SavedTensor] = field(default_factory=list)

    def nbytes(self, *, of_weights: bool = False) -> int:
        """Return the bytes of all that lie in memory of weights, or of all others."""
        return sum(tensor.nbytes for tensor in self.tensors if tensor.of_weights == of_weights)


def saved_by_module(module: nn.Module, forward: Callable[[], Tensor], grad: Tensor | None) -> Saved:
    """Run a forward of the module and its backward, and return what the forward saved.

    Args:
        grad: the gradient of what ``forward`` gives; None: 1.
    """
    saved = Saved()
    inside: list[tuple[str, nn.Module]] = [("", module)]
    seen: set[tuple[int, int]] = set()

    def pack(tensor: Tensor) -> Tensor:
        name, owner = inside[-1]
        weights = _storages(owner)
        for part in _parts(tensor):
            storage = part.untyped_storage().data_ptr()
            # The engine's arena holds many tensors in one storage.
            key = (storage, int(part.storage_offset()) * part.element_size())
            if key not in seen:
                seen.add(key)
                nbytes = part.numel() * part.element_size()
                saved.tensors.append(SavedTensor(name, tuple(part.shape), part.dtype, nbytes, storage in weights))
        return tensor

    with _following(module, inside), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    output.backward(grad)
    return saved


def _storages(module: nn.Module) -> set[int]:
    """Return the addresses of the memory of the module's own parameters."""
    parameters = module.parameters(recurse=False)
    return {part.untyped_storage().data_ptr() for parameter in parameters for part in _parts(parameter)}


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a quantised tensor consists of, and any other as it is."""
    if type(tensor) in (Tensor, nn.Parameter):
        return [tensor]
    # transformer-engine's have no memory of their own, or that of one of their parts.
    return [value for value in vars(tensor).values() if type(value) in (Tensor, nn.Parameter)]


@contextmanager
def _following(module: nn.Module, inside: list[tuple[str, nn.Module]]) -> Iterator[None]:
    """Keep the modules whose forward runs on the stack ``inside``."""
    handles: list[Any] = []
    for name, child in module.named_modules():
        if child is module:
            continue
        entry = (name, child)
        handles.append(child.register_forward_pre_hook(lambda *_, entry=entry: inside.append(entry)))
        handles.append(child.register_forward_hook(lambda *_: inside.pop() and None, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
