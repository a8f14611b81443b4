"""Write the items of a checkpoint: archives of ``torch.save``, one after the other in a file for each rank.

PyTorch's distributed checkpoints (DCP) have the same files, so each reads the other's. DCP's own planners gather a plan from
all ranks before writing and another one after. Here each rank computes what it writes, so only what was written is gathered,
once. Each item gets a checksum while it is written.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.checkpoint.agreement import agree
from megatron.core.distributed.fsdp.checkpoint.chunks import Chunk
from megatron.core.distributed.fsdp.checkpoint.description import (
    DESCRIPTION,
    Description,
    Place,
    StoredChunk,
    StoredTensor,
    StoredValue,
    encode,
)
from megatron.core.distributed.fsdp.checkpoint.folder import DATA_SUFFIX, MARKER, begin_folder
from megatron.core.distributed.fsdp.checkpoint.pickles import encode_metadata
from megatron.core.distributed.fsdp.codec.frozen_weights import FrozenWeight


@dataclass
class Written:
    """The items that one rank wrote.

    Args:
        files: bytes of each file by name: one, or none if there was nothing to write.
        values: places of plain values.
        chunks: (name of the tensor, its dtype, its shape, the chunk) of each part of a tensor.
    """

    files: dict[str, int] = field(default_factory=dict)
    values: dict[str, Place] = field(default_factory=dict)
    chunks: list[tuple[str, torch.dtype, torch.Size, StoredChunk]] = field(default_factory=list)


def write_data(folder: Path, chunks: Iterable[Chunk], values: Mapping[str, Any], *, rank: int) -> Written:
    """Write this rank's file and synchronise it to disk.

    Args:
        chunks: parts of tensors. Of an iterator each is asked for when the one before is written, and must be in host memory.
        values: plain values by name.

    Raises:
        OSError: the file could not be written; names it.

    Ranks: each on its own.
    """
    written = Written()
    if not chunks and not values:
        return written
    name = f"__{rank}_0{DATA_SUFFIX}"
    with _naming(folder / name), open(folder / name, "wb") as file:
        for key, value in values.items():
            item = _Item(file)
            item.write(_packed(value))
            written.values[key] = item.place(name)
        for chunk, tensor in _on_host_in_turn(chunks):
            item = _Item(file, tensor)
            torch.save(item.tensor, item)  # type: ignore[arg-type]
            stored = StoredChunk(tuple(chunk.offsets), tuple(chunk.local.shape), item.place(name))
            written.chunks.append((chunk.name, chunk.local.dtype, chunk.size, stored))
        to_disk(file)
        written.files[name] = file.tell()
    return written


def write_metadata(
    folder: Path,
    written: Sequence[Written],
    sizes: Mapping[str, torch.Size] | None = None,
    aliases: Mapping[str, str] | None = None,
    others: Mapping[str, bytes] | None = None,
) -> None:
    """Write the folder's description and, last, DCP's metadata, which make it a complete checkpoint.

    Args:
        written: [R] what each rank wrote.
        sizes: shapes of tensors that the checkpoint must have in addition to those that were written.
        aliases: further names of tensors, whose elements are not written twice, by their own; those of others are left out.
        others: further files by name, which another program expects; they are written first.

    Raises:
        RuntimeError: the ranks together did not write each element of a tensor exactly once.
        OSError: a file could not be written; names it.

    Ranks: one, after all have written.
    """
    entries: dict[str, StoredTensor | StoredValue] = {}
    for rank in written:
        entries.update({name: StoredValue(place) for name, place in rank.values.items()})
        for name, dtype, size, chunk in rank.chunks:
            stored = entries.setdefault(name, StoredTensor(dtype, size, []))
            assert isinstance(stored, StoredTensor)
            stored.chunks.append(chunk)
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, StoredTensor)}
    for name, size in {**{name: tensor.size for name, tensor in tensors.items()}, **(sizes or {})}.items():
        chunks = tensors[name].chunks if name in tensors else []
        numel = sum(chunk.numel for chunk in chunks)
        if numel != math.prod(size) or not chunks:
            raise RuntimeError(
                f"all ranks together must write the {math.prod(size)} elements of {name} once, got {numel}; its mesh must "
                "lie within the ranks that save, and hold it once"
            )
    # Only DCP's readers, which other programs use, know aliases: in our description each byte is of one entry.
    metadata = encode_metadata(
        {**entries, **{new: entries[own] for new, own in (aliases or {}).items() if own in entries}}
    )
    files = {name: nbytes for rank in written for name, nbytes in rank.files.items()}
    for name, content in (others or {}).items():
        write_file(folder / name, content)
    crc32s = {name: zlib.crc32(content) for name, content in (others or {}).items()}
    write_file(folder / DESCRIPTION, encode(Description(entries, files, zlib.crc32(metadata), crc32s)))
    write_file(folder / f"{MARKER}.tmp", metadata)
    os.rename(folder / f"{MARKER}.tmp", folder / MARKER)


def write_parts(
    folder: Path,
    chunks: Sequence[Chunk],
    values: Mapping[str, Any],
    *,
    files: Mapping[str, bytes] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write parts of tensors, and plain values, into a folder; what another save left in it is no checkpoint meanwhile.

    Args:
        chunks: this rank's parts; those of all ranks must hold each element of each tensor once.
        values: plain values that only this rank writes, by name.
        files: further files by name, which another program expects; those of the first rank are written.
        group: the ranks that write; None: all.

    Raises:
        RuntimeError: an element is written by no rank, or by several; on all ranks.
        OSError: a file could not be written; names it.

    Ranks: all of the group, with the same folder; blocks.
    """
    write, complete = begin_parts(folder, chunks, values, files=files, group=group)
    complete(write)


