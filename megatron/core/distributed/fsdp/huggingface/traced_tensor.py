"""Tensors without values that remember where their elements come from.

Hugging Face's models say in code how tensors of their files become parameters: stacks, halves, transposed matrices. That code
runs on these tensors here, so that a rank learns which bytes of a file its rows are, and reads no others. What is no move of
boxes is remembered as a calculation, for which whole tensors are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from megatron.core.distributed.fsdp.checkpoint import Part

_aten = torch.ops.aten
_SAME = (
    _aten.clone.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten._to_copy.default,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.unsqueeze.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
)

_RANGES = (
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.slice.Tensor,
    _aten.narrow.default,
    _aten.select.int,
    _aten.unbind.int,
)


@dataclass(frozen=True)
class _Call:
    """An operation whose result, or whose ``index``-th result, a tensor is."""

    op: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int


class TracedTensor(torch.Tensor):
    """A tensor without values, with its origin.

    Attributes:
        parts: the boxes that it consists of and where they lie in named tensors; None if it is calculated.
        origin: the name of the tensor that it is, or the call that returned it.
    """

    parts: list[Part] | None
    origin: str | _Call
    shadow: torch.Tensor

    @staticmethod
    def make(shadow: torch.Tensor, parts: list[Part] | None, origin: str | _Call) -> TracedTensor:
        """Return a tensor of the shape and dtype of ``shadow``, which is on the meta device."""
        made = torch.Tensor._make_wrapper_subclass(
            TracedTensor, shadow.shape, strides=shadow.stride(), dtype=shadow.dtype, device=shadow.device
        )
        made.shadow, made.parts, made.origin = shadow, parts, origin
        return made

    @staticmethod
    def named(name: str, size: torch.Size, dtype: torch.dtype) -> TracedTensor:
        """Return the whole of a named tensor."""
        start = (0,) * len(size)
        shadow = torch.empty(size, dtype=dtype, device="meta")
        return TracedTensor.make(shadow, [Part(start, tuple(size), name, start)], name)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"TracedTensor(shape={list(self.shape)}, parts={self.parts})"

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if op._schema.is_mutable:
            raise NotImplementedError(f"a conversion of weights must make new tensors, got {op}, which writes to one")
        shadows = tree_map_only(TracedTensor, lambda t: t.shadow, (args, kwargs))
        results, structure = tree_flatten(op(*shadows[0], **shadows[1]))
        moved = _moved(op, args, kwargs, results)
        return tree_unflatten(
            [
                TracedTensor.make(result, parts, _Call(op, args, kwargs, index))
                for index, (result, parts) in enumerate(zip(results, moved, strict=True))
            ],
            structure,
        )


def sources_of(tensor: TracedTensor) -> list[str]:
    """Return the names of the tensors that a tensor's elements come from, each once."""
    if isinstance(tensor.origin, str):
        return [tensor.origin]
    leaves, _ = tree_flatten((tensor.origin.args, tensor.origin.kwargs))
    return list(dict.fromkeys(name for t in leaves if isinstance(t, TracedTensor) for name in sources_of(t)))


