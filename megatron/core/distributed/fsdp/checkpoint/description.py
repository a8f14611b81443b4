"""The description of a checkpoint: which entries it has, and where in its files each piece of them lies.

Our checkpoints hold it as ``checkpoint.json``, with a checksum of each piece, of ``.metadata`` and of itself. Nothing in it
is code, and nothing in it is believed before it was checked.
"""

from __future__ import annotations

import json
import math
import reprlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

DESCRIPTION = "checkpoint.json"
_FORMAT, _VERSION = "megatron-fsdp checkpoint", 1
DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class Place(NamedTuple):
    """The bytes of an item, which are an archive of ``torch.save``.

    Args:
        file: name of the file in the folder.
        offset: where they begin in the file.
        nbytes: how many there are.
        crc32: their checksum; None if it is not known.
        elements: where in them a tensor's elements begin, in order and without gaps; None if it is not known.
    """

    file: str
    offset: int
    nbytes: int
    crc32: int | None = None
    elements: int | None = None


class StoredChunk(NamedTuple):
    """A box of a tensor: the indices at which it begins, its shape, and its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, which its chunks cover."""

    dtype: torch.dtype
    size: torch.Size
    chunks: list[StoredChunk]

    @property
    def numel(self) -> int:
        return math.prod(self.size)


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A plain value of a checkpoint."""

    place: Place


Entries = Mapping[str, StoredTensor | StoredValue]


@dataclass(frozen=True)
class Description:
    """What a checkpoint holds.

    Args:
        entries: tensors and plain values by name.
        files: bytes of each data file by name; {} if they are not known.
        metadata_crc32: checksum of ``.metadata``; None if it is not known.
        others: checksum of each further file by name, which another program expects.
    """

    entries: Entries
    files: Mapping[str, int] = field(default_factory=dict)
    metadata_crc32: int | None = None
    others: Mapping[str, int] = field(default_factory=dict)


def encode(description: Description) -> bytes:
    """Return the description as the text of ``checkpoint.json``."""
    files = {name: number for number, name in enumerate(description.files)}

    def row(place: Place) -> list[int | None]:
        return [files[place.file], place.offset, place.nbytes, place.crc32, place.elements]

    entries = {
        name: row(entry.place)
        if isinstance(entry, StoredValue)
        else {
            "dtype": str(entry.dtype).removeprefix("torch."),
            "size": list(entry.size),
            "chunks": [[list(chunk.offsets), list(chunk.sizes), *row(chunk.place)] for chunk in entry.chunks],
        }
        for name, entry in description.entries.items()
    }
    content = {"files": dict(description.files), "metadata_crc32": description.metadata_crc32, "entries": entries}
    return _sealed({**content, "others": dict(description.others)} if description.others else content)


def decode(text: bytes, path: Path) -> Description:
    """Return the description whose text was read from ``path``.

    Raises:
        ValueError: the text is not what ``encode`` returned.
    """
    try:
        content = json.loads(text)["content"]
        if _sealed(content) != text:
            raise ValueError("a text that does not have its checksum")
        return _parsed(content)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{path} must be the description of a checkpoint, as it was written, got {type(error).__name__}: "
            f"{str(error)[:200]}; it was damaged, load another checkpoint"
        ) from error


def check_coverage(name: str, stored: StoredTensor, path: Path) -> None:
    """Check that the chunks of a tensor hold each of its elements once.

    Raises:
        ValueError: a chunk is missing, lies outside the tensor, or overlaps another.

    Ranks: pure.
    """
    chunks = [chunk for chunk in stored.chunks if chunk.numel != 0]
    fault = next((fault for fault in map(lambda c: _outside(c, stored.size), chunks) if fault), "")
    if not fault and (found := sum(chunk.numel for chunk in chunks)) != stored.numel:
        fault = f"{len(chunks)} pieces of {found} elements in all"
    if not fault and (pair := _overlap(chunks)) is not None:
        fault = f"two pieces that overlap: {_box(pair[0])} and {_box(pair[1])}"
    if fault:
        raise ValueError(
            f"{path}: the pieces of {name} {list(stored.size)} must hold each of its elements once, got {fault}; the "
            "checkpoint is damaged, load another one"
        )


def _sealed(content: Any) -> bytes:
    text = json.dumps(content, separators=(",", ":"))
    crc32 = zlib.crc32(text.encode())
    return f'{{"format":"{_FORMAT}","version":{_VERSION},"crc32":{crc32},"content":{text}}}\n'.encode()


def _parsed(content: Any) -> Description:
    files = {checked_file_name(name): checked_count(nbytes) for name, nbytes in content["files"].items()}
    names = list(files)
    places: list[Place] = []

    def place(file: Any, offset: Any, nbytes: Any, crc32: Any, elements: Any) -> Place:
        found = Place(
            names[checked_count(file)],
            checked_count(offset),
            checked_count(nbytes),
            checked_count(crc32),
            None if elements is None else checked_count(elements),
        )
        places.append(found)
        return found

    entries: dict[str, StoredTensor | StoredValue] = {}
    for name, entry in content["entries"].items():
        if isinstance(entry, list):
            entries[name] = StoredValue(place(*entry))
            continue
        dtype, size = DTYPES[entry["dtype"]], torch.Size(map(checked_count, entry["size"]))
        chunks = [
            StoredChunk(tuple(map(checked_count, offsets)), tuple(map(checked_count, sizes)), place(*row))
            for offsets, sizes, *row in entry["chunks"]
        ]
        entries[name] = StoredTensor(dtype, size, chunks)
        for chunk in chunks:
            _check_elements(name, chunk, dtype)
    _check_no_gaps(places, files)
    others = {checked_file_name(name): checked_count(crc32) for name, crc32 in content.get("others", {}).items()}
    return Description(entries, files, checked_count(content["metadata_crc32"]), others)


def checked_file_name(value: Any) -> str:
    """Return the value if it names a file in a folder, not one elsewhere; else raise ValueError."""
    if not isinstance(value, str) or value != Path(value).name or value in ("", ".", ".."):
        raise ValueError(f"a place must name a file in the folder, got {reprlib.repr(value)}")
    return value


def checked_count(value: Any) -> int:
    """Return the value if it is a whole number that can be a size; else raise ValueError."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"a size must be a whole number from 0 on, got {reprlib.repr(value)}")
    return value


