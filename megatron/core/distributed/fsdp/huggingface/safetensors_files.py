"""Files in the safetensors format: a length, a JSON text that says where each tensor lies, and the tensors' elements.

They are read in place and written in turn, so none is ever held as a whole.

The format has no checksums, so ``checksums.json`` next to files that are written here has them. It describes a checkpoint as
``checkpoint.json`` does: the header of each file, each tensor, and the JSON files next to them. Other programs do not look at it,
so it may be of files that one of them has replaced; the error says what to do then.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import reprlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core.distributed.fsdp.checkpoint import (
    CheckpointReader,
    Entries,
    Place,
    StoredChunk,
    StoredTensor,
    StoredValue,
)
from megatron.core.distributed.fsdp.checkpoint.description import Description, decode, encode
from megatron.core.distributed.fsdp.checkpoint.files import to_disk, write_file
from megatron.core.distributed.fsdp.checkpoint.reader import check_others, checksum_of
from megatron.core.regular_file import is_regular, naming, open_regular, parse_json, read_regular

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
CHECKSUMS = "checksums.json"
REMEDY = f"get the folder again or, if you or another program changed the file after it was written, remove {CHECKSUMS}"
_HEADER = "header of "
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LARGEST_HEADER = 100_000_000


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        ValueError: there is something else.
    """
    try:
        found = parse_json(read_regular(path))
    except ValueError as error:
        raise ValueError(f"{path} must be a JSON text, got {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {reprlib.repr(found)}")
    return found


