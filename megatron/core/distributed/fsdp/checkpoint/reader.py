"""Read a checkpoint's items: plain values, and tensors straight into their memory. Nothing that stands in them is executed.

What is read is compared with its checksums first, while nothing has changed.
"""

from __future__ import annotations

import bisect
import io
import itertools
import math
import os
import pickle
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron.core.distributed.fsdp.checkpoint.archive import check_records, read_inert
from megatron.core.distributed.fsdp.checkpoint.chunks import Chunk, local_chunks
from megatron.core.distributed.fsdp.checkpoint.dcp_metadata import decode_metadata
from megatron.core.distributed.fsdp.checkpoint.description import (
    DESCRIPTION,
    Description,
    Entries,
    Place,
    StoredChunk,
    StoredTensor,
    StoredValue,
    check_coverage,
    decode,
)
from megatron.core.distributed.fsdp.checkpoint.folder import DATA_SUFFIX, MARKER, find_folder
from megatron.core.distributed.fsdp.checkpoint.state import EXTRA_STATE, OBJECT, OPTIMIZER, OPTIONAL_STATE, NamedTensor
from megatron.core.regular_file import is_regular, naming, read_regular

_NamedChunk = tuple[str, torch.dtype, StoredChunk]  # of the tensor with this name and dtype
_VERIFY_THREADS = 4  # zlib computes without Python's lock
_VERIFY_NBYTES = 1 << 20  # stays in the cache of a core between reading and summing


