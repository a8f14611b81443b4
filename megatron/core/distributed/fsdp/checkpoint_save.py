"""One save, from the state as it is now to a folder at its place; at once, or in a thread."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.checkpoint_agreement import agree
from megatron.core.distributed.fsdp.checkpoint_chunks import Chunk, chunks_to_write, copied_to_host
from megatron.core.distributed.fsdp.checkpoint_files import Written, packed, write_data, write_metadata
from megatron.core.distributed.fsdp.checkpoint_folder import FolderInProgress, begin_folder
from megatron.core.distributed.fsdp.checkpoint_optimizer import optimizer_entries, torch_optimizer
from megatron.core.distributed.fsdp.checkpoint_state import (
    EXTRA_STATE,
    PER_RANK,
    model_tensors,
    module_states,
    plain_copy,
)


@dataclass(frozen=True)
class LocalState:
    """What this rank writes: parts of tensors, and plain values as the bytes that DCP stores.

    ``sizes`` are those of all tensors, whole; ``digest`` tells them and dtypes. Both are the same on all ranks.
    """

    chunks: list[Chunk]
    values: dict[str, bytes]
    sizes: dict[str, torch.Size]
    digest: str


def local_state(model: nn.Module, optimizer: Any, extra_state: Mapping[str, Any], *, rank: int) -> LocalState:
    """This rank's share of the state. Plain values are copied, tensors are not.

    Raises:
        TypeError, ValueError: state that a checkpoint cannot hold, by name.
    """
    tensors = model_tensors(model)
    values = {name: plain_copy(module.get_extra_state(), name) for name, module in module_states(model).items()}
    if optimizer is not None:
        entries = optimizer_entries(torch_optimizer(optimizer), tensors)
        tensors = [*tensors, *entries.tensors]
        values.update(entries.values)
    for key, value in extra_state.items():
        if not isinstance(key, str) or key.startswith(f"{PER_RANK}."):
            raise TypeError(f"keys of extra_state must be strings that do not begin with {PER_RANK}., got {key!r}")
        if key != PER_RANK:
            values[EXTRA_STATE + key] = plain_copy(value, f"extra_state[{key!r}]")
    mine = values if rank == 0 else {}
    if PER_RANK in extra_state:
        own = plain_copy(extra_state[PER_RANK], f"extra_state[{PER_RANK!r}]")
        mine[f"{EXTRA_STATE}{PER_RANK}.{rank}"] = own
    described = "\n".join(f"{entry.name} {tuple(entry.tensor.shape)} {entry.tensor.dtype}" for entry in tensors)
    digest = hashlib.sha256(described.encode()).hexdigest()
    return LocalState(
        chunks=chunks_to_write(tensors),
        values={name: packed(value) for name, value in mine.items()},
        sizes={entry.name: entry.tensor.shape for entry in tensors},
        digest=digest,
    )


class Save:
    """Two agreements of all ranks: on what is written where, and that it was written.

    Args:
        path: the folder's final name.
        group: all ranks, for the agreements; the default group when None.
    """

    def __init__(self, path: str | os.PathLike[str], *, group: dist.ProcessGroup | None = None) -> None:
        self._path = Path(os.path.abspath(path))
        self._group = group
        self._rank = dist.get_rank()
        self._state: LocalState | None = None
        self._beside = Path()
        self._folder: FolderInProgress | None = None  # on rank 0

    def prepare(self, collect: Callable[[], LocalState]) -> None:
        """Afterwards this rank's share is collected, and there is an empty folder to write it to. Ranks: all; blocks."""

        def local() -> tuple[Path, str]:
            self._state = collect()
            return self._path, self._state.digest

        self._beside = agree(local, self._begin, group=self._group)

    def write(self) -> None:
        """Afterwards the checkpoint is at its place, or (if this raises) nothing is left of it. Ranks: all; blocks."""
        try:
            agree(self._write, self._publish, group=self._group)
        except BaseException:
            if self._folder is not None:
                self._folder.discard()
            raise

    def _begin(self, found: list[tuple[Path, str]]) -> Path:
        path, digest = found[0]
        differing = [f"{other} (rank {rank})" for rank, (other, _) in enumerate(found) if other != path]
        if differing:
            raise ValueError(f"all ranks must save to one path, got {path} (rank 0) and {', '.join(differing[:8])}")
        differing = [str(rank) for rank, (_, other) in enumerate(found) if other != digest]
        if differing:
            raise ValueError(
                "all ranks must save the same model and optimizer, got other names, shapes or dtypes than rank 0's on "
                f"rank {', '.join(differing[:8])}; what rank 0 does not have would be lost"
            )
        self._folder = begin_folder(self._path)
        return self._folder.beside

    def _write(self) -> Written:
        assert self._state is not None
        written = write_data(self._beside, self._state.chunks, self._state.values, rank=self._rank)
        # Copies in host memory are not needed any more.
        self._state = replace(self._state, chunks=[], values={})
        return written

    def _publish(self, written: list[Written]) -> None:
        assert self._folder is not None and self._state is not None
        write_metadata(self._beside, written, self._state.sizes)
        self._folder.publish()


class AsyncSave:
    """A save that a thread of this process is writing. Made by ``save_checkpoint``.

    The process does not end before the thread does. Keep torch.distributed initialised until ``wait`` has returned.
    """

    def __init__(self, save: Save, group: dist.ProcessGroup) -> None:
        self._save = save
        self._group: dist.ProcessGroup | None = group
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._save.write()
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        """True if this rank's part is over, well or not. Does not block."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Afterwards the checkpoint is at its place.

        Raises:
            Exception: what made any rank fail, on all ranks; again at each call.

        Ranks: all, each when it likes; blocks until all ranks have written.
        """
        self._thread.join()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        if self._error is not None:
            raise self._error


def host_copy(state: LocalState) -> LocalState:
    """The state in host memory of its own, which training does not change. Blocks until it is copied."""
    return replace(state, chunks=copied_to_host(state.chunks))
