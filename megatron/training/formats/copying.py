"""Copy a checkpoint into another format, a few rows at a time."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.core.distributed.fsdp.checkpoint import (
    EXTRA_STATE,
    Chunk,
    ForeignLayout,
    StoredTensor,
    TensorReader,
    ViewReader,
    inverse,
    write_alone,
)
from megatron.core.distributed.fsdp.huggingface import (
    CHECKSUMS,
    INDEX,
    SafetensorsWriter,
    lay_out,
    write_checksums,
    write_index,
)
from megatron.core.regular_file import naming
from megatron.training.formats.architecture import Architecture, tensor_sizes
from megatron.training.formats.huggingface import family_for
from megatron.training.formats.huggingface_config import CONFIG
from megatron.training.formats.interleaved import TogetherReader
from megatron.training.formats.rules import views_of

CONVERTED_FROM = f"{EXTRA_STATE}converted_from"
_WEIGHTS = ("optimizer.", EXTRA_STATE, "optional_state.")


def is_weight(name: str) -> bool:
    """Return whether an entry of a checkpoint of ours is the model's."""
    return not name.startswith(_WEIGHTS)


def tensors_of(reader: TensorReader) -> dict[str, StoredTensor]:
    """Return the tensors that a reader has, by name."""
    return {name: entry for name, entry in reader.entries.items() if isinstance(entry, StoredTensor)}


def blocks(
    reader: TensorReader, name: str, *, buffer_nbytes: int, dtype: torch.dtype | None = None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a tensor as (first row, rows), each as large as fits into ``buffer_nbytes``, but one row at least."""
    stored = reader.entries[name]
    assert isinstance(stored, StoredTensor), name
    dtype = dtype or stored.dtype
    if not stored.size:
        whole = torch.empty((), dtype=dtype)
        _read(reader, Chunk(name, stored.size, torch.Size(()), whole))
        yield 0, whole
        return
    row_nbytes = math.prod(stored.size[1:]) * dtype.itemsize
    step = max(1, buffer_nbytes // max(1, row_nbytes))
    for first in range(0, stored.size[0], step):
        rows = torch.empty((min(step, stored.size[0] - first), *stored.size[1:]), dtype=dtype)
        offsets = torch.Size((first, *(0 for _ in stored.size[1:])))
        _read(reader, Chunk(name, stored.size, offsets, rows))
        yield first, rows


def _read(reader: TensorReader, chunk: Chunk) -> None:
    plan = reader.plan_parts([chunk])
    plan.verify()
    plan.read()


def memory_nbytes(reader: TensorReader, names: Sequence[str], *, buffer_nbytes: int) -> int:
    """Return how many bytes of tensors are in memory at once, at most, while these are copied."""
    tensors = tensors_of(reader)
    rows = [
        min(entry.numel, max(math.prod(entry.size[1:]), buffer_nbytes // entry.dtype.itemsize)) * entry.dtype.itemsize
        for entry in (tensors[name] for name in names)
    ]
    # The rows, and a copy in the stored dtype or layout; or what can only be read as a whole.
    return max(rows) + max(max(rows), reader.whole_nbytes(names))


def chunks_of(
    reader: TensorReader, names: Sequence[str], *, buffer_nbytes: int, dtype: torch.dtype | None = None
) -> Iterator[Chunk]:
    """Yield tensors as the chunks that a checkpoint is written from; ``dtype`` None keeps theirs."""
    tensors = tensors_of(reader)
    for name in names:
        size = tensors[name].size
        for first, rows in blocks(reader, name, buffer_nbytes=buffer_nbytes, dtype=dtype):
            yield Chunk(name, size, torch.Size((first, *(0 for _ in size[1:]))) if size else size, rows)


def write_own(
    reader: TensorReader,
    path: Path,
    values: Mapping[str, Any],
    *,
    names: Sequence[str],
    buffer_nbytes: int,
    dtype: torch.dtype | None = None,
    layout: ForeignLayout | None = None,
) -> None:
    """Write tensors of a reader as a checkpoint of ours, which ``--load`` and ``load_checkpoint`` read.

    Args:
        values: plain values by name.
        names: of the tensors to write.
        dtype: None: as they are.
        layout: names and layouts of another program in place of ours.
    """
    chunks = chunks_of(reader, names, buffer_nbytes=buffer_nbytes, dtype=dtype)
    if layout is None:
        write_alone(path, chunks, values)
        return
    moved = (part for chunk in chunks for part in layout.chunks(chunk))
    of_optimizer = {name: values[name] for name in ("optimizer.param_groups", "optimizer.kind") if name in values}
    written = {**layout.named(values), **layout.values(of_optimizer)}
    write_alone(path, moved, written, files=layout.files, aliases=layout.aliases)


def write_huggingface(
    reader: TensorReader,
    folder: Path,
    architecture: Architecture,
    *,
    buffer_nbytes: int,
    shard_nbytes: int,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    token_ids: Mapping[str, Any] | None = None,
) -> str:
    """Write the model's weights as a Hugging Face folder, which appears when it is complete; return its ``model_type``.

    Args:
        reader: reads our weights.
        vocab_size: ids to write; None: all, padding too.
        dtype: None: as they are.
        token_ids: further entries of ``config.json``, which name special tokens.

    Raises:
        FileExistsError: something is at ``folder``.
        NotImplementedError: no family has such models.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} must not be there, got a folder or file; give another one, or remove it")
    rows = architecture["padded_vocab_size"] if vocab_size is None else vocab_size
    if not 1 <= rows <= architecture["padded_vocab_size"]:
        raise ValueError(f"--vocab-size must be from 1 to {architecture['padded_vocab_size']}, got {rows}")
    family, config = family_for({**architecture, "padded_vocab_size": rows})
    views = inverse(views_of(family.table, tensor_sizes(architecture), architecture, vocab_rows=rows))
    theirs: TensorReader = ViewReader(reader, views)
    if family.interleaved:
        theirs = TogetherReader(theirs, family.interleaved)
    _remove_leftovers(folder)
    temporary = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(6)}")
    temporary.mkdir(parents=True)
    lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # A file system without locks: other processes cannot lock the folder either, so none removes it.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        dtypes = {dtype or entry.dtype for entry in tensors_of(theirs).values()}
        config |= token_ids or {}
        config["dtype"] = str(sorted(dtypes, key=lambda d: d.itemsize)[-1]).removeprefix("torch.")
        with naming(temporary / CONFIG):
            (temporary / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        _write_shards(theirs, temporary, buffer_nbytes=buffer_nbytes, shard_nbytes=shard_nbytes, dtype=dtype)
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)
    return family.model_type