def open_folder(folder: Path, *, verify: bool = True, others: Sequence[str] = ()) -> CheckpointReader:
    """Return a reader of all safetensors files of a folder; of those that its index names, if it has one.

    Args:
        verify: compare what is read with its checksums, where there are any.
        others: names of further files that the caller reads, which are compared now.

    Raises:
        FileNotFoundError: a file that the index names is missing, or there is none.
        ValueError: a file or the index is not what it must be, or two files have a tensor of one name.
    """
    checksums = read_checksums(folder, [INDEX, *others]) if verify else None
    if is_regular(folder / INDEX):
        wanted = read_json(folder / INDEX).get("weight_map")
        if not isinstance(wanted, dict) or not all(isinstance(name, str) for name in wanted.values()):
            raise ValueError(f"{folder / INDEX} must have a weight_map of names, got {reprlib.repr(wanted)}")
        files = sorted(set(wanted.values()))
    else:
        wanted, files = None, sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} must have safetensors files, got none")
    entries: dict[str, StoredTensor] = {}
    for name in files:
        if name != Path(name).name or not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder / name} must be there, which {INDEX} names, got no such file; copy it there"
            )
        for tensor, stored in read_header(folder / name).items():
            if tensor in entries:
                raise ValueError(f"{folder} must have each tensor once, got {tensor} in {name} and in another file")
            entries[tensor] = stored
    missing = sorted(set(wanted or ()) - set(entries))
    if missing:
        raise ValueError(f"{folder} must have the tensors that {INDEX} names, got none of {', '.join(missing[:8])}")
    if checksums is not None:
        summed = with_checksums(folder, files, entries, checksums)
        return CheckpointReader(folder, entries=summed, remedy=REMEDY)
    return CheckpointReader(folder, entries=entries, verify=verify)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return shape, dtype and place of each tensor of a file.

    Raises:
        ValueError: the file is not in this format.
    """
    try:
        with open_regular(path) as file, naming(path):
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
                raise ValueError(f"a text of {length} bytes in a file of {size}")
            header = parse_json(file.read(length))
        header.pop("__metadata__", None)
        return {name: _stored(path.name, entry, 8 + length, size) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{path} must be a safetensors file, got {type(error).__name__}: {str(error)[:200]}; it is damaged or of another "
            "format, get it again"
        ) from error


def _stored(file: str, entry: Mapping[str, Any], start: int, size: int) -> StoredTensor:
    dtype, shape = _DTYPES[entry["dtype"]], torch.Size(entry["shape"])
    begin, end = entry["data_offsets"]
    nbytes = math.prod(shape) * dtype.itemsize
    if any(length < 0 for length in shape) or begin < 0 or end - begin != nbytes or start + end > size:
        raise ValueError(f"a tensor of {nbytes} bytes from {begin} to {end} in a file of {size}")
    chunk = StoredChunk((0,) * len(shape), tuple(shape), Place(file, start + begin, nbytes, None, 0))
    return StoredTensor(dtype, shape, [chunk])


@dataclass(frozen=True, eq=False)
class FileLayout:
    """A file to which tensors are written at their places.

    Args:
        name: the file's.
        header: its first bytes.
        nbytes: of the whole file.
        tensors: what ``read_header`` returns of it.
    """

    name: str
    header: bytes
    nbytes: int
    tensors: Mapping[str, StoredTensor]


def lay_out(tensors: Mapping[str, tuple[torch.Size, torch.dtype]], max_nbytes: int) -> list[FileLayout]:
    """Place tensors in files, in their order, a new one where the last would have more than ``max_nbytes``; pure."""
    files: list[dict[str, tuple[torch.Size, torch.dtype]]] = [{}]
    held = 0
    for name, (size, dtype) in tensors.items():
        nbytes = math.prod(size) * dtype.itemsize
        if files[-1] and held + nbytes > max_nbytes:
            files.append({})
            held = 0
        files[-1][name] = (size, dtype)
        held += nbytes
    return [
        lay_out_file(SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors", own)
        for number, own in enumerate(files, 1)
    ]


def lay_out_file(file: str, tensors: Mapping[str, tuple[torch.Size, torch.dtype]]) -> FileLayout:
    """Place tensors in one file, in their order; pure."""
    entries: dict[str, Any] = {}
    end = 0
    for name, (size, dtype) in tensors.items():
        begin, end = end, end + math.prod(size) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(size), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start, nbytes = 8 + len(text), 8 + len(text) + end
    stored = {name: _stored(file, entry, start, nbytes) for name, entry in entries.items()}
    return FileLayout(file, len(text).to_bytes(8, "little") + text, nbytes, stored)


def write_index(folder: Path, files: Sequence[FileLayout]) -> None:
    """Write the file that names the file of each tensor, where there are several. Ranks: one."""
    if len(files) > 1:
        weight_map = {name: file.name for file in files for name in file.tensors}
        total = sum(file.nbytes - len(file.header) for file in files)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
        (folder / INDEX).write_text(text + "\n")


class SafetensorsWriter:
    """Writes one file: all names, shapes and dtypes first, then the elements in this order.

    Args:
        tensors: (name, shape, dtype).
    """

    def __init__(self, path: Path, tensors: Iterable[tuple[str, torch.Size, torch.dtype]]) -> None:
        self._layout = lay_out_file(path.name, {name: (size, dtype) for name, size, dtype in tensors})
        self._names = list(self._layout.tensors)
        self._ends = [stored.chunks[0].place.offset for stored in self._layout.tensors.values()][1:]
        self.crc32s: dict[str, int] = {}
        """Of what was written, by tensor."""
        self._file = open(path, "xb")  # noqa: SIM115
        self._file.write(self._layout.header)

    def write(self, elements: torch.Tensor) -> None:
        """Write the next elements, of one tensor."""
        view = elements.contiguous().reshape(-1).view(torch.uint8).numpy().data
        if view.nbytes:
            # Tensors without elements end where they begin, and are skipped.
            name = self._names[bisect.bisect_right(self._ends, self._file.tell())]
            self.crc32s[name] = zlib.crc32(view, self.crc32s.get(name, 0))
        self._file.write(view)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Synchronise the file to disk, which must have all its elements."""
        with self._file:
            if kind is None:
                assert self._file.tell() == self._layout.nbytes, "all elements must be written"
                to_disk(self._file)


def write_checksums(
    folder: Path, stored: Mapping[str, Mapping[str, StoredTensor]], crc32s: Mapping[str, int], others: Iterable[str]
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
    check_others(folder, {name: found.others.get(name) for name in others}, CHECKSUMS, REMEDY)
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