def computed(tensor: TracedTensor, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """Calculate a tensor's values out of whole named ones."""
    if isinstance(tensor.origin, str):
        return read(tensor.origin)
    call = tensor.origin
    args, kwargs = tree_map_only(TracedTensor, lambda t: computed(t, read), (call.args, call.kwargs))
    kwargs.pop("device", None)  # that of the values
    results, _ = tree_flatten(call.op(*args, **kwargs))
    return results[call.index]


def _moved(op: Any, args: Any, kwargs: Any, results: Sequence[torch.Tensor]) -> list[list[Part] | None]:
    """Return the parts of each of an operation's results; None of those that are no moves of boxes."""
    leaves, _ = tree_flatten((args, kwargs))
    traced = [t for t in leaves if isinstance(t, TracedTensor)]
    if any(t.parts is None for t in traced):
        return [None] * len(results)
    first, before = traced[0].parts or [], traced[0].shadow
    shape = tuple(before.shape)
    if op in _SAME and before.dtype == kwargs.get("dtype", before.dtype):
        return [_with_leading(first, shape, result.shape) for result in results]
    if op in (_aten.cat.default, _aten.stack.default):
        return [_joined(traced, _argument(op, args, kwargs, "dim"), stacks=op is _aten.stack.default)]
    if op in _RANGES and (op is not _aten.slice.Tensor or _argument(op, args, kwargs, "step") == 1):
        dim = _argument(op, args, kwargs, "dim") % len(shape)
        found = []
        for result in results:
            # Results are views: the place in the memory of the whole says where the range begins.
            start = (result.storage_offset() - before.storage_offset()) // before.stride(dim)
            length = result.shape[dim] if result.dim() == len(shape) else 1
            rest = (*shape[:dim], length, *shape[dim + 1 :])
            found.append(_with_leading(_cut(first, dim, start, length), rest, result.shape))
        return found
    if op in (_aten.transpose.int, _aten.t.default, _aten.permute.default):
        return [_transposed(first, before, results[0])]
    return [None] * len(results)


def _argument(op: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Return an argument of a call by its name, or its default."""
    for index, argument in enumerate(op._schema.arguments):
        if argument.name == name:
            return args[index] if index < len(args) else kwargs.get(name, argument.default_value)
    raise AssertionError(f"{op} has no argument {name}")


def _with_leading(parts: list[Part], shape: tuple[int, ...], size: Sequence[int]) -> list[Part] | None:
    """Return the parts in a shape that has more or fewer dims of length one in front; None for another shape."""
    core = tuple(size)
    more = len(size) - len(shape)
    if more >= 0 and core == (1,) * more + shape:
        return [p._replace(offsets=(0,) * more + p.offsets, sizes=(1,) * more + p.sizes) for p in parts]
    if more < 0 and shape == (1,) * -more + core:
        return [p._replace(offsets=p.offsets[-more:], sizes=p.sizes[-more:]) for p in parts]
    return None


def _joined(tensors: Sequence[TracedTensor], dim: int, *, stacks: bool) -> list[Part] | None:
    num_dims = tensors[0].dim() + stacks
    dim %= num_dims
    if stacks and dim != 0:
        return None
    found, start = [], 0
    for tensor in tensors:
        shape = tuple(tensor.shape)
        parts = tensor.parts or []
        if stacks:
            parts, shape = _with_leading(parts, shape, (1, *shape)) or [], (1, *shape)
        for part in parts:
            offsets = list(part.offsets)
            offsets[dim] += start
            found.append(part._replace(offsets=tuple(offsets)))
        start += shape[dim]
    return found


def _cut(parts: Sequence[Part], dim: int, start: int, length: int) -> list[Part]:
    """Return what lies in a range of one dim, whose beginning becomes 0."""
    found = []
    for part in parts:
        begin = max(part.offsets[dim], start)
        end = min(part.offsets[dim] + part.sizes[dim], start + length)
        if end <= begin:
            continue
        begins, sizes = list(part.offsets), list(part.sizes)
        begins[dim], sizes[dim] = begin, end - begin
        cut = part.cut(begins, sizes)
        offsets = list(cut.offsets)
        offsets[dim] -= start
        found.append(cut._replace(offsets=tuple(offsets)))
    return found


def _transposed(parts: list[Part], before: torch.Tensor, after: torch.Tensor) -> list[Part] | None:
    """Return the parts of a view with dims in another order; None unless it swaps the last two, or keeps all."""

    def swapped(values: Sequence[int]) -> tuple[int, ...]:
        return (*values[:-2], *reversed(values[-2:]))

    if (after.shape, after.stride()) == (before.shape, before.stride()):
        return parts
    is_swap = (tuple(after.shape), after.stride()) == (swapped(before.shape), swapped(before.stride()))
    if not is_swap or any(len(p.begin) < 2 for p in parts):
        return None
    return [p._replace(offsets=swapped(p.offsets), sizes=swapped(p.sizes), transposed=not p.transposed) for p in parts]
