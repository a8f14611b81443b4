"""``save_pretrained``: a sharded model as a Hugging Face folder, to which all ranks write at once."""

from __future__ import annotations

import itertools
import math
import operator
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.api.module import fsdp_modules
from megatron.core.distributed.fsdp.checkpoint import (
    Chunk,
    ForeignLayout,
    NamedTensor,
    View,
    agree,
    chunks_to_write,
    inverse,
)
from megatron.core.distributed.fsdp.checkpoint.agreement import check_initialized, together
from megatron.core.distributed.fsdp.checkpoint.chunks import local_chunks, plain_chunks
from megatron.core.distributed.fsdp.checkpoint.files import to_disk
from megatron.core.distributed.fsdp.checkpoint.reader import checksum_of
from megatron.core.distributed.fsdp.checkpoint.state import model_tensors
from megatron.core.distributed.fsdp.huggingface import adapters
from megatron.core.distributed.fsdp.huggingface.conversion import files_of_model, name_in_files, own_classes, own_dtypes
from megatron.core.distributed.fsdp.huggingface.load import check_model
from megatron.core.distributed.fsdp.huggingface.safetensors_files import (
    CHECKSUMS,
    CONFIG,
    INDEX,
    SINGLE,
    FileLayout,
    lay_out,
    lay_out_file,
    write_checksums,
    write_index,
)
from megatron.core.distributed.fsdp.huggingface.traced_tensor import TracedTensor, computed

_UNFINISHED = ".unfinished"
_BLOCK_NBYTES = 1 << 24  # what is converted at once before it is written


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_nbytes: int = 5_000_000_000,
) -> None:
    """Save a sharded model of ``transformers`` so that ``from_pretrained`` of plain ``transformers`` loads it.

    Each rank writes its own rows to their places in the files, so no rank holds more than it does in training, but for
    tensors whose conversion is more than a move of rows and columns: these are gathered one at a time. Files have the names and
    layouts of those that the model was loaded from, ``config.json`` the class that the model had before ``fully_shard``. Files
    get their names when all are complete; those of an earlier save in the folder are replaced then.

    Args:
        model: a sharded ``PreTrainedModel``. Of a ``PeftModel`` with LoRA the active adapter is saved, as ``peft`` does.
        folder: made if it is not there; must be the same storage for all ranks.
        dtype: of floating-point tensors in the files. None: that of each parameter before ``fully_shard``; ``torch.float32``
            keeps all bits of fp32 main weights.
        max_shard_nbytes: bytes in one file, unless one tensor has more.

    Raises:
        ValueError: ``dtype`` is not floating point; a conversion of the model's cannot be inverted.
        TypeError: the model is not of ``transformers``.
        OSError: writing failed; the ranks do not see one folder.
        RuntimeError: torch.distributed is not initialised.

    Ranks: all of the default process group; blocks until all is on disk.
    Source: ours; the format is that of ``transformers``.
    """
    check_initialized("save_pretrained")
    check_model(model)
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point one or None, got {dtype}")
    path = Path(os.path.abspath(folder))
    save = together(lambda: _Save(model, path, dtype, max_shard_nbytes))
    together(lambda: save.begin() if dist.get_rank() == 0 else None)
    together(save.write)
    save.write_calculated()
    agree(save.crc32s, lambda of_ranks: save.finish(model, {n: crc32 for own in of_ranks for n, crc32 in own.items()}))


