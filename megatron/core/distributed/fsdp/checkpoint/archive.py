"""Archives of ``torch.save``: what is in them, without loading tensors and without running anything.

A tensor is found as shape, dtype and the place of its elements, so that a part of it can be read. Instances of classes that are
not plain come as inert records: see [Note: pickles as data] in ``dcp_metadata.py``.
"""

from __future__ import annotations

import math
import pickle
import zipfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from megatron.core.distributed.fsdp.checkpoint.dcp_metadata import check_announced
from megatron.core.distributed.fsdp.checkpoint.description import DTYPES, Place, checked_count

_LOCAL_HEADER = 30
_SMALL_NUMEL = 4096  # of tensors that read_inert reads; others stay places
_STORAGES = {
    f"{name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "Untyped": torch.uint8,
    }.items()
}


@dataclass(frozen=True)
class ArchivedTensor:
    """A tensor of an archive; its elements lie at ``place``, in order and without gaps if ``is_contiguous``.

    ``record`` is the storage in which they lie, with the checksum that ``torch.save`` wrote.
    """

    dtype: torch.dtype
    size: torch.Size
    place: Place
    is_contiguous: bool
    record: Place


class Record:
    """In place of an instance of a class that is not plain: its name, what it was made of and its attributes."""

    name = ""
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __repr__(self) -> str:
        return f"<{self.name}>"


def read_archive(path: Path, *, file: str) -> Any:
    """Return what ``torch.save`` wrote to a file, with ``ArchivedTensor`` in place of tensors.

    Args:
        file: the name that places give the file.

    Raises:
        ValueError: the file is no such archive, or damaged. Nothing in it has run.
    """
    try:
        with open(path, "rb") as raw:
            return _read(raw, file)
    except Exception as error:  # whatever a damaged archive leads to; it cannot have run anything
        old = " (it may be of the format that torch.save wrote before 1.6: load it with torch.load and save it again)"
        raise ValueError(
            f"{path} must be an archive of torch.save, got {type(error).__name__}: {str(error)[:300]}"
            f"{old if isinstance(error, zipfile.BadZipFile) else ''}"
        ) from error


def read_inert(content: bytes) -> Any:
    """Return what ``torch.save`` wrote, with small tensors as they are and ``Record`` in place of what is not plain.

    Raises:
        ValueError: it is no such archive, or damaged. Nothing in it has run.
    """
    try:
        return inert(content)
    except Exception as error:  # as above
        raise ValueError(f"an archive of torch.save, got {type(error).__name__}: {str(error)[:300]}") from error


def inert(content: bytes | bytearray) -> Any:
    """Return what ``read_inert`` returns; whatever a damaged archive leads to is raised as it is."""
    check_records(content)
    return _with_tensors(_read(BytesIO(content), ""), content)


def check_records(content: bytes | bytearray) -> None:
    """Compare the records of an archive with the checksums that torch.save wrote.

    Raises:
        ValueError: one differs.
    """
    with zipfile.ZipFile(BytesIO(content)) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"another checksum of {damaged} than torch.save wrote")


def _with_tensors(value: Any, content: bytes | bytearray) -> Any:
    if isinstance(value, ArchivedTensor) and value.is_contiguous and value.size.numel() <= _SMALL_NUMEL:
        return torch.frombuffer(
            bytearray(content[value.place.offset : value.place.offset + value.place.nbytes]), dtype=value.dtype
        ).reshape(value.size)
    if isinstance(value, dict):
        return {key: _with_tensors(item, content) for key, item in value.items()}
    return type(value)(_with_tensors(item, content) for item in value) if type(value) in (list, tuple) else value


def _read(raw: Any, file: str) -> Any:
    with zipfile.ZipFile(raw) as archive:
        names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise ValueError("no single data.pkl in it")
        folder = names[0].removesuffix("data.pkl")
        if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
            raise ValueError("elements that are not little-endian")
        text = archive.read(names[0])
        check_announced(text)
        places = {
            info.filename.removeprefix(f"{folder}data/"): Place(file, _start(raw, info), info.file_size, info.CRC)
            for info in archive.infolist()
            if info.filename.startswith(f"{folder}data/")
        }
    return _Unpickler(BytesIO(text), places).load()


def _start(raw: Any, info: zipfile.ZipInfo) -> int:
    """Return where the bytes of a stored file begin."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed")
    raw.seek(info.header_offset)
    header = raw.read(_LOCAL_HEADER)
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return int(info.header_offset) + _LOCAL_HEADER + lengths


class _Unpickler(pickle.Unpickler):
    """Makes plain values, places of tensors and records, and calls nothing that the pickle names."""

    def __init__(self, stream: BytesIO, places: dict[str, Place]) -> None:
        super().__init__(stream)
        self._places = places

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in ("collections.OrderedDict", "builtins.dict"):
            return _Dict
        if full == "torch.Size":
            return tuple
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"):
            return getattr(self, name)
        return _stand_in(full)

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise ValueError(f"a reference to {str(kind)[:40]}")
        return dtype, self._places[key]

    def _rebuild_tensor_v2(self, storage: Any, offset: int, size: Any, stride: Any, *_: Any) -> ArchivedTensor:
        return self._tensor(storage, storage[0], offset, size, stride)

    def _rebuild_tensor_v3(
        self, storage: Any, offset: int, size: Any, stride: Any, _: bool, __: Any, dtype: torch.dtype, *___: Any
    ) -> ArchivedTensor:
        return self._tensor(storage, dtype, offset, size, stride)

    @staticmethod
    def _rebuild_parameter(data: ArchivedTensor, *_: Any) -> ArchivedTensor:
        return data

    def _tensor(self, storage: Any, dtype: torch.dtype, offset: int, size: Any, stride: Any) -> ArchivedTensor:
        shape = torch.Size(map(checked_count, size))
        record: Place = storage[1]
        begin, own = checked_count(offset) * dtype.itemsize, math.prod(shape) * dtype.itemsize
        is_contiguous = _is_contiguous(shape, tuple(stride))
        if is_contiguous and begin + own > record.nbytes:
            raise ValueError(f"a tensor {list(shape)} of {dtype} that ends after its storage")
        place = Place(record.file, record.offset + begin, own, None, 0)
        return ArchivedTensor(dtype, shape, place, is_contiguous, record)


class _Dict(dict[Any, Any]):
    """A dict whose attributes, such as the versions of a state dict, are left out."""

    def __setstate__(self, state: Any) -> None:
        pass


def _stand_in(full: str) -> Any:
    class StandIn(Record):
        name = full

        def __init__(self, *arguments: Any) -> None:
            self.arguments = arguments

        def __setstate__(self, state: Any) -> None:
            self.state = state

        def __setitem__(self, key: Any, value: Any) -> None:
            pass

        def append(self, value: Any) -> None:
            pass

        def extend(self, values: Any) -> None:
            pass

    return StandIn


def _is_contiguous(size: torch.Size, stride: tuple[int, ...]) -> bool:
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True
