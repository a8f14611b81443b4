"""Parameters that share memory with each other, which they would lose: each gets memory of its own when it is sharded."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.core.distributed.fsdp.buffers.parameter_group import is_ignored


class Stretch(NamedTuple):
    """Where a tensor lies in its storage.

    Args:
        name: of the tensor in its unit, for errors.
        trains: it is a parameter that requires gradients.
        moves: its values move to other memory when its unit is sharded.
        offset, stride: in bytes.
    """

    name: str
    trains: bool
    moves: bool
    storage: StorageWeakRef
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @property
    def end(self) -> int:
        return self.offset + self.itemsize + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        return self.itemsize * torch.Size(self.size).numel()


# By sharded unit, where its tensors have been before. The weak references of a stretch keep its storage's number from being given
# to another one.
_sharded: weakref.WeakKeyDictionary[Hashable, list[Stretch]] = weakref.WeakKeyDictionary()
# Those of trained parameters again, by the storage's number: a search through all units, for each unit, would be quadratic.
_trained_in: dict[int, list[tuple[weakref.ref[Hashable], Stretch]]] = {}


def stretches_of(modules: Sequence[tuple[str, nn.Module]]) -> list[Stretch]:
    """Return where the modules' parameters and buffers lie, each tensor once; those without memory of their own are left out."""
    seen: set[int] = set()
    found = []
    for prefix, module in modules:
        tensors: Iterable[tuple[str, torch.Tensor | None]] = (*module._parameters.items(), *module._buffers.items())
        for key, tensor in tensors:
            # What has a group is at rest in the engine's buffers.
            if tensor is None or id(tensor) in seen or hasattr(tensor, "_fsdp_group"):
                continue
            seen.add(id(tensor))
            moves = isinstance(tensor, nn.Parameter) and not is_ignored(tensor)
            local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
            try:
                # A weak reference keeps the number of the storage from being reused, not its memory.
                storage = StorageWeakRef(local.untyped_storage())
            except (NotImplementedError, RuntimeError):
                continue
            if local.numel():
                itemsize = local.element_size()
                found.append(
                    Stretch(
                        f"{prefix}.{key}" if prefix else key,
                        isinstance(tensor, nn.Parameter) and tensor.requires_grad,
                        moves,
                        storage,
                        int(local.storage_offset()) * itemsize,
                        tuple(local.shape),
                        tuple(step * itemsize for step in local.stride()),
                        itemsize,
                    )
                )
    return found


def refuse_aliases(stretches: Sequence[Stretch], nested: Collection[Hashable]) -> None:
    """Refuse tensors that share memory with a parameter that is trained, also one that was sharded before.

    Of units that are not ``nested`` in this one, only those that are both trained: a frozen model that was loaded from the same
    tensors as a trained one is meant to stay as it is.

    FSDP2 refuses what is not contiguous, such as the transposed one of two tied weights, and lets the others drift apart.

    Raises:
        NotImplementedError: two share memory, or elements of one do.
    """
    for new in stretches:
        if new.trains and new.moves and _has_overlap(new):
            raise NotImplementedError(
                f"parameter {new.name} must have memory for each element, got one of shape {list(new.size)} in which elements "
                "share memory (expand); keep the small tensor as the parameter, and expand it in forward"
            )
    # Nested units were compared with each other only where both are trained: this unit may train what was frozen with them.
    inside = list(stretches) + [stretch for unit in nested for stretch in _sharded.get(unit, ())]
    storages = {stretch.storage.cdata for stretch in inside}
    held = (entry for storage in storages for entry in _trained_in.get(storage, ()))
    outside = [stretch for reference, stretch in held if (unit := reference()) is not None and unit not in nested]
    for one, other in _neighbors(inside, outside):
        counts = (one.trains or other.trains) and (one.moves or other.moves)
        if counts and _overlap(one, other):
            raise NotImplementedError(
                f"{one.name} and {other.name} must not share memory, got views of one tensor, which would drift apart: each has "
                "memory of its own once it is sharded. Make them one parameter (decoder.weight = encoder.weight), compute one of "
                "the other in forward (weight.t()), or clone() one"
            )


def remember(stretches: Sequence[Stretch], unit: Hashable) -> None:
    """Keep where parameters of a unit have been, for ``refuse_aliases`` of later units."""
    _sharded[unit] = list(stretches)
    trained = [stretch for stretch in stretches if stretch.trains]
    for stretch in trained:
        _trained_in.setdefault(stretch.storage.cdata, []).append((weakref.ref(unit), stretch))
    # Not at exit: modules that the interpreter has taken down would raise there.
    weakref.finalize(unit, _forget, {stretch.storage.cdata for stretch in trained}).atexit = False


def _forget(storages: Iterable[int]) -> None:
    """Drop the entries of units that no longer exist."""
    for storage in storages:
        held = [entry for entry in _trained_in.pop(storage, ()) if entry[0]() is not None]
        if held:
            _trained_in[storage] = held


def _neighbors(inside: Sequence[Stretch], outside: Sequence[Stretch]) -> Iterator[tuple[Stretch, Stretch]]:
    """Yield pairs that may overlap: two of ``inside``, or a trained one of these and one of ``outside``."""
    by_storage: dict[int, list[tuple[Stretch, bool]]] = {}
    for stretches, is_inside in ((inside, True), (outside, False)):
        for stretch in stretches:
            by_storage.setdefault(stretch.storage.cdata, []).append((stretch, is_inside))
    for held in by_storage.values():
        held.sort(key=lambda pair: pair[0].offset)
        for at, (one, one_inside) in enumerate(held):
            for other, other_inside in held[at + 1 :]:
                if other.offset >= one.end:
                    break
                if (one_inside and other_inside) or (one_inside != other_inside and one.trains and other.trains):
                    yield one, other


def _overlap(one: Stretch, other: Stretch) -> bool:
    """Return whether two stretches whose ends cross, as those of neighbors do, have a byte in common."""
    if _is_dense(one) and _is_dense(other):
        return True
    begin, end = min(one.offset, other.offset), max(one.end, other.end)
    # One mark for each element where both have one grid of elements; bytes otherwise.
    unit = one.itemsize if one.itemsize == other.itemsize and not (one.offset - other.offset) % one.itemsize else 1
    marks = torch.zeros((end - begin) // unit, dtype=torch.bool, device="cpu")
    _bytes_of(one, marks, begin, unit).fill_(True)
    return bool(_bytes_of(other, marks, begin, unit).any())


def _has_overlap(one: Stretch) -> bool:
    if any(step == 0 for n, step in zip(one.size, one.stride, strict=True) if n > 1):
        return True
    if _is_dense(one):
        return False
    marks = torch.zeros((one.end - one.offset) // one.itemsize, dtype=torch.bool, device="cpu")
    _bytes_of(one, marks, one.offset, one.itemsize).fill_(True)
    return int(marks.sum()) * one.itemsize < one.nbytes


def _is_dense(one: Stretch) -> bool:
    return one.end - one.offset == one.nbytes


def _bytes_of(one: Stretch, marks: torch.Tensor, begin: int, unit: int) -> torch.Tensor:
    """Return the stretch's bytes, or its elements if ``unit`` is their size, among ``marks`` of those from ``begin`` on."""
    size, stride = (*one.size, one.itemsize // unit), (*(step // unit for step in one.stride), 1)
    return marks.as_strided(size, stride, (one.offset - begin) // unit)
