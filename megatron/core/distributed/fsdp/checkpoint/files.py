"""Write and read chunks in the files of a PyTorch distributed checkpoint (DCP).

DCP's own planners gather a plan from all ranks before writing and another one after. Here each rank computes what it
writes, so only what was written is gathered, once.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from megatron.core.distributed.fsdp.checkpoint.chunks import Chunk, local_chunks
from megatron.core.distributed.fsdp.checkpoint.folder import MARKER, find_folder
from megatron.core.distributed.fsdp.checkpoint.state import NamedTensor

_ONE_BYTE_ITEM = torch.Size([0])
_COPY_AHEAD_NBYTES = 10_000_000  # DCP's default
# A tensor's name, and where in it a box begins.
_Target = tuple[str, torch.Size]


@dataclasses.dataclass
class Written:
    """The items that one rank wrote, with the file and offset of each."""

    plan: SavePlan
    results: list[WriteResult]


def write_data(folder: Path, chunks: Sequence[Chunk], values: Mapping[str, bytes], *, rank: int) -> Written:
    """Write this rank's file and synchronise it to disk.

    Args:
        chunks: parts of tensors.
        values: plain values by name, serialised by ``packed``.

    Ranks: each on its own.
    """
    data: dict[MetadataIndex, torch.Tensor | bytes] = {}
    items = []
    for name, packed in values.items():
        item = WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)
        items.append(item)
        data[item.index] = packed
    for chunk in chunks:
        properties = TensorProperties(dtype=chunk.local.dtype)
        item = WriteItem(
            index=MetadataIndex(chunk.name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk.metadata, properties=properties, size=chunk.size),
        )
        items.append(item)
        data[item.index] = chunk.local
    plan = SavePlan(items)
    if not items:
        return Written(plan, [])
    # Only for device memory: a copy ahead needs the current device to be the tensor's, and a new thread's is not.
    on_device = any(chunk.local.device.type != "cpu" for chunk in chunks)
    writer = FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=_COPY_AHEAD_NBYTES if on_device else 0)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    # The writer names files by the plan's index in the list.
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
    results = writer.write_data(plan, _WritePlanner(data)).value()
    for name in dict.fromkeys(result.storage_data.relative_path for result in results):
        _sync_file(folder / name)
    return Written(SavePlan(items), results)


def write_metadata(folder: Path, written: Sequence[Written], sizes: Mapping[str, torch.Size]) -> None:
    """Write the folder's metadata, which makes it a complete checkpoint.

    Args:
        written: [R] what each rank wrote.
        sizes: shapes of all tensors that the checkpoint must have.

    Raises:
        RuntimeError: the ranks together did not write each element of a tensor exactly once.

    Ranks: one, after all have written.
    """
    _, metadata = create_default_global_save_plan([rank.plan for rank in written])
    for name, size in sizes.items():
        stored = metadata.state_dict_metadata.get(name)
        chunks = stored.chunks if isinstance(stored, TensorStorageMetadata) else []
        numel = sum(math.prod(chunk.sizes) for chunk in chunks)
        if numel != math.prod(size) or not chunks:
            raise RuntimeError(
                f"all ranks together must write the {math.prod(size)} elements of {name} once, got {numel}; its mesh must "
                "lie within the ranks that save, and hold it once"
            )
    writer = FileSystemWriter(folder, sync_files=False)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    writer.finish(metadata, [rank.results for rank in written])
    _sync_file(folder / MARKER)


class CheckpointReader:
    """A checkpoint on disk, read without a model or process group.

    Args:
        path: the folder. If a save was killed while it replaced that folder, what it left beside it is read.

    Raises:
        FileNotFoundError: no complete checkpoint is there.
        ValueError: its metadata cannot be read.

    Attributes:
        folder: the folder that is read.
        metadata: DCP's metadata: names, shapes, dtypes and files of the entries.

    Ranks: each reads what it needs, on its own.
    """

    def __init__(self, path: Path) -> None:
        self.folder = folder = find_folder(path)
        self._reader = FileSystemReader(folder)
        try:
            self.metadata: Metadata = self._reader.read_metadata()
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, ValueError) as error:
            raise ValueError(f"{folder / MARKER} must be the metadata of a checkpoint, got {error!r}") from error
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=False)

    def values(self, names: Sequence[str]) -> dict[str, Any]:
        """Read plain values and return them by name; tensors in them are on the CPU.

        Raises:
            FileNotFoundError: a file that has some of it is gone or too short.
        """
        items = [
            ReadItem(
                type=LoadItemType.BYTE_IO,
                dest_index=MetadataIndex(name),
                dest_offsets=_ONE_BYTE_ITEM,
                storage_index=MetadataIndex(name),
                storage_offsets=_ONE_BYTE_ITEM,
                lengths=_ONE_BYTE_ITEM,
            )
            for name in names
        ]
        self._check_files(items)
        planner = _ReadPlanner({})
        self._read(items, planner)
        return {name: planner.values[name] for name in names}

    def tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor into CPU memory.

        Raises:
            FileNotFoundError: a file that has some of it is gone or too short.
        """
        stored = self.metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        whole = torch.empty(stored.size, dtype=stored.properties.dtype)
        self.read(self.plan([NamedTensor((name,), whole)]))
        return whole

    def plan(self, tensors: Sequence[NamedTensor]) -> ReadPlan:
        """Return how to read this rank's parts of tensors, which must be in the checkpoint under their first names.

        Raises:
            FileNotFoundError: a file that has some of it is gone or too short.
        """
        items: list[ReadItem] = []
        targets: dict[_Target, torch.Tensor] = {}
        for entry in tensors:
            chunks = [chunk for chunk in local_chunks(entry.name, entry.tensor) if chunk.local.numel() > 0]
            stored = self.metadata.state_dict_metadata[entry.name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(entry.name, stored, [chunk.metadata for chunk in chunks])
            targets.update({(entry.name, chunk.offsets): chunk.local for chunk in chunks})
        self._check_files(items)
        return ReadPlan(items, targets)

    def read(self, plan: ReadPlan) -> None:
        """Read the plan's tensors in place, converting to their dtype."""
        self._read(plan.items, _ReadPlanner(plan.targets))

    def _read(self, items: list[ReadItem], planner: _ReadPlanner) -> None:
        with torch.no_grad():
            self._reader.read_data(LoadPlan(items), planner).wait()

    def _check_files(self, items: Sequence[ReadItem]) -> None:
        needed: dict[str, int] = {}
        for item in items:
            place = self.metadata.storage_data[item.storage_index]
            end = place.offset + place.length
            needed[place.relative_path] = max(needed.get(place.relative_path, 0), end)
        for name, nbytes in needed.items():
            path = self.folder / name
            have = os.path.getsize(path) if path.is_file() else None
            if have is None or have < nbytes:
                raise FileNotFoundError(
                    f"{path} must have {nbytes} bytes or more, got {'no file' if have is None else f'{have} bytes'}: "
                    "the checkpoint was damaged after it was written; load another one"
                )


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """The items that a rank reads, and the memory for them, by name and offsets in the whole tensor."""

    items: list[ReadItem]
    targets: dict[_Target, torch.Tensor]


def _sync_file(path: Path) -> None:
    # DCP's sync_files synchronises before Python's buffer is flushed, so the end of the file could be lost.
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def packed(value: Any) -> bytes:
    """Serialise a plain value as DCP stores values that are not tensors."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class _NoPlanning:
    """The methods of DCP's planners that nothing calls, since the plan exists already."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the plan exists already")

    set_up_planner = create_local_plan = create_global_plan = finish_plan = _refuse


class _WritePlanner(_NoPlanning, SavePlanner):
    """Gives DCP's writer the data of an item."""

    def __init__(self, data: Mapping[MetadataIndex, torch.Tensor | bytes]) -> None:
        self._data = data

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = self._data[write_item.index]
        return io.BytesIO(data) if isinstance(data, bytes) else data


class _ReadPlanner(_NoPlanning, LoadPlanner):
    """Gives DCP's reader the memory of an item."""

    def __init__(self, targets: Mapping[_Target, torch.Tensor]) -> None:
        self._targets = targets
        self.values: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.values[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        assert index.offset is not None
        target = self._targets[index.fqn, index.offset]
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, begin, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass  # resolve_tensor returned the memory itself
