"""``checksums.json`` next to safetensors files that are written here: their format has no checksums.

It describes a checkpoint as ``checkpoint.json`` does: the header of each file, each tensor, and the JSON files next to
them. Other programs do not look at it, so it may be of files that one of them has replaced; the error says what to do then.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron.core.distributed.fsdp.checkpoint.description import (
    Description,
    Entries,
    Place,
    StoredTensor,
    StoredValue,
    decode,
    encode,
)
from megatron.core.distributed.fsdp.checkpoint.files import write_file
from megatron.core.distributed.fsdp.checkpoint.reader import checksum_of
from megatron.core.regular_file import is_regular, read_regular

CHECKSUMS = "checksums.json"
REMEDY = f"get the folder again or, if you or another program changed the file after it was written, remove {CHECKSUMS}"
_HEADER = "header of "


def write_checksums(
    folder: Path,
    stored: Mapping[str, Mapping[str, StoredTensor]],
    crc32s: Mapping[str, int],
    others: Iterable[str],
) -> None:
    """Write the checksums of files that are complete.

    Args:
        stored: the tensors of each file by name, without checksums.
        crc32s: of each tensor's elements, by name.
        others: names of further files; those that are not there are left out.

    Ranks: one.
    """
    entries: dict[str, StoredTensor | StoredValue] = {}
    files = {}
    for file, tensors in stored.items():
        with open(folder / file, "rb") as opened:
            length = opened.read(8)
            header = length + opened.read(int.from_bytes(length, "little"))
        files[file] = (folder / file).stat().st_size
        entries[_HEADER + file] = StoredValue(Place(file, 0, len(header), zlib.crc32(header)))
        for name, tensor in tensors.items():
            (chunk,) = tensor.chunks
            place = chunk.place._replace(crc32=crc32s.get(name, 0))  # that of no bytes
            entries[name] = StoredTensor(tensor.dtype, tensor.size, [chunk._replace(place=place)])
    there = [name for name in others if (folder / name).is_file()]
    beside = {name: zlib.crc32((folder / name).read_bytes()) for name in there}
    write_file(folder / CHECKSUMS, encode(Description(entries, files, 0, beside)))


def crc32s_of(folder: Path, tensors: Iterable[tuple[str, StoredTensor]]) -> dict[str, int]:
    """Compute the checksums of tensors' elements in their files."""
    return {name: checksum_of(folder, tensor.chunks[0].place) for name, tensor in tensors}


def read_checksums(folder: Path, others: Sequence[str]) -> Description | None:
    """Return what ``write_checksums`` wrote; None where it wrote nothing.

    Args:
        others: names of further files, which are compared.

    Raises:
        ValueError: it is damaged, or one of ``others`` is not as it was written.
    """
    path = folder / CHECKSUMS
    if not is_regular(path):
        return None
    found = decode(read_regular(path), path)
    for name in others:
        is_there = is_regular(folder / name)
        if found.others.get(name) != (zlib.crc32(read_regular(folder / name)) if is_there else None):
            raise ValueError(
                f"{folder / name} must have the checksum that {CHECKSUMS} names, got {'another' if is_there else 'no file'}: {REMEDY}"
            )
    return found


def with_checksums(
    folder: Path, files: Sequence[str], entries: Mapping[str, StoredTensor], found: Description
) -> Entries:
    """Return the tensors of files with their checksums.

    Raises:
        ValueError: a file is not the one that was written.
    """
    for file in files:
        header = found.entries.get(_HEADER + file)
        if (
            not isinstance(header, StoredValue)
            or (folder / file).stat().st_size != found.files[file]
            or checksum_of(folder, header.place) != header.place.crc32
        ):
            raise ValueError(
                f"{folder / file} must be the file of which {CHECKSUMS} has checksums, got another: {REMEDY}"
            )
    return {name: found.entries[name] for name in entries}