class TensorReader(ABC):
    """Tensors and plain values by name, read part by part; see ``CheckpointReader`` and ``views.ViewReader``.

    Attributes:
        entries: shape and dtype of tensors, and plain values, by name.
    """

    entries: Entries

    @abstractmethod
    def values(self, names: Sequence[str]) -> dict[str, Any]:
        """Read plain values and return them by name; tensors in them are on the CPU.

        Raises:
            FileNotFoundError: a file that has some of it is gone or too short.
            ValueError: what is there is not what was written.
        """

    @abstractmethod
    def plan_parts(self, chunks: Sequence[Chunk]) -> ReadPlan:
        """Return how to read boxes of tensors; raises as ``plan``."""

    @abstractmethod
    def verify(self, plan: ReadPlan) -> None:
        """Compare what the plan will read with what was written, before anything changes.

        Raises:
            ValueError: they differ; names the file and the tensor.
        """

    @abstractmethod
    def read(self, plan: ReadPlan) -> None:
        """Read the plan's tensors in place, converting to their dtype."""

    @abstractmethod
    def whole_nbytes(self, names: Sequence[str]) -> int:
        """Return the bytes of the largest piece of these tensors that can only be read as a whole."""

    def plan(self, tensors: Sequence[NamedTensor]) -> ReadPlan:
        """Return how to read this rank's parts of tensors, which must be in the checkpoint under their first names.

        Raises:
            FileNotFoundError: a file that has some of it is gone or too short.
            ValueError: the checkpoint does not hold each element of a tensor once.
        """
        return self.plan_parts(
            [chunk for entry in tensors for chunk in local_chunks(entry.name, entry.tensor, writes=True)]
        )

    def tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor into CPU memory.

        Raises:
            FileNotFoundError: a file that has some of it is gone or too short.
            ValueError: what is there is not what was written.
        """
        stored = self._entry(name, StoredTensor)
        whole = torch.empty(stored.size, dtype=stored.dtype)
        self._read_chunks(local_chunks(name, whole))
        return whole

    def are_equal(self, tensor: NamedTensor, name: str) -> bool:
        """Return whether this rank's part of a tensor has the same bits under another name, in the dtype of its own.

        Raises:
            FileNotFoundError: a file that has some of it is gone or too short.
            ValueError: what is there is not what was written.
        """
        dtype = self._entry(tensor.name, StoredTensor).dtype
        for chunk in local_chunks(name, tensor.tensor):
            copies = [torch.empty(chunk.local.shape, dtype=dtype) for _ in range(2)]
            names = (tensor.name, name)
            self._read_chunks([replace(chunk, name=own, local=copy) for own, copy in zip(names, copies, strict=True)])
            if not torch.equal(*(copy.reshape(-1).view(torch.uint8) for copy in copies)):
                return False
        return True

    def _read_chunks(self, chunks: Sequence[Chunk]) -> None:
        plan = self.plan_parts(chunks)
        self.verify(plan)
        self.read(plan)

    def _entry(self, name: str, kind: type[Any]) -> Any:
        entry = self.entries[name]
        assert isinstance(entry, kind), name
        return entry


class CheckpointReader(TensorReader):
    """A checkpoint on disk, read without a model or process group. Nothing that stands in it is executed.

    Args:
        path: the folder. If a save was killed while it replaced that folder, what it left beside it is read.
        verify: compare what is read with its checksums; False trusts it.

    Raises:
        FileNotFoundError: no complete checkpoint is there.
        ValueError: its description cannot be read, or the folder has files of another save.

    Attributes:
        folder: the folder that is read.
        entries: shape, dtype and places of tensors, and places of plain values, by name.
        has_checksums: our saves write them. Without them, only those of the archives of ``torch.save`` are compared.

    Ranks: each reads what it needs, on its own.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.folder = find_folder(path)
        self._verify = verify
        description = _read_description(self.folder)
        self.entries: Entries = {_without_suffix(name): entry for name, entry in description.entries.items()}
        self.has_checksums = description.has_checksums
        self._sizes = description.files
        self._records: list[Place] = []
        self._verified: set[Place] = set()
        self._remedy = "load another checkpoint"
        if self.has_checksums:
            self._check_no_strangers()

    @classmethod
    def of_files(
        cls,
        folder: Path,
        entries: Entries,
        *,
        verify: bool = True,
        records: Iterable[Place] = (),
        remedy: str = "load another checkpoint",
    ) -> CheckpointReader:
        """Return a reader of entries whose places in the files of a folder were read from elsewhere than ``.metadata``.

        Args:
            records: ranges of the files with checksums, in which places without them lie.
            remedy: what to do where something has another checksum.
        """
        reader = cls.__new__(cls)
        reader._records, reader._verified, reader._remedy = sorted(set(records)), set(), remedy
        reader.folder, reader._verify, reader.entries = folder, verify, entries
        reader.has_checksums, reader._sizes = False, {}
        return reader

    def whole_nbytes(self, names: Sequence[str]) -> int:
        chunks = (chunk for name in names for chunk in self._entry(name, StoredTensor).chunks)
        return max((chunk.place.nbytes for chunk in chunks if chunk.place.elements is None), default=0)

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        places = {name: self._entry(name, StoredValue).place for name in names}
        self._check_files(places.values())
        return {name: self._value(name, place) for name, place in places.items()}

    def inert_values(self, names: Sequence[str]) -> dict[str, Any]:
        """Read plain values of another program: what is not plain comes as a ``Record``, and nothing is run.

        Raises:
            FileNotFoundError, ValueError: as ``values``.
        """
        places = {name: self._entry(name, StoredValue).place for name in names}
        self._check_files(places.values())
        found = {}
        for name, place in places.items():
            path = self.folder / place.file
            with open(path, "rb", buffering=0) as file:
                content = bytes(_read_bytes(file, place))
            if self._verify and place.crc32 is not None:
                self._compare(name, place, zlib.crc32(content))
            try:
                found[name] = read_inert(content)
            except ValueError as error:
                raise ValueError(
                    f"{path}: {name} must be {error}; the checkpoint is damaged, load another one"
                ) from error
        return found

    def plan_parts(self, chunks: Sequence[Chunk]) -> ReadPlan:
        pieces: list[_Piece] = []
        for name in dict.fromkeys(chunk.name for chunk in chunks):
            self._check_stored(name, self._entry(name, StoredTensor))
        for chunk in chunks:
            pieces += _pieces(chunk.name, self._entry(chunk.name, StoredTensor), chunk)
        pieces.sort(key=lambda piece: (piece.chunk.place.file, piece.chunk.place.offset))
        self._check_files(piece.chunk.place for piece in pieces)
        return ReadPlan(pieces)

    def verify(self, plan: ReadPlan) -> None:
        if self._verify:
            places = {(piece.chunk.place.file, piece.chunk.place.offset): piece for piece in plan.pieces}
            self._verify_chunks([(piece.name, piece.dtype, piece.chunk) for piece in places.values()])
            self._verify_records(piece.chunk.place for piece in places.values())

    def verify_all(self) -> None:
        """Compare all of the checkpoint with what was written, also what no model would read here.

        Raises:
            FileNotFoundError: a file is gone or too short.
            ValueError: something differs; names the file and the entry.
        """
        tensors = {name: entry for name, entry in self.entries.items() if isinstance(entry, StoredTensor)}
        chunks = [(name, entry.dtype, chunk) for name, entry in tensors.items() for chunk in entry.chunks]
        for name, entry in tensors.items():
            self._check_stored(name, entry)
        self._check_files(chunk.place for *_, chunk in chunks)
        self._verify_chunks(chunks)
        self.values([name for name in self.entries if name not in tensors])

    def read(self, plan: ReadPlan) -> None:
        for tensor, value in plan.fills:
            with torch.no_grad():
                tensor.fill_(value)
        for name, pieces in itertools.groupby(plan.pieces, key=lambda piece: piece.chunk.place.file):
            with open(self.folder / name, "rb", buffering=0) as file:
                # Pieces of one archive follow each other; it is unpacked once for all of them.
                for _, of_place in itertools.groupby(pieces, key=lambda piece: piece.chunk.place):
                    _read_pieces(file, list(of_place))
        for tensor, value in plan.shifts:
            with torch.no_grad():
                tensor.add_(value)

    def _value(self, name: str, place: Place) -> Any:
        path = self.folder / place.file
        with open(path, "rb", buffering=0) as file:
            content = _read_bytes(file, place)
        try:
            if self._verify and place.crc32 is None:
                check_records(io.BytesIO(content))
            elif self._verify:
                self._compare(name, place, zlib.crc32(content))
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # its own text proposes to run what stands there
            raise ValueError(
                f"{path}: {name} must be made of plain values and tensors, got something else, which was not run; it is "
                "damaged or of another program, load another checkpoint"
            ) from error
        except Exception as error:  # whatever a damaged archive leads to
            raise ValueError(
                f"{path}: {name} must be a plain value as it was written, got {type(error).__name__}: {str(error)[:400]}; "
                "the checkpoint is damaged, load another one"
            ) from error

    def _verify_chunks(self, chunks: Sequence[_NamedChunk]) -> None:
        with ThreadPoolExecutor(_VERIFY_THREADS) as threads:
            for _ in threads.map(self._verify_chunk, chunks):
                pass

    def _verify_records(self, places: Iterable[Place]) -> None:
        """Compare the records in which these places lie, each once, however many tensors it has."""
        found = {record for place in places for record in self._records_of(place)} - self._verified

        def verify(record: Place) -> None:
            self._compare("tensors", record, checksum_of(self.folder, record))

        with ThreadPoolExecutor(_VERIFY_THREADS) as threads:
            list(threads.map(verify, sorted(found)))
        self._verified |= found

    def _records_of(self, place: Place) -> Iterator[Place]:
        index = bisect.bisect_right(self._records, (place.file, place.offset, math.inf))
        if place.crc32 is None and index and self._records[index - 1].file == place.file:
            yield self._records[index - 1]

    def _verify_chunk(self, named: _NamedChunk) -> None:
        name, dtype, chunk = named
        place, path = chunk.place, self.folder / chunk.place.file
        with open(path, "rb", buffering=0) as file:
            if place.crc32 is not None:
                crc32 = _checksum(file, place)
                self._compare(name, place, crc32)
                return
            if place.elements is not None:  # elements alone, without checksums or an archive around them
                return
            content = io.BytesIO(_read_bytes(file, place))
        try:
            check_records(content)
            _check_archived(_load_archived(content), dtype, chunk)
        except Exception as error:  # whatever a damaged archive leads to
            raise ValueError(
                f"{path}: the bytes from {place.offset} on must be a part of {name}, got "
                f"{type(error).__name__}: {str(error)[:300]}; the checkpoint is damaged, load another one"
            ) from error

    def _compare(self, name: str, place: Place, crc32: int) -> None:
        if place.crc32 is not None and place.crc32 != crc32:
            raise ValueError(
                f"{self.folder / place.file}: the {place.nbytes} bytes from {place.offset} on, which hold {name}, must have "
                f"the checksum {place.crc32:08x} with which they were written, got {crc32:08x}: the file was damaged or "
                f"belongs to another save; {self._remedy}"
            )

    def _check_stored(self, name: str, stored: StoredTensor) -> None:
        check_coverage(name, stored, self.folder)
        for chunk in stored.chunks:
            if chunk.numel * stored.dtype.itemsize > chunk.place.nbytes:
                raise ValueError(
                    f"{self.folder / chunk.place.file}: a piece of {name} must have its {chunk.numel} elements, got "
                    f"{chunk.place.nbytes} bytes"
                )

    def _check_files(self, places: Iterable[Place]) -> None:
        needed: dict[str, int] = {}
        for place in places:
            needed[place.file] = max(needed.get(place.file, 0), place.offset + place.nbytes)
        for name, nbytes in needed.items():
            path, exact = self.folder / name, self._sizes.get(name)
            have = os.path.getsize(path) if path.is_file() else None
            if have is None or have < nbytes or (exact is not None and have != exact):
                wanted = f"{nbytes} bytes or more" if exact is None else f"{exact} bytes"
                raise FileNotFoundError(
                    f"{path} must have {wanted}, got {'no file' if have is None else f'{have} bytes'}: "
                    "the checkpoint was damaged after it was written; load another one"
                )

    def _check_no_strangers(self) -> None:
        for path in self.folder.iterdir():
            if path.suffix == DATA_SUFFIX and path.name not in self._sizes:
                raise ValueError(
                    f"{path} is not of this checkpoint, whose {DESCRIPTION} names its files: another save left it, or "
                    "files of several saves were mixed; restore the folder or load another checkpoint"
                )


