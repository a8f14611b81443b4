"""Pickles read as data alone: ``.metadata`` of PyTorch's distributed checkpoints (DCP), and archives of ``torch.save``.

[Note: pickles as data] Unpickling calls what the pickle names. Here it gets stand-ins: plain values, and records that are made
again for each name, so that a pickle cannot even change an attribute of a class of torch. What comes out is checked like any
other text. The C code that unpickles makes room for what a pickle announces, which a damaged byte can make gigabytes, so numbers
and lengths are checked before.

A tensor of an archive is found as shape, dtype and the place of its elements, so that a part of it can be read.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import reprlib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.distributed.fsdp.checkpoint.description import (
    DESCRIPTION,
    DTYPES,
    Description,
    Entries,
    Place,
    StoredChunk,
    StoredTensor,
    StoredValue,
    checked_count,
    checked_file_name,
)

_DCP_VERSION = "1.0.0"
_DCP = "torch.distributed.checkpoint"
# Megatron-Core's are of its subclass of Metadata, until 0.15.
_OF_METADATA = (f"{_DCP}.", "torch.serialization.", "pathlib.", "megatron.core.dist_checkpointing.")
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
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def _ignore(self, *_: Any) -> None:
        """Take the items of a list or dict."""

    __setitem__ = append = extend = _ignore

    def __repr__(self) -> str:
        return f"<{self.name}>"


def encode_metadata(entries: Entries) -> bytes:
    """Return the metadata by which PyTorch reads our files; they name our description, which must be there too."""
    stored: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for name, entry in entries.items():
        if isinstance(entry, StoredValue):
            stored[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _info(entry.place)
            continue
        chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
        stored[name] = TensorStorageMetadata(TensorProperties(dtype=entry.dtype), entry.size, chunks)
        for number, chunk in enumerate(entry.chunks):
            places[MetadataIndex(name, chunk.offsets, number)] = _info(chunk.place)
    metadata = Metadata(
        stored, storage_data=places, storage_meta=StorageMeta(modules=[DESCRIPTION]), version=_DCP_VERSION
    )
    return pickle.dumps(metadata)


def decode_metadata(text: bytes, path: Path) -> Description:
    """Return the description that metadata of DCP give, without checksums.

    Raises:
        ValueError: the text, which was read from ``path``, is not what DCP writes. Nothing in it has run.
        FileNotFoundError: the metadata are ours, so a description with checksums must be there.
    """
    try:
        metadata = _fields(_Unpickler(text, _OF_METADATA).load())
        description = Description(_entries(metadata))
        is_ours = DESCRIPTION in (_fields(metadata.get("storage_meta")).get("modules") or [])
    except Exception as error:  # whatever a damaged pickle leads to; it cannot have run anything
        raise ValueError(
            f"{path} must be the metadata of a checkpoint, got {type(error).__name__}: {str(error)[:300]}"
        ) from error
    if is_ours:
        raise FileNotFoundError(
            f"{path.with_name(DESCRIPTION)} must be there, which {path.name} names, got no such file: the checkpoint "
            "was damaged after it was written; load another one"
        )
    return description


def read_plain_pickle(text: bytes) -> Any:
    """Return the plain values (numbers, texts, lists, dicts and the like) that a pickle holds.

    Raises:
        ValueError: it names a class or a function, or is damaged. Nothing in it has run.
    """
    try:
        return _Unpickler(text, ()).load()
    except Exception as error:  # as above
        raise ValueError(f"a pickle of plain values, got {type(error).__name__}: {str(error)[:300]}") from error


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
    return _with_tensors(_read(io.BytesIO(content), ""), content)


def check_records(content: bytes | bytearray) -> None:
    """Compare the records of an archive with the checksums that torch.save wrote.

    Raises:
        ValueError: one differs.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
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
        places = {
            info.filename.removeprefix(f"{folder}data/"): Place(file, _start(raw, info), info.file_size, info.CRC)
            for info in archive.infolist()
            if info.filename.startswith(f"{folder}data/")
        }
    return _ArchiveUnpickler(text, places).load()