def _check_elements(name: str, chunk: StoredChunk, dtype: torch.dtype) -> None:
    start, nbytes = chunk.place.elements, chunk.numel * dtype.itemsize
    if start is not None and start + nbytes > chunk.place.nbytes:
        raise ValueError(f"{name}: a piece of {nbytes} bytes must lie in its item, got {chunk.place}")


def _check_no_gaps(places: Iterable[Place], files: Mapping[str, int]) -> None:
    ends = dict.fromkeys(files, 0)
    for place in sorted(places, key=lambda place: (place.file, place.offset)):
        if place.offset != ends[place.file]:
            raise ValueError(f"the items of {place.file} must follow each other, got {place}")
        ends[place.file] += place.nbytes
    if ends != files:
        raise ValueError(f"the items must fill the files, got {ends} bytes of {dict(files)}")


def _outside(chunk: StoredChunk, size: Sequence[int]) -> str:
    if len(chunk.offsets) == len(chunk.sizes) == len(size) and all(
        begin >= 0 and 0 < length <= whole - begin
        for begin, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
    ):
        return ""
    return f"a piece outside of it: {_box(chunk)}"


def _overlap(chunks: Sequence[StoredChunk]) -> tuple[StoredChunk, StoredChunk] | None:
    """Return two boxes that overlap: sweep along the dim in which they begin at most different indices."""
    if len(chunks) < 2:
        return None
    num_dims = len(chunks[0].sizes)
    dim = max(range(num_dims), key=lambda d: len({chunk.offsets[d] for chunk in chunks}), default=None)
    if dim is None:
        return chunks[0], chunks[1]
    active: list[StoredChunk] = []
    for chunk in sorted(chunks, key=lambda c: c.offsets[dim]):
        begin = chunk.offsets[dim]
        active = [other for other in active if other.offsets[dim] + other.sizes[dim] > begin]
        for other in active:
            if all(
                a < b + n and b < a + m
                for a, m, b, n in zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
            ):
                return other, chunk
        active.append(chunk)
    return None


def _box(chunk: StoredChunk) -> str:
    return f"{list(chunk.sizes)} at {list(chunk.offsets)}"
