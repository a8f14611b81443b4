"""Tensors whose last dim holds the elements of two in turn, read and written as these two.

gpt-oss stores gates and ups so: x[..., 0::2] and x[..., 1::2]. In memory that is a tensor with one dim more, [..., n, 2], of which each
of the two has one index.

Shapes: n elements of the last dim of each of the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron.core.distributed.fsdp.checkpoint import CheckpointReader, Chunk, StoredTensor, TensorReader

Suffixes = Sequence[tuple[str, str, str]]
"""[(end of the name of both, end of the first one's, end of the second one's)]"""


class ApartReader(TensorReader):
    """Reads each of two interleaved tensors under its own name, and all others as they are.

    Args:
        source: reads files whose tensors each lie in one piece.
        suffixes: of the names.
    """

    def __init__(self, source: CheckpointReader, suffixes: Suffixes) -> None:
        self.source = source
        self.entries = dict(source.entries)
        self._places: dict[str, tuple[str, int]] = {}
        folded = dict(source.entries)
        for name, entry in source.entries.items():
            for suffix, *halves in suffixes:
                if name.endswith(suffix) and isinstance(entry, StoredTensor) and entry.size[-1] % 2 == 0:
                    del self.entries[name]
                    folded[name] = _folded(entry)
                    for index, half in enumerate(halves):
                        own = name.removesuffix(suffix) + half
                        self.entries[own] = StoredTensor(entry.dtype, _half(entry.size), [])
                        self._places[own] = name, index
        source.entries = folded

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        return self.source.values(names)

    def whole_nbytes(self, names: Sequence[str]) -> int:
        return self.source.whole_nbytes([self._places.get(name, (name, 0))[0] for name in names])

    def plan_parts(self, chunks: Sequence[Chunk]) -> Any:
        return self.source.plan_parts([self._stored(chunk) for chunk in chunks])

    def _stored(self, chunk: Chunk) -> Chunk:
        place = self._places.get(chunk.name)
        if place is None:
            return chunk
        name, index = place
        size = self.source.entries[name].size  # type: ignore[union-attr]
        return Chunk(name, size, torch.Size((*chunk.offsets, index)), chunk.local.detach().unsqueeze(-1))


class TogetherReader(TensorReader):
    """Reads two tensors of another reader as one, whose last dim has their elements in turn; the inverse of ``ApartReader``."""

    def __init__(self, source: TensorReader, suffixes: Suffixes) -> None:
        self.source = source
        self._halves: dict[str, tuple[str, str]] = {}
        self.entries = {}
        for name, entry in source.entries.items():
            found = next(((s, h) for s, *h in suffixes if name.endswith(tuple(h))), None)
            if found is None or not isinstance(entry, StoredTensor):
                self.entries[name] = entry
                continue
            suffix, (first, second) = found
            if name.endswith(first):
                stem = name.removesuffix(first)
                size = torch.Size((*entry.size[:-1], 2 * entry.size[-1]))
                self.entries[stem + suffix] = StoredTensor(entry.dtype, size, [])
                self._halves[stem + suffix] = name, stem + second

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        return self.source.values(names)

    def whole_nbytes(self, names: Sequence[str]) -> int:
        return self.source.whole_nbytes([half for name in names for half in self._halves.get(name, (name,))])

    def plan_parts(self, chunks: Sequence[Chunk]) -> Any:
        return self.source.plan_parts([own for chunk in chunks for own in self._own(chunk)])

    def _own(self, chunk: Chunk) -> list[Chunk]:
        halves = self._halves.get(chunk.name)
        if halves is None:
            return [chunk]
        assert chunk.local.shape[-1] == chunk.size[-1], "chunks are of whole rows"
        size = _half(chunk.size)
        return [
            Chunk(name, size, chunk.offsets, chunk.local.detach()[..., index::2]) for index, name in enumerate(halves)
        ]


def _half(size: torch.Size) -> torch.Size:
    return torch.Size((*size[:-1], size[-1] // 2))


def _folded(entry: StoredTensor) -> StoredTensor:
    """Describe the same memory as [..., n, 2]."""
    size = (*_half(entry.size), 2)
    (chunk,) = entry.chunks
    return replace(entry, size=torch.Size(size), chunks=[chunk._replace(offsets=(0,) * len(size), sizes=size)])
