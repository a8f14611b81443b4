"""Parts of tensors that a caller describes itself, written to and read from a folder in DCP's format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.checkpoint.agreement import agree
from megatron.core.distributed.fsdp.checkpoint.chunks import Chunk
from megatron.core.distributed.fsdp.checkpoint.description import DESCRIPTION
from megatron.core.distributed.fsdp.checkpoint.files import Written, packed, write_data, write_metadata
from megatron.core.distributed.fsdp.checkpoint.folder import DATA_SUFFIX, MARKER, begin_folder


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

    def write() -> tuple[Written, dict[str, torch.Size]]:
        written = write_data(
            folder, chunks, {name: packed(value) for name, value in values.items()}, rank=dist.get_rank()
        )
        return written, {chunk.name: chunk.size for chunk in chunks}

    def publish(found: Sequence[tuple[Written, dict[str, torch.Size]]]) -> None:
        sizes = {name: size for _, own in found for name, size in own.items()}
        write_metadata(folder, [written for written, _ in found], sizes, others=files)

    agree(lambda: folder.mkdir(parents=True, exist_ok=True), lambda _: _clear(folder), group=group)
    agree(write, publish, group=group)


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
        packed_values = {name: packed(value) for name, value in values.items()}
        sizes: dict[str, torch.Size] = {}
        written = write_data(folder.beside, _noting_sizes(chunks, sizes), packed_values, rank=0)
        write_metadata(folder.beside, [written], sizes, aliases, files)
        folder.publish()
    except BaseException:
        folder.discard()
        raise


def _noting_sizes(chunks: Iterable[Chunk], sizes: dict[str, torch.Size]) -> Iterable[Chunk]:
    for chunk in chunks:
        sizes[chunk.name] = chunk.size
        yield chunk


def _clear(folder: Path) -> None:
    """Delete the files of another save, those that make it a checkpoint first."""
    for name in (MARKER, DESCRIPTION):
        (folder / name).unlink(missing_ok=True)
    for path in folder.glob(f"__*{DATA_SUFFIX}"):
        path.unlink()