class _Save:
    """A save: what is written where.

    Args:
        model: its own tensors are not changed.
    """

    def __init__(self, model: nn.Module, path: Path, dtype: torch.dtype | None, max_shard_nbytes: int) -> None:
        self._path = path
        for unit in fsdp_modules(model):
            unit._fsdp_unit.show_sharded()
        dtypes = own_dtypes(model)
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        self._entries = {
            name_in_files(model, entry.names): entry
            for entry in model_tensors(model)
            if not ignored.issuperset(entry.names)
        }
        own = {
            name: TracedTensor.named(
                name, entry.tensor.shape, _dtype_in_files(entry.tensor, dtype, dtypes.get(id(entry.tensor)))
            )
            for name, entry in self._entries.items()
        }
        self.dtype = _common_dtype(own.values())
        self._adapts = adapters.has_adapters(model)
        if not self._adapts and any(adapters.is_inside_adapters(name) for name in own):
            raise ValueError(
                "a model with adapters is saved by its PeftModel, got what is inside of it; pass the PeftModel"
            )
        adapters.check_adapters(model)
        made: Any = adapters.files_of_adapter(model, own) if self._adapts else files_of_model(model, own)
        self._calculated = {name: tensor for name, tensor in made.items() if tensor.parts is None}
        views = {name: View(t.shape, t.parts, t.dtype) for name, t in made.items() if t.parts is not None}
        self._layout = ForeignLayout(inverse(views))
        kinds = {name: (t.shape, t.dtype) for name, t in made.items()}
        self._files = [lay_out_file(adapters.FILE, kinds)] if self._adapts else lay_out(kinds, max_shard_nbytes)
        self._places = {name: file for file in self._files for name in file.tensors}

    def begin(self) -> None:
        """Make the files, in their full length, under names that nobody loads."""
        self._path.mkdir(parents=True, exist_ok=True)
        for file in self._files:
            with open(self._unfinished(file), "wb") as made:
                made.write(file.header)
                made.truncate(file.nbytes)
                to_disk(made)

    def write(self) -> None:
        """Write what this rank holds, of replicas its share.

        Raises:
            FileNotFoundError: the files that the first rank has made are not there.
        """
        tensors = [NamedTensor((name,), entry.tensor) for name, entry in self._entries.items()]
        chunks = chunks_to_write(tensors)
        if dist.get_rank() == 0:
            chunks += plain_chunks(tensors)
        wanted = set(self._layout.views)
        parts: dict[FileLayout, list[Chunk]] = {}
        for chunk in chunks:
            for part in self._layout.chunks(chunk) if chunk.name in wanted else ():
                parts.setdefault(self._places[part.name], []).append(part)
        for file, own in parts.items():
            self._write_chunks(file, own)

    def write_calculated(self) -> None:
        """Gather and write what is more than a move of boxes; ranks take turns. Ranks: all."""
        for index, (name, tensor) in enumerate(self._calculated.items()):
            mine = index % dist.get_world_size() == dist.get_rank()
            with torch.no_grad():
                whole = computed(tensor, self._whole)

            write = partial(self._write_chunks, self._places[name], local_chunks(name, whole))
            together(write if mine else lambda: None)

    def _write_chunks(self, file: FileLayout, chunks: Sequence[Chunk]) -> None:
        with self._open(file) as opened:
            for chunk in chunks:
                _write_box(opened, file, chunk)
            to_disk(opened)

    def _whole(self, name: str) -> torch.Tensor:
        tensor = self._entries[name].tensor.detach()
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()

    def crc32s(self) -> dict[str, int]:
        """Compute the checksums of this rank's share of what all have written; adapters have none."""
        if self._adapts:
            return {}
        shares = list(self._places.items())[dist.get_rank() :: dist.get_world_size()]
        places = {name: file.tensors[name].chunks[0].place for name, file in shares}
        return {
            name: checksum_of(self._path, place._replace(file=place.file + _UNFINISHED))
            for name, place in places.items()
        }

    def finish(self, model: nn.Module, crc32s: Mapping[str, int]) -> None:
        """Give the files their names, and write the index, what says how the model is built, and checksums."""
        if not self._adapts:
            for name in (CHECKSUMS, INDEX):
                (self._path / name).unlink(missing_ok=True)
            for old in self._path.glob("model*.safetensors"):
                if old.name == SINGLE or old.name.count("-of-") == 1:
                    old.unlink()
        for file in self._files:
            os.replace(self._unfinished(file), self._path / file.name)
        write_index(self._path, self._files)
        if self._adapts:
            adapters.write_config(model, self._path)
        else:
            _write_config(model, self._path, self.dtype)
            write_checksums(self._path, {file.name: file.tensors for file in self._files}, crc32s, (INDEX, CONFIG))

    def _unfinished(self, file: FileLayout) -> Path:
        return self._path / (file.name + _UNFINISHED)

    def _open(self, file: FileLayout) -> BinaryIO:
        path = self._unfinished(file)
        if not path.is_file() or path.stat().st_size != file.nbytes:
            raise FileNotFoundError(
                f"{path}, which rank 0 has made, must be seen by all ranks, got {'another size' if path.exists() else 'no file'}: "
                "save to storage that all hosts share"
            )
        return open(path, "r+b", buffering=0)


def _dtype_in_files(tensor: torch.Tensor, wanted: torch.dtype | None, before: torch.dtype | None) -> torch.dtype:
    if not tensor.is_floating_point():
        return tensor.dtype
    return wanted or before or tensor.dtype


def _common_dtype(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """Return the floating-point dtype of most elements: what ``config.json`` says."""
    counts = Counter[torch.dtype]()
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            counts[tensor.dtype] += tensor.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def _write_config(model: nn.Module, path: Path, dtype: torch.dtype) -> None:
    with own_classes(model):
        config: Any = model.config
        config.dtype = str(dtype).removeprefix("torch.")
        config.architectures = [type(model).__name__]
        config.save_pretrained(path)
        if model.can_generate():  # type: ignore[operator]
            model.generation_config.save_pretrained(path)  # type: ignore[union-attr, operator]


def _write_box(file: BinaryIO, layout: FileLayout, chunk: Chunk) -> None:
    """Write a box of a tensor to its place."""
    stored = layout.tensors[chunk.name]
    dtype, start = stored.dtype, stored.chunks[0].place.offset
    size, local = chunk.size, chunk.local.detach()
    # The innermost dims that the box covers whole, and one more, lie without gaps.
    inner = len(size)
    while inner > 0 and (inner == len(size) or local.shape[inner] == size[inner]):
        inner -= 1
    strides = [math.prod(size[dim + 1 :]) * dtype.itemsize for dim in range(len(size))]
    for index in itertools.product(*map(range, local.shape[:inner])):
        begins = map(sum, itertools.zip_longest(chunk.offsets, index, fillvalue=0))
        _write_run(file, local[index], start + sum(map(operator.mul, begins, strides)), dtype)


def _write_run(file: BinaryIO, values: torch.Tensor, at: int, dtype: torch.dtype) -> None:
    """Write values that follow each other, a block at a time."""
    if values.dim() == 0:
        values = values.unsqueeze(0)
    row_nbytes = max(1, math.prod(values.shape[1:]) * dtype.itemsize)
    step = max(1, _BLOCK_NBYTES // row_nbytes)
    for begin in range(0, values.shape[0], step):
        block = values[begin : begin + step].to(device="cpu", dtype=dtype).contiguous()
        view = block.reshape(-1).view(torch.uint8).numpy().data
        position = at + begin * row_nbytes
        while view.nbytes:
            written = os.pwrite(file.fileno(), view, position)
            view, position = view[written:], position + written