def _remove_leftovers(folder: Path) -> None:
    """Remove temporary folders of killed conversions to this folder, unless they are locked or contain other files."""
    for left in folder.parent.glob(f"{glob.escape(folder.name)}.tmp-{12 * '[0-9a-f]'}"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as scope:
            descriptor = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            scope.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            entries = list(left.iterdir())
            if all(entry.name in (CONFIG, INDEX, CHECKSUMS) or entry.suffix == ".safetensors" for entry in entries):
                for entry in entries:
                    entry.unlink()
                left.rmdir()


def _write_shards(
    reader: TensorReader, folder: Path, *, buffer_nbytes: int, shard_nbytes: int, dtype: torch.dtype | None
) -> None:
    kinds = {name: (entry.size, dtype or entry.dtype) for name, entry in tensors_of(reader).items()}
    files, crc32s = lay_out(kinds, shard_nbytes), dict[str, int]()
    for file in files:
        path = folder / file.name
        with naming(path), SafetensorsWriter(path, [(name, *kinds[name]) for name in file.tensors]) as writer:
            for name in file.tensors:
                for _, rows in blocks(reader, name, buffer_nbytes=buffer_nbytes, dtype=dtype):
                    writer.write(rows)
        crc32s |= writer.crc32s
    write_index(folder, files)
    write_checksums(folder, {file.name: file.tensors for file in files}, crc32s, (INDEX, CONFIG))
