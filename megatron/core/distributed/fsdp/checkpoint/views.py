"""Views: tensors that another program stored under other names and in other layouts, read as if they were ours.

A layout differs in boxes: rows of three matrices in turn, halves of one, an expert of a stack, a transposed matrix. So a view
is a list of boxes of a tensor and where the elements of each lie in a stored tensor, and what is added to them. Nothing is held in memory but what
is asked for, and the inverse of a table of views writes what the table reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron.core.distributed.fsdp.checkpoint.chunks import Chunk
from megatron.core.distributed.fsdp.checkpoint.description import Place, StoredTensor, StoredValue
from megatron.core.distributed.fsdp.checkpoint.reader import ReadPlan, TensorReader


class Part(NamedTuple):
    """A box of a view, and the box of a stored tensor that has its elements.

    Where one of the two has more dims, its first ones have length 1 in the box.

    Args:
        offsets: indices in the view at which the box begins.
        sizes: shape of the box in the view.
        source: name of the stored tensor.
        begin: indices in the stored tensor at which its box begins.
        transposed: the last two dims of the stored box are those of the view's, swapped.
        is_copy: the elements are another part's too, which is the one that is written.
        shift: what is added to the stored elements to give the view's.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    source: str
    begin: tuple[int, ...]
    transposed: bool = False
    is_copy: bool = False
    shift: float = 0.0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Shape of the box in the stored tensor."""
        core = self.sizes[max(len(self.sizes) - len(self.begin), 0) :]
        core = (*core[:-2], core[-1], core[-2]) if self.transposed else core
        return (1,) * (len(self.begin) - len(core)) + core

    def cut(self, begins: Sequence[int], sizes: Sequence[int]) -> Part:
        """Return the part of a box of the view, given by indices in the view, which lies within this part's."""
        delta = tuple(begin - own for begin, own in zip(begins, self.offsets, strict=True))
        moved = delta[max(len(delta) - len(self.begin), 0) :]
        moved = (*moved[:-2], moved[-1], moved[-2]) if self.transposed else moved
        moved = (0,) * (len(self.begin) - len(moved)) + moved
        begin = tuple(own + more for own, more in zip(self.begin, moved, strict=True))
        return self._replace(offsets=tuple(begins), sizes=tuple(sizes), begin=begin)

    def of_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory of the view's box in the shape of the stored one."""
        for _ in range(len(self.sizes) - len(self.begin)):
            tensor = tensor.squeeze(0)
        if self.transposed:
            tensor = tensor.transpose(-1, -2)
        for _ in range(len(self.begin) - len(self.sizes)):
            tensor = tensor.unsqueeze(0)
        return tensor


@dataclass(frozen=True)
class View:
    """A tensor that is read from parts of stored ones.

    Args:
        size: its shape.
        dtype: None: that of its first part.
        parts: boxes that cover it, unless ``fill`` is given.
        fill: the value of all elements, of a tensor that has no parts.
    """

    size: torch.Size
    parts: Sequence[Part] = ()
    dtype: torch.dtype | None = None
    fill: float | None = None


Views = Mapping[str, View]


class ViewReader(TensorReader):
    """Reads views of what another reader reads.

    Args:
        source: reads the stored tensors.
        views: by name; all that they name must be in ``source``.
        plain: plain values by name.
        keeps: names of tensors and plain values of ``source`` that are read as they are.
    """

    def __init__(
        self, source: TensorReader, views: Views, plain: Mapping[str, Any] | None = None, *, keeps: Sequence[str] = ()
    ) -> None:
        kept = {name: source.entries[name] for name in keeps}
        same = {name: identity(name, entry) for name, entry in kept.items() if isinstance(entry, StoredTensor)}
        self.source, self.views, self.plain = source, {**views, **same}, dict(plain or {})
        views = self.views
        self.entries = {name: StoredTensor(self._dtype(view), view.size, []) for name, view in views.items()}
        self.entries |= {name: StoredValue(Place("", 0, 0)) for name in self.plain}
        self.entries |= {name: entry for name, entry in kept.items() if isinstance(entry, StoredValue)}

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        kept = self.source.values([name for name in names if name not in self.plain])
        return {name: self.plain[name] if name in self.plain else kept[name] for name in names}

    def whole_nbytes(self, names: Sequence[str]) -> int:
        parts = [part for name in names for part in self.views[name].parts]
        # Rows of a transposed matrix are columns of the stored one, whose rows are read for them.
        transposed = (self.source.entries[part.source] for part in parts if part.transposed)
        nbytes = [entry.numel * entry.dtype.itemsize for entry in transposed if isinstance(entry, StoredTensor)]
        return max([self.source.whole_nbytes(list(dict.fromkeys(part.source for part in parts))), *nbytes])

    def plan_parts(self, chunks: Sequence[Chunk]) -> ReadPlan:
        wanted: list[Chunk] = []
        then: list[Callable[[], Any]] = []
        for chunk in chunks:
            view = self.views[chunk.name]
            if view.fill is not None:
                then.append(partial(chunk.local.detach().fill_, view.fill))
            for part, target in _cut(view.parts, chunk):
                size = self.source.entries[part.source].size  # type: ignore[union-attr]
                wanted.append(Chunk(part.source, size, torch.Size(part.begin), part.of_view(target)))
                if part.shift:
                    then.append(partial(target.add_, part.shift))
        plan = self.source.plan_parts(wanted)
        plan.then += then
        return plan

    def _dtype(self, view: View) -> torch.dtype:
        if view.dtype is not None:
            return view.dtype
        return self.source.entries[view.parts[0].source].dtype if view.parts else torch.float32  # type: ignore[union-attr]