def begin_parts(
    folder: Path,
    chunks: Sequence[Chunk],
    values: Mapping[str, Any],
    *,
    files: Mapping[str, bytes] | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Callable[[], Written], Callable[[Callable[[], Written]], None]]:
    """Begin what ``write_parts`` does; what another save left in the folder is no checkpoint from now on.

    Returns:
        What writes this rank's parts, in any thread, and what then completes the checkpoint, on all ranks at once: it takes a
        function that returns what was written, or raises why that failed.

    Ranks: all of the group, with the same folder; blocks.
    """
    agree(lambda: folder.mkdir(parents=True, exist_ok=True), lambda _: _clear(folder), group=group)

    def write() -> Written:
        return write_data(folder, chunks, values, rank=dist.get_rank())

    def complete(result: Callable[[], Written]) -> None:
        agree(result, lambda written: write_metadata(folder, written, others=files), group=group)

    return write, complete


def write_alone(
    path: Path,
    chunks: Iterable[Chunk],
    values: Mapping[str, Any],
    *,
    files: Mapping[str, bytes] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Write a checkpoint from one process, without torch.distributed; a folder that is there is replaced when it is complete.

    Args:
        chunks: parts of tensors, which are asked for and written one after the other.
        values: plain values by name.
        files: further files by name, which another program expects.
        aliases: further names of tensors by their own.

    Raises:
        FileExistsError: something that is not a checkpoint is at ``path``.
        OSError: a file could not be written; names it. What was there is still there.
    """
    folder = begin_folder(path)
    try:
        written = write_data(folder.beside, chunks, values, rank=0)
        write_metadata(folder.beside, [written], None, aliases, files)
        folder.publish()
    except BaseException:
        folder.discard()
        raise


def _clear(folder: Path) -> None:
    """Delete the files of another save, those that make it a checkpoint first."""
    for name in (MARKER, DESCRIPTION):
        (folder / name).unlink(missing_ok=True)
    for path in folder.glob(f"__*{DATA_SUFFIX}"):
        path.unlink()


def _packed(value: Any) -> bytes:
    """Serialise a plain value as DCP stores values that are not tensors."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class _Item:
    """A stream to an item of a file, which sums what passes and sees where the tensor's own memory begins."""

    def __init__(self, file: BinaryIO, tensor: torch.Tensor | None = None) -> None:
        self.tensor = tensor
        self._file, self._start, self._nbytes, self._crc32 = file, file.tell(), 0, 0
        self._elements: int | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data)
        if self._elements is None and self.tensor is not None and view.nbytes == self.tensor.nbytes > 0:
            address = numpy.frombuffer(view, dtype=numpy.uint8).ctypes.data
            if address == self.tensor.data_ptr() and sys.byteorder == "little":
                self._elements = self._nbytes
        self._file.write(view)
        self._crc32 = zlib.crc32(view, self._crc32)
        self._nbytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        pass  # torch.save calls it; the file is flushed once

    def place(self, name: str) -> Place:
        """Return where the item is, when all of it is written."""
        return Place(name, self._start, self._nbytes, self._crc32, self._elements)


def _on_host_in_turn(chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, torch.Tensor]]:
    """Yield the chunks with their elements in host memory; from a device, one is copied while the one before is written."""
    devices: set[torch.device] = set()
    if isinstance(chunks, Sequence):
        devices = {chunk.local.device for chunk in chunks if chunk.local.device.type != "cpu"}
    if not devices or not isinstance(chunks, Sequence):
        yield from ((chunk, _on_host(chunk.local)) for chunk in chunks)
        return
    for device in devices:  # the thread that copies has another current stream
        torch.get_device_module(device).current_stream(device).synchronize()
    with ThreadPoolExecutor(1) as thread:
        copies = [thread.submit(_on_host, chunks[0].local)]
        for chunk, following in itertools.zip_longest(chunks, chunks[1:]):
            if following is not None:
                copies.append(thread.submit(_on_host, following.local))
            yield chunk, copies.pop(0).result()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in host memory, with no more storage than its elements: torch.save would write it all."""
    host = (tensor.clone() if isinstance(tensor, FrozenWeight) else tensor).detach().cpu()
    return (
        host if host.untyped_storage().nbytes() == host.nbytes and host.is_contiguous() else host.clone().contiguous()
    )


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in errors of the system, and say what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save raises the latter for an error of its stream
        cause = error if isinstance(error, OSError) else error.__context__ or error.__cause__
        if not isinstance(cause, OSError):
            raise
        free = shutil.disk_usage(path.parent).free if path.parent.is_dir() else 0
        raise OSError(
            f"{path} could not be written, got: {cause} ({free:,} bytes are free there). What was saved before is still "
            "there: free space or save to another folder, and start again from the last checkpoint"
        ) from error


def write_file(path: Path, content: bytes) -> None:
    """Write a file and synchronise it to disk; an OSError names it."""
    with _naming(path), open(path, "wb") as file:
        file.write(content)
        to_disk(file)


def to_disk(file: BinaryIO) -> None:
    """Synchronise what was written to a file to disk."""
    file.flush()
    os.fsync(file.fileno())