@dataclass(frozen=True)
class _Piece:
    """A box of a stored chunk, and the memory for it.

    Args:
        name: the tensor's.
        dtype: the stored one.
        begin: indices in the chunk at which the box begins; its shape is the target's.
    """

    name: str
    dtype: torch.dtype
    chunk: StoredChunk
    begin: tuple[int, ...]
    target: torch.Tensor


@dataclass(frozen=True)
class ReadPlan:
    """The pieces that a rank reads, in the order of files and places."""

    pieces: list[_Piece]
    fills: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    """Memory that gets one value, which no file holds."""
    shifts: list[tuple[torch.Tensor, float]] = field(default_factory=list)
    """Memory to which a value is added once it is read."""

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes to read, of pieces whose elements lie in files as they are, and most bytes of memory at once besides the targets."""
        read = most = 0
        for _, of_chunk in itertools.groupby(self.pieces, key=lambda piece: piece.chunk.place):
            pieces = list(of_chunk)
            chunk, itemsize = pieces[0].chunk, pieces[0].dtype.itemsize
            with_gaps = [p for p in pieces if _first_element(chunk.sizes, p.begin, p.target.shape) is None]
            for piece in (piece for piece in pieces if not any(piece is other for other in with_gaps)):
                read += piece.target.numel() * itemsize
                most = max(most, 0 if _is_read_in_place(piece) else piece.target.numel() * itemsize)
            if with_gaps:
                begins, ends = zip(*((p.begin[0], p.begin[0] + p.target.shape[0]) for p in with_gaps), strict=True)
                rows = (max(ends) - min(begins)) * math.prod(chunk.sizes[1:]) * itemsize
                read, most = read + rows, max(most, rows)
        return read, most


def _read_description(folder: Path) -> Description:
    marker, own = (folder / MARKER), folder / DESCRIPTION
    metadata = read_regular(marker)
    if not is_regular(own):
        return decode_metadata(metadata, marker)
    description = decode(read_regular(own), own)
    if zlib.crc32(metadata) != description.metadata_crc32:
        raise ValueError(
            f"{marker} must have the checksum that {own.name} names, got another: one of the two was damaged or belongs to "
            "another save; load another checkpoint"
        )
    for name, crc32 in description.others.items():
        path = folder / name
        if not is_regular(path) or zlib.crc32(read_regular(path)) != crc32:
            raise ValueError(
                f"{path} must have the checksum that {own.name} names, got {'another' if path.is_file() else 'no file'}: it was "
                "damaged or changed after it was written; load another checkpoint"
            )
    return description


def _without_suffix(name: str) -> str:
    return name.removesuffix(OBJECT) if name.startswith((OPTIMIZER, EXTRA_STATE, OPTIONAL_STATE)) else name


def _pieces(name: str, stored: StoredTensor, chunk: Chunk) -> Iterator[_Piece]:
    """Yield what the chunk of this rank needs of each stored chunk."""
    if chunk.local.numel() == 0:
        return
    for source in stored.chunks:
        begins = [max(own, other) for own, other in zip(chunk.offsets, source.offsets, strict=True)]
        ends = [
            min(own + length, other + size)
            for own, length, other, size in zip(
                chunk.offsets, chunk.local.shape, source.offsets, source.sizes, strict=True
            )
        ]
        if any(end <= begin for begin, end in zip(begins, ends, strict=True)):
            continue
        target = chunk.local.detach()
        for dim, (begin, end, own) in enumerate(zip(begins, ends, chunk.offsets, strict=True)):
            target = target.narrow(dim, begin - own, end - begin)
        within = tuple(begin - other for begin, other in zip(begins, source.offsets, strict=True))
        yield _Piece(name, stored.dtype, source, within, target)


@torch.no_grad()
def _read_pieces(file: BinaryIO, pieces: Sequence[_Piece]) -> None:
    """Read pieces of one stored chunk; those with gaps in it from one copy of the rows in which they lie."""
    chunk, dtype = pieces[0].chunk, pieces[0].dtype
    if chunk.place.elements is None or sys.byteorder != "little":
        whole = _load_archived(io.BytesIO(_read_bytes(file, chunk.place)))
        _check_archived(whole, dtype, chunk)
        for piece in pieces:
            piece.target.copy_(_box_of(whole, piece))
        return
    with_gaps = [
        piece
        for piece in pieces
        if not _read_elements_of(file, piece, _first_element(chunk.sizes, piece.begin, piece.target.shape))
    ]
    if with_gaps:
        first = min(piece.begin[0] for piece in with_gaps)
        end = max(piece.begin[0] + piece.target.shape[0] for piece in with_gaps)
        rows = torch.empty((end - first, *chunk.sizes[1:]), dtype=dtype)
        row_nbytes = math.prod(chunk.sizes[1:]) * dtype.itemsize
        _read_elements(file, chunk.place.offset + chunk.place.elements + first * row_nbytes, rows)
        for piece in with_gaps:
            moved = replace(piece, begin=(piece.begin[0] - first, *piece.begin[1:]))
            piece.target.copy_(_box_of(rows, moved))


def _read_elements_of(file: BinaryIO, piece: _Piece, first: int | None) -> bool:
    """Read a piece whose elements follow each other from the ``first`` on; return False where they do not."""
    place, target = piece.chunk.place, piece.target
    if first is None:
        return False
    assert place.elements is not None
    start = place.offset + place.elements + first * piece.dtype.itemsize
    if _is_read_in_place(piece):
        _read_elements(file, start, target)
        return True
    box = torch.empty(target.shape, dtype=piece.dtype)
    _read_elements(file, start, box)
    target.copy_(box)
    return True


def _is_read_in_place(piece: _Piece) -> bool:
    target = piece.target
    return target.device.type == "cpu" and target.dtype == piece.dtype and target.is_contiguous()


def _first_element(sizes: Sequence[int], begin: Sequence[int], lengths: Sequence[int]) -> int | None:
    """Return the index of a box's first element in its chunk; None if the box has gaps there."""
    dims = [dim for dim, (length, size) in enumerate(zip(lengths, sizes, strict=True)) if length != size]
    # Beyond the first dim that is cut, all must be whole; before the last one that is, of length one.
    if dims and any(lengths[dim] != 1 for dim in range(dims[-1])):
        return None
    first = 0
    for index, size in zip(begin, sizes, strict=True):
        first = first * size + index
    return first