def stored_sizes(views: Views) -> dict[str, torch.Size]:
    """Return the shapes that stored tensors must have at least, so that all parts of the views lie in them."""
    sizes: dict[str, torch.Size] = {}
    for part in (part for view in views.values() for part in view.parts):
        ends = torch.Size(begin + length for begin, length in zip(part.begin, part.lengths, strict=True))
        known = sizes.get(part.source, ends)
        sizes[part.source] = torch.Size(map(max, known, ends))
    return sizes


def _written_sizes(views: Views) -> dict[str, torch.Size]:
    """Return the shapes of the stored tensors that are written, to which copies do not belong."""
    return stored_sizes({name: replace(view, parts=_own(view.parts)) for name, view in views.items()})


def inverse(views: Views) -> dict[str, View]:
    """Return the stored tensors as views of the views: what is written where these are read."""
    parts: dict[str, list[Part]] = {}
    for name, view in views.items():
        for part in _own(view.parts):
            own = Part(part.begin, part.lengths, name, part.offsets, part.transposed, shift=-part.shift)
            parts.setdefault(part.source, []).append(own)
    sizes = _written_sizes(views)
    return {name: View(sizes[name], found) for name, found in parts.items()}


@dataclass(frozen=True)
class ForeignLayout:
    """How a checkpoint is written for another program: its names and layouts in place of ours, and what else it expects.

    Args:
        views: our tensors as views of that program's. Tensors without a view keep their names.
        values: returns further plain values by name, of the optimizer's plain values; {} where none is saved.
        aliases: further names of tensors that are written, by their own names, of those that are.
        files: further files of the folder by name.
        value_suffix: of the names of plain values; "" or ``OBJECT``, which readers take off again.
    """

    views: Views
    values: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda optimizer: {}
    aliases: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    value_suffix: str = ""
    _sizes: dict[str, torch.Size] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sizes", _written_sizes(self.views))

    def sizes(self, sizes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
        """Return the shapes of all tensors into which tensors of these names and shapes turn."""
        found = {name: size for name, size in sizes.items() if name not in self.views}
        parts = (part for name in sizes if name in self.views for part in _own(self.views[name].parts))
        return found | {part.source: self._sizes[part.source] for part in parts}

    def named(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return plain values under the names that they get."""
        return {name + self.value_suffix: value for name, value in values.items()}

    def chunks(self, chunk: Chunk) -> Iterator[Chunk]:
        """Yield what a chunk turns into. The memory is the same, but where elements are shifted."""
        if chunk.name not in self.views:
            yield chunk
            return
        for part, target in _cut(_own(self.views[chunk.name].parts), chunk):
            target = target - part.shift if part.shift else target
            yield Chunk(part.source, self._sizes[part.source], torch.Size(part.begin), part.of_view(target))


def identity(name: str, entry: StoredTensor) -> View:
    """Return a view of a whole stored tensor."""
    start = (0,) * len(entry.size)
    return View(entry.size, [Part(start, tuple(entry.size), name, start)])


def _own(parts: Sequence[Part]) -> list[Part]:
    return [part for part in parts if not part.is_copy]


def _cut(parts: Sequence[Part], chunk: Chunk) -> Iterator[tuple[Part, torch.Tensor]]:
    """Yield what a chunk of a view has of each part, and the chunk's memory of it."""
    for part in parts:
        if (shared := chunk.overlap(part.offsets, part.sizes)) is not None:
            begins, target = shared
            yield part.cut(begins, target.shape), target
