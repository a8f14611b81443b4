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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from megatron.core.distributed.fsdp.checkpoint.chunks import Chunk, local_chunks
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
from megatron.core.distributed.fsdp.checkpoint.pickles import check_records, decode_metadata, inert
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
        """Return how to read boxes of tensors.

        Raises:
            FileNotFoundError: a file that has some of it is gone or too short.
            ValueError: the checkpoint does not hold each element of a tensor once.
        """

    @abstractmethod
    def whole_nbytes(self, names: Sequence[str]) -> int:
        """Return the bytes of the largest piece of these tensors that can only be read as a whole."""

    def tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor into CPU memory.

        Raises:
            FileNotFoundError: a file that has some of it is gone or too short.
            ValueError: what is there is not what was written.
        """
        whole = self.empty(name)
        self._read_chunks(local_chunks(name, whole))
        return whole

    def empty(self, name: str, device: str = "cpu") -> torch.Tensor:
        """Return memory of a whole tensor's shape and dtype."""
        stored = self._entry(name, StoredTensor)
        return torch.empty(stored.size, dtype=stored.dtype, device=device)

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
        plan.verify()
        plan.read()

    def _entry(self, name: str, kind: type[Any]) -> Any:
        entry = self.entries[name]
        assert isinstance(entry, kind), name
        return entry


class CheckpointReader(TensorReader):
    """A checkpoint on disk, read without a model or process group. Nothing that stands in it is executed.

    Args:
        path: the folder. If a save was killed while it replaced that folder, what it left next to it is read.
        verify: compare what is read with its checksums; False trusts it.
        entries: entries whose places in the files of the folder were read from elsewhere than ``.metadata``.
        records: ranges of the files with checksums, in which places without them lie.
        remedy: what to do where something has another checksum.

    Raises:
        FileNotFoundError: no complete checkpoint is there.
        ValueError: its description cannot be read, or the folder has files of another save.

    Attributes:
        folder: the folder that is read.
        entries: shape, dtype and places of tensors, and places of plain values, by name.
        has_checksums: our saves write them. Without them, only those of the archives of ``torch.save`` are compared.

    Ranks: each reads what it needs, on its own.
    """

    def __init__(
        self,
        path: Path,
        *,
        verify: bool = True,
        entries: Entries | None = None,
        records: Iterable[Place] = (),
        remedy: str = "load another checkpoint",
    ) -> None:
        self.folder = find_folder(path) if entries is None else path
        description = _read_description(self.folder) if entries is None else Description(entries)
        self.entries: Entries = entries or {_without_suffix(name): e for name, e in description.entries.items()}
        self.has_checksums = description.metadata_crc32 is not None
        self._verify, self._remedy = verify, remedy
        self._sizes = description.files
        self._records = sorted(set(records))
        self._verified: set[Place] = set()
        if self.has_checksums:
            self._check_no_strangers()

    def whole_nbytes(self, names: Sequence[str]) -> int:
        chunks = (chunk for name in names for chunk in self._entry(name, StoredTensor).chunks)
        return max((chunk.place.nbytes for chunk in chunks if chunk.place.elements is None), default=0)

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        return self._decoded(names, partial(_plain, checks=self._verify))

    def inert_values(self, names: Sequence[str]) -> dict[str, Any]:
        """Read plain values of another program: what is not plain comes as a ``Record``, and nothing is run.

        Raises:
            FileNotFoundError, ValueError: as ``values``.
        """
        return self._decoded(names, inert)

    def plan_parts(self, chunks: Sequence[Chunk]) -> ReadPlan:
        for name in dict.fromkeys(chunk.name for chunk in chunks):
            self._check_stored(name, self._entry(name, StoredTensor))
        pieces = [piece for chunk in chunks for piece in _pieces(self._entry(chunk.name, StoredTensor), chunk)]
        pieces.sort(key=lambda piece: (piece.chunk.place.file, piece.chunk.place.offset))
        self._check_files(piece.chunk.place for piece in pieces)
        return ReadPlan(self, pieces)

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

    def verify_pieces(self, pieces: Iterable[_Piece]) -> None:
        """Compare what pieces lie in with what was written; see ``ReadPlan.verify``."""
        if self._verify:
            self._verify_chunks((piece.name, piece.dtype, piece.chunk) for piece in pieces)

    def _decoded(self, names: Sequence[str], decode: Callable[[bytearray], Any]) -> dict[str, Any]:
        places = {name: self._entry(name, StoredValue).place for name in names}
        self._check_files(places.values())
        return {name: self._value(name, place, decode) for name, place in places.items()}

    def _value(self, name: str, place: Place, decode: Callable[[bytearray], Any]) -> Any:
        path = self.folder / place.file
        with open(path, "rb", buffering=0) as file:
            content = _read_bytes(file, place)
        if self._verify:
            self._compare(name, place, zlib.crc32(content))
        try:
            return decode(content)
        except pickle.UnpicklingError as error:  # torch's text proposes to run what stands there
            raise ValueError(
                f"{path}: {name} must be made of plain values and tensors, got something else, which was not run; it is "
                "damaged or of another program, load another checkpoint"
            ) from error
        except Exception as error:  # whatever a damaged archive leads to
            raise ValueError(
                f"{path}: {name} must be a plain value as it was written, got {type(error).__name__}: {str(error)[:400]}; "
                "the checkpoint is damaged, load another one"
            ) from error

    def _verify_chunks(self, chunks: Iterable[_NamedChunk]) -> None:
        """Compare each chunk, or the record that it is part of, once, however many tensors and plans have it."""
        found = {self._summed(named[2].place): named for named in chunks}
        # A copy in blocks of rows plans the same chunk for each block, and a record may hold thousands of tensors.
        for place in self._verified.intersection(found):
            del found[place]
        with ThreadPoolExecutor(_VERIFY_THREADS) as threads:
            list(threads.map(self._verify_chunk, found, found.values()))
        self._verified.update(found)

    def _summed(self, place: Place) -> Place:
        """Return the range with a checksum that a place is in, or itself where there is none."""
        index = bisect.bisect_right(self._records, (place.file, place.offset, math.inf))
        is_inside = place.crc32 is None and index and self._records[index - 1].file == place.file
        return self._records[index - 1] if is_inside else place

    def _verify_chunk(self, place: Place, named: _NamedChunk) -> None:
        name, dtype, chunk = named
        if place.crc32 is not None:
            self._compare(name, place, checksum_of(self.folder, place))
        elif place.elements is None:  # else elements alone, without checksums or an archive around them
            path = self.folder / place.file
            with open(path, "rb", buffering=0) as file:
                content = _read_bytes(file, place)
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