def _start(raw: Any, info: zipfile.ZipInfo) -> int:
    """Return where the bytes of a stored file begin."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed")
    raw.seek(info.header_offset)
    header = raw.read(_LOCAL_HEADER)
    lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    return int(info.header_offset) + _LOCAL_HEADER + lengths


def _check_announced(text: bytes) -> None:
    """Check that what a pickle announces, lengths and places in its memo, is not more than it holds.

    Raises:
        ValueError: it announces more; ``pickletools`` finds lengths that are not those of what follows.
    """
    for opcode, argument, position in pickletools.genops(text):
        # PUT, BINPUT, LONG_BINPUT: all places up to the announced one are made.
        if opcode.code in "pqr" and int(argument or 0) >= len(text):
            raise ValueError(
                f"a pickle of {len(text)} bytes that has {argument} objects to remember at byte {position}"
            )


class _Unpickler(pickle.Unpickler):
    """Makes plain values and records, and calls nothing that the pickle names.

    Args:
        allowed: prefixes of the names that the pickle may have in addition to those of torch's plain values.
    """

    def __init__(self, text: bytes, allowed: tuple[str, ...]) -> None:
        _check_announced(text)
        super().__init__(io.BytesIO(text))
        self._allowed = allowed
        # A pickle cannot change any of these, which do nothing but make plain values.
        self._known: dict[str, Any] = {f"torch.{name}": dtype for name, dtype in DTYPES.items()}
        self._known |= {"torch.Size": tuple, "collections.OrderedDict": _Dict, "builtins.dict": _Dict}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in self._known:
            return self._known[full]
        if not full.startswith(self._allowed):
            raise pickle.UnpicklingError(f"a pickle that names {full}, which has no place in it; nothing was run")
        return type("StandIn", (Record,), {"name": full})


class _ArchiveUnpickler(_Unpickler):
    """Makes places of tensors too."""

    def __init__(self, text: bytes, places: dict[str, Place]) -> None:
        super().__init__(text, ("",))
        self._places = places
        for module in ("torch", "torch.storage"):
            self._known |= {f"{module}.{name}": dtype for name, dtype in _STORAGES.items()}
        self._known |= {f"torch._utils._rebuild_tensor_v{version}": self._tensor for version in (2, 3)}
        self._known["torch._utils._rebuild_parameter"] = lambda data, *_: data

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, _ = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise ValueError(f"a reference to {str(kind)[:40]}")
        return dtype, self._places[key]

    def _tensor(self, storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> ArchivedTensor:
        # After "requires grad" and hooks, the third version has a dtype; elsewhere it is that of the storage.
        dtype = next((one for one in rest if isinstance(one, torch.dtype)), storage[0])
        shape = torch.Size(map(checked_count, size))
        record: Place = storage[1]
        begin, own = checked_count(offset) * dtype.itemsize, math.prod(shape) * dtype.itemsize
        is_contiguous = torch.empty_strided(shape, tuple(stride), device="meta").is_contiguous()
        if is_contiguous and begin + own > record.nbytes:
            raise ValueError(f"a tensor {list(shape)} of {dtype} that ends after its storage")
        place = Place(record.file, record.offset + begin, own, None, 0)
        return ArchivedTensor(dtype, shape, place, is_contiguous, record)


class _Dict(dict[Any, Any]):
    """A dict whose attributes, such as the versions of a state dict, are left out."""

    def __setstate__(self, state: Any) -> None:
        pass


def _fields(value: Any) -> dict[str, Any]:
    state = value.state if isinstance(value, Record) else None
    if isinstance(state, tuple):  # of TensorProperties
        return {"dtype": state[0]}
    return state if isinstance(state, dict) else {}


def _info(place: Place) -> _StorageInfo:
    return _StorageInfo(place.file, place.offset, place.nbytes)


def _entries(metadata: Mapping[str, Any]) -> Entries:
    places = {}
    for key, info in metadata["storage_data"].items():
        index, fields = _fields(key), _fields(info)
        if fields.get("transform_descriptors"):
            raise NotImplementedError(
                f"items that are transformed ({reprlib.repr(fields['transform_descriptors'])}); save without that"
            )
        offsets = index.get("offset")
        places[index["fqn"], None if offsets is None else tuple(offsets)] = Place(
            checked_file_name(fields["relative_path"]), checked_count(fields["offset"]), checked_count(fields["length"])
        )
    entries: dict[str, StoredTensor | StoredValue] = {}
    for name, stored in metadata["state_dict_metadata"].items():
        fields = _fields(stored)
        if not isinstance(name, str):
            raise ValueError(f"the names of entries must be texts, got {reprlib.repr(name)}")
        if stored.name == f"{_DCP}.metadata.BytesStorageMetadata":
            entries[name] = StoredValue(places[name, None])
            continue
        dtype = _fields(fields["properties"])["dtype"]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"the dtype of {name} must be one of torch, got {reprlib.repr(dtype)}")
        entries[name] = StoredTensor(
            dtype,
            torch.Size(map(checked_count, fields["size"])),
            [_chunk(name, chunk, places) for chunk in fields["chunks"]],
        )
    return entries


def _chunk(name: str, chunk: Any, places: Mapping[Any, Place]) -> StoredChunk:
    fields = _fields(chunk)
    offsets, sizes = (tuple(map(checked_count, fields[key])) for key in ("offsets", "sizes"))
    place = places.get((name, offsets))
    if place is None:
        raise ValueError(f"no place for the piece of {name} at {list(offsets)}")
    return StoredChunk(offsets, sizes, place)
