"""``.metadata`` of PyTorch's distributed checkpoints (DCP), which is a pickle: written for PyTorch, read as data alone.

[Note: pickles as data] Unpickling calls what the pickle names. Here it may name only what DCP writes, and gets stand-ins for
these classes: records that are made again for each file, so that a pickle cannot even change an attribute of a class of torch.
What comes out is checked like any other text. The C code that unpickles makes room for what a pickle announces, which a
damaged byte can make gigabytes, so numbers and lengths are checked before.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import reprlib
from collections.abc import Mapping
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
_RECORDS = {
    *(
        f"{_DCP}.metadata.{name}"
        for name in ("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "TensorProperties")
    ),
    f"{_DCP}.metadata.TensorStorageMetadata",
    f"{_DCP}.metadata.BytesStorageMetadata",
    f"{_DCP}.filesystem._StorageInfo",
    # Megatron-Core's subclass of Metadata, until 0.15.
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
}
# What these do cannot be changed by a pickle, and does nothing but make plain values.
_BUILT_IN: dict[str, Any] = {
    "torch.Size": tuple,
    "collections.OrderedDict": dict,
}
_UNUSED = {
    "torch.serialization._get_layout",
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING",
    *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


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
        check_announced(text)
        metadata = _Unpickler(io.BytesIO(text)).load()
        notes = _fields(getattr(metadata, "storage_meta", None)).get("modules") or []
        if DESCRIPTION in notes:
            raise FileNotFoundError(
                f"{path.with_name(DESCRIPTION)} must be there, which {path.name} names, got no such file: the checkpoint "
                "was damaged after it was written; load another one"
            )
        return Description(_entries(_fields(metadata)))
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to; it cannot have run anything
        raise ValueError(
            f"{path} must be the metadata of a checkpoint, got {type(error).__name__}: {str(error)[:300]}"
        ) from error


def read_plain_pickle(text: bytes) -> Any:
    """Return the plain values (numbers, texts, lists, dicts and the like) that a pickle holds.

    Raises:
        ValueError: it names a class or a function, or is damaged. Nothing in it has run.
    """
    try:
        check_announced(text)
        return _PlainUnpickler(io.BytesIO(text)).load()
    except Exception as error:  # as above
        raise ValueError(f"a pickle of plain values, got {type(error).__name__}: {str(error)[:300]}") from error


def check_announced(text: bytes) -> None:
    """Check that what a pickle announces, lengths and places in its memo, is not more than it holds.

    Raises:
        ValueError: it announces more; ``pickletools`` finds lengths that are not those of what follows.
    """
    for opcode, argument, position in pickletools.genops(text):
        if opcode.code in "pqr" and int(argument or 0) >= len(
            text
        ):  # PUT, BINPUT, LONG_BINPUT: all places up to it are made
            raise ValueError(
                f"a pickle of {len(text)} bytes that has {argument} objects to remember at byte {position}"
            )


class _PlainUnpickler(pickle.Unpickler):
    """Makes plain values alone."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a pickle that names {module}.{name}, which is no plain value; nothing was run")


class _Unpickler(pickle.Unpickler):
    """See [Note: pickles as data]."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self._known: dict[str, Any] = dict(_BUILT_IN)
        self._known.update({name: type(name.rpartition(".")[2], (_Record,), {}) for name in _RECORDS})
        self._known.update({f"torch.{name}": dtype for name, dtype in DTYPES.items()})
        self._known.update(dict.fromkeys(_UNUSED, type("Unused", (), {"__init__": lambda self, *parts: None})))

    def find_class(self, module: str, name: str) -> Any:
        found = f"{module}.{name}"
        if found not in self._known:
            raise pickle.UnpicklingError(
                f"a pickle that names {found}, which the metadata of a checkpoint do not; nothing was run"
            )
        return self._known[found]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(
            "a pickle with references to elsewhere, which the metadata of a checkpoint have not"
        )


class _Record:
    """In place of a class of DCP: keeps what the pickle says of an instance."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):  # of TensorProperties
            state = {"dtype": state[0]}
        self.__dict__.update(state)


def _fields(value: Any) -> dict[str, Any]:
    return vars(value) if isinstance(value, _Record) else {}


def _kind(value: Any) -> str:
    return type(value).__name__ if isinstance(value, _Record) else ""


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
        if _kind(stored) == "BytesStorageMetadata":
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