class _Run(NamedTuple):
    """Elements of a stored chunk that follow each other, and what is read out of them.

    Args:
        first: index of the first element in the chunk.
        shape: the elements' own shape.
        boxes: (where a box begins in them, memory for it).
    """

    first: int
    shape: tuple[int, ...]
    boxes: list[tuple[tuple[int, ...], torch.Tensor]]

    def is_read_in_place(self, dtype: torch.dtype) -> bool:
        target = self.boxes[0][1]
        is_whole = tuple(target.shape) == self.shape
        return is_whole and target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()


@dataclass
class ReadPlan:
    """The pieces that a rank reads, in the order of files and places."""

    reader: CheckpointReader
    pieces: list[_Piece]
    sources: list[_Piece] = field(default_factory=list)
    """Further pieces to verify, which ``then`` reads."""
    then: list[Callable[[], Any]] = field(default_factory=list)
    """What completes the targets when the pieces are read."""

    def verify(self) -> None:
        """Compare what will be read with what was written, before anything changes.

        Raises:
            ValueError: they differ; names the file and the tensor.
        """
        self.reader.verify_pieces([*self.pieces, *self.sources])

    @torch.no_grad()
    def read(self) -> None:
        """Read the tensors in place, converting to their dtype."""
        for name, pieces in itertools.groupby(self.pieces, key=lambda piece: piece.chunk.place.file):
            with open(self.reader.folder / name, "rb", buffering=0) as file:
                # Pieces of one archive follow each other; it is unpacked once for all of them.
                for _, of_place in itertools.groupby(pieces, key=lambda piece: piece.chunk.place):
                    _read_pieces(file, list(of_place))
        # Only now: a shift adds to what was read.
        for complete in self.then:
            complete()

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes to read, of pieces whose elements lie in files as they are, and most bytes of memory at once in addition to the targets."""
        read = most = 0
        for _, of_chunk in itertools.groupby(self.pieces, key=lambda piece: piece.chunk.place):
            pieces = list(of_chunk)
            dtype = pieces[0].dtype
            for run in _runs(pieces):
                nbytes = math.prod(run.shape) * dtype.itemsize
                read, most = read + nbytes, max(most, 0 if run.is_read_in_place(dtype) else nbytes)
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
    check_others(
        folder, description.others, own.name, "it was damaged or changed after it was written; load another checkpoint"
    )
    return description


def check_others(folder: Path, crc32s: Mapping[str, int | None], description: str, remedy: str) -> None:
    """Compare further files of a folder with their checksums; None: of a file that must not be there.

    Raises:
        ValueError: one differs; names it.
    """
    for name, crc32 in crc32s.items():
        is_there = is_regular(folder / name)
        if crc32 != (zlib.crc32(read_regular(folder / name)) if is_there else None):
            raise ValueError(
                f"{folder / name} must have the checksum that {description} names, got {'another' if is_there else 'no file'}: {remedy}"
            )


def _without_suffix(name: str) -> str:
    return name.removesuffix(OBJECT) if name.startswith((OPTIMIZER, EXTRA_STATE, OPTIONAL_STATE)) else name


def _pieces(stored: StoredTensor, chunk: Chunk) -> Iterator[_Piece]:
    """Yield what the chunk of this rank needs of each stored chunk."""
    for source in stored.chunks:
        if (shared := chunk.overlap(source.offsets, source.sizes)) is not None:
            begins, target = shared
            within = tuple(begin - other for begin, other in zip(begins, source.offsets, strict=True))
            yield _Piece(chunk.name, stored.dtype, source, within, target)


def _read_pieces(file: BinaryIO, pieces: Sequence[_Piece]) -> None:
    """Read pieces of one stored chunk."""
    chunk, dtype = pieces[0].chunk, pieces[0].dtype
    if chunk.place.elements is None or sys.byteorder != "little":
        whole = _load_archived(_read_bytes(file, chunk.place))
        _check_archived(whole, dtype, chunk)
        copy_boxes(whole, [(piece.begin, piece.target) for piece in pieces])
        return
    for run in _runs(pieces):
        start = chunk.place.offset + chunk.place.elements + run.first * dtype.itemsize
        is_in_place = run.is_read_in_place(dtype)
        elements = run.boxes[0][1] if is_in_place else torch.empty(run.shape, dtype=dtype)
        _read_into(file, start, elements.reshape(-1).view(torch.uint8).numpy().data)
        if not is_in_place:
            copy_boxes(elements, run.boxes)


def _runs(pieces: Sequence[_Piece]) -> list[_Run]:
    """Return how to read pieces of one stored chunk: those without gaps in it each alone, the others in the rows around them."""
    sizes, runs, with_gaps = pieces[0].chunk.sizes, [], []
    for piece in pieces:
        first = _first_element(sizes, piece.begin, piece.target.shape)
        if first is None:
            with_gaps.append(piece)
        else:
            runs.append(_Run(first, tuple(piece.target.shape), [((0,) * len(sizes), piece.target)]))
    if with_gaps:
        first = min(piece.begin[0] for piece in with_gaps)
        end = max(piece.begin[0] + piece.target.shape[0] for piece in with_gaps)
        boxes = [((piece.begin[0] - first, *piece.begin[1:]), piece.target) for piece in with_gaps]
        runs.append(_Run(first * math.prod(sizes[1:]), (end - first, *sizes[1:]), boxes))
    return runs


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


def copy_boxes(whole: torch.Tensor, boxes: Sequence[tuple[Sequence[int], torch.Tensor]]) -> None:
    """Copy boxes of a tensor, each given by where it begins and memory for it."""
    for begins, target in boxes:
        box = tuple(slice(begin, begin + length) for begin, length in zip(begins, target.shape, strict=True))
        target.copy_(whole[box])


def _plain(content: bytearray, *, checks: bool) -> Any:
    if checks:
        check_records(content)
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _load_archived(content: bytearray) -> torch.Tensor:
    loaded: torch.Tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    return loaded


def _check_archived(loaded: Any, dtype: torch.dtype, chunk: StoredChunk) -> None:
    wanted = (dtype, tuple(chunk.sizes))
    got = (loaded.dtype, tuple(loaded.shape)) if isinstance(loaded, torch.Tensor) else type(loaded)
    if got != wanted:
        raise ValueError(f"{got} in place of {wanted}")


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
    buffer = memoryview(bytearray(min(_VERIFY_NBYTES, place.nbytes)))
    crc32, done = 0, 0
    with open(folder / place.file, "rb", buffering=0) as file:
        while done < place.nbytes:
            piece = buffer[: min(len(buffer), place.nbytes - done)]
            _read_into(file, place.offset + done, piece)
            crc32, done = zlib.crc32(piece, crc32), done + len(piece)
    return crc32