def _box_of(whole: torch.Tensor, piece: _Piece) -> torch.Tensor:
    for dim, (begin, length) in enumerate(zip(piece.begin, piece.target.shape, strict=True)):
        whole = whole.narrow(dim, begin, length)
    return whole


def _load_archived(content: io.BytesIO) -> torch.Tensor:
    loaded: torch.Tensor = torch.load(content, map_location="cpu", weights_only=True)
    return loaded


def _check_archived(loaded: Any, dtype: torch.dtype, chunk: StoredChunk) -> None:
    wanted = (dtype, tuple(chunk.sizes))
    got = (loaded.dtype, tuple(loaded.shape)) if isinstance(loaded, torch.Tensor) else type(loaded)
    if got != wanted:
        raise ValueError(f"{got} in place of {wanted}")


def _read_elements(file: BinaryIO, start: int, tensor: torch.Tensor) -> None:
    _read_into(file, start, tensor.reshape(-1).view(torch.uint8).numpy().data)


def _read_bytes(file: BinaryIO, place: Place) -> bytearray:
    content = bytearray(place.nbytes)
    _read_into(file, place.offset, memoryview(content))
    return content


def _read_into(file: BinaryIO, start: int, view: memoryview) -> None:
    file.seek(start)
    while view.nbytes:
        with naming(file.name):
            count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"{file.name} ended {view.nbytes} bytes early: it was longer when it was opened")
        view = view[count:]


def checksum_of(folder: Path, place: Place) -> int:
    """Compute the checksum of bytes of a file."""
    with open(folder / place.file, "rb", buffering=0) as file:
        return _checksum(file, place)


def _checksum(file: BinaryIO, place: Place) -> int:
    buffer = memoryview(bytearray(min(_VERIFY_NBYTES, place.nbytes)))
    crc32, done = 0, 0
    while done < place.nbytes:
        piece = buffer[: min(len(buffer), place.nbytes - done)]
        _read_into(file, place.offset + done, piece)
        crc32, done = zlib.crc32(piece, crc32), done + len(piece)
    return crc32
