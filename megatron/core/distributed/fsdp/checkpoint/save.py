"""``save_checkpoint``: collect this rank's share of the state, write it, and publish the folder; also in a thread.

See [Note: checkpoints of parts].
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.checkpoint.agreement import (
    agree,
    check_initialized,
    digest_of,
    firsts,
    raised_on_all_ranks,
)
from megatron.core.distributed.fsdp.checkpoint.chunks import Chunk, chunks_to_write, copied_to_host, plain_chunks
from megatron.core.distributed.fsdp.checkpoint.files import Written, write_data, write_metadata
from megatron.core.distributed.fsdp.checkpoint.folder import FolderInProgress, begin_folder
from megatron.core.distributed.fsdp.checkpoint.optimizer import (
    KIND,
    PARAM_GROUPS,
    merged_values,
    optimizer_entries,
    torch_optimizer,
    with_whole_weights,
)
from megatron.core.distributed.fsdp.checkpoint.state import (
    EXTRA_STATE,
    PER_RANK,
    Model,
    is_split,
    model_tensors,
    module_states,
    optional_states,
    plain_copy,
)
from megatron.core.distributed.fsdp.checkpoint.views import ForeignLayout
from megatron.core.distributed.fsdp.comm.peer_memory import time_out_of
from megatron.core.distributed.fsdp.flat_optimizer.flat_adamw import FlatAdamW

_PATIENCE_S = 1.0
"""How much longer than the time-out a thread is waited for, whose error says more."""


def save_checkpoint(
    model: Model,
    optimizer: Any,
    path: str | os.PathLike[str],
    *,
    extra_state: Mapping[str, Any] | None = None,
    async_save: bool = False,
    layout: ForeignLayout | None = None,
) -> AsyncSave | None:
    """Save model, optimizer and extra state to the folder ``path``, which any number of ranks can load.

    A checkpoint at ``path`` is replaced: whenever a process is killed, the old one or the new one is there, complete.
    What killed saves left in the parent folder is removed.

    Args:
        model: a sharded module, a module that holds some, a ``FullyShardedDataParallel``, or a plain module, whose weights
            must be the same on all ranks.
        optimizer: a ``torch.optim`` optimizer over the model's parameters, an object that holds one as ``.optimizer``,
            or None to save none.
        path: the folder to write; all ranks must see it.
        extra_state: plain values and tensors by name, also nested in lists, tuples and dicts. Rank 0's are saved. Under
            the key ``"per_rank"`` each rank saves its own value, such as the state of its random number generators, and
            gets it back from ``load_checkpoint`` as the same rank.
        async_save: copy the state to host memory and return; a thread writes the copy while training goes on, and
            communicates over a gloo process group of its own. ``wait()`` for it before another save to the same path.
        layout: names and layouts of another program in place of ours, the same on all ranks. None: ours.

    Returns:
        The save that is running, with ``async_save``; else None.

    Raises:
        FileExistsError: something that is not a checkpoint is at ``path``.
        TypeError: a value in ``extra_state`` or in the optimizer's state is not plain; ``model`` is no module.
        ValueError: the optimizer holds a parameter that the model does not; ranks give different paths.
        OSError: a rank could not write. What was at ``path`` is still there.
        RuntimeError: torch.distributed is not initialised; the ranks do not hold one model; a rank did not come within the
            time-out of the default process group.

    What one rank raises, all ranks raise, with the number of the rank that failed.

    Ranks: all of the default process group; blocks until all have written (with ``async_save``: copied). The layout
    says which rank writes what, so nothing is communicated per tensor: two rounds of one gather and one broadcast, and
    a third where ranks hold different parts of the model.
    Source: the format is that of torch.distributed.checkpoint.
    """
    check_initialized("save_checkpoint")
    group = _group_of_save(Path(path)) if async_save else None
    save = Save(path, group=group, layout=layout)

    def collect() -> LocalState:
        state = local_state(model, optimizer, extra_state or {}, rank=dist.get_rank(), whole=layout is not None)
        return host_copy(state) if async_save else state

    try:
        save.prepare(collect)
    except BaseException:
        if group is not None:
            dist.destroy_process_group(group)
        raise
    if group is not None:
        return AsyncSave(save, group)
    save.write()
    return None


def _group_of_save(path: Path) -> dist.ProcessGroup:
    """Make the process group of an asynchronous save, with the time-out of the default process group.

    Raises:
        RuntimeError: not all ranks have come within that time.

    Ranks: all; blocks.
    """
    default = dist.distributed_c10d._get_default_group()
    timeout = min(time_out_of(default, device) for device in default._device_types)
    made: list[dist.ProcessGroup | Exception] = []

    def make() -> None:
        try:
            made.append(dist.new_group(backend="gloo", timeout=timeout))
        except Exception as error:
            made.append(error)

    # In a thread: a store whose process is stopped answers some questions never, whatever the time-out.
    thread = threading.Thread(target=make, name="process group of a checkpoint", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + _PATIENCE_S)
    cause = made[0] if made else None
    if isinstance(cause, dist.ProcessGroup):
        return cause
    raise RuntimeError(
        f"all ranks must make the process group of the asynchronous save to {path}; rank {dist.get_rank()} timed out: not all came "
        f"within {timeout.total_seconds():.0f} s, so one has ended, hangs or is stopped, and nothing is saved"
        f"{f' ({cause})' if cause else ''}"
    ) from cause


def planned_nbytes(model: Model, optimizer: Any) -> int:
    """Compute the bytes of tensors that this rank will write of a checkpoint, before the optimizer has made its state.

    Args:
        model: as in ``save_checkpoint``.
        optimizer: as in ``save_checkpoint``. Its state is derived from its hyperparameters: moments as large as the weights.

    Ranks: each its own share; all together write the whole.
    """
    tensors = model_tensors(model)
    chunks = chunks_to_write(tensors)
    if dist.get_rank() == 0 or is_split(model):
        chunks += plain_chunks(tensors)
    nbytes = sum(chunk.local.nbytes for chunk in chunks)
    if optimizer is None:
        return nbytes
    inner = torch_optimizer(optimizer)
    num_moments = len(inner.defaults.get("betas", ())) or int(bool(inner.defaults.get("momentum", 0)))
    num_moments += int(bool(inner.defaults.get("amsgrad", False)))
    trained = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    names = {entry.name for entry in tensors if id(entry.tensor) in trained}
    return nbytes + num_moments * sum(chunk.local.nbytes for chunk in chunks if chunk.name in names)


@dataclass(frozen=True)
class Description:
    """A rank's share of a save, as the other ranks must know it.

    Args:
        tensors: shape and dtype of all whole tensors by name.
        once: names of plain tensors and values, each of which one rank writes.
        optimizer: the optimizer's param groups and kind; {} without an optimizer.
    """

    tensors: dict[str, tuple[torch.Size, torch.dtype]]
    once: list[str]
    optimizer: dict[str, Any]


@dataclass(frozen=True)
class LocalState:
    """This rank's share of the state: parts of tensors, and copies of plain values.

    Args:
        chunks: parts of DTensors, which only this rank writes.
        once: plain tensors, each written by one of the ranks that have its name.
        values: plain values, each written by one of the ranks that have its name.
        own_values: plain values that only this rank writes.
        description: the same for the other ranks.
        is_split: ranks hold different parts of the model, under different names.
    """

    chunks: list[Chunk]
    once: list[Chunk]
    values: dict[str, Any]
    own_values: dict[str, Any]
    description: Description
    is_split: bool


def local_state(
    model: Model, optimizer: Any, extra_state: Mapping[str, Any], *, rank: int, whole: bool = False
) -> LocalState:
    """Collect this rank's share of the state. Plain values are copied, tensors are not.

    Args:
        whole: main weights that are kept in two halves are put together, and moments in bf16 are in fp32, in new memory.

    Raises:
        TypeError, ValueError: a checkpoint cannot hold some state; gives its name.
    """
    tensors = model_tensors(model)
    values = {name: plain_copy(module.get_extra_state(), name) for name, module in module_states(model).items()}
    optional = {name: module.get_optional_state() for name, module in optional_states(model).items()}
    values.update({name: plain_copy(value, name) for name, value in optional.items() if value is not None})
    of_optimizer: dict[str, Any] = {}
    if optimizer is not None:
        inner = torch_optimizer(optimizer)
        state, own_values = optimizer_entries(inner, tensors)
        tensors = [*tensors, *state]
        if whole:
            tensors = with_whole_weights(inner, tensors)
        if isinstance(inner, FlatAdamW):
            inner.shrink_state()  # what was made to be saved lives as long as ``tensors``
        values.update(own_values)
        of_optimizer = {key: values[key] for key in (PARAM_GROUPS, KIND)}
    extra, own = _extra_values(extra_state, rank)
    once = plain_chunks(tensors)
    description = Description(
        tensors={entry.name: (entry.tensor.shape, entry.tensor.dtype) for entry in tensors},
        once=[*(chunk.name for chunk in once), *values],
        optimizer=of_optimizer,
    )
    splits = is_split(model)
    may_write = rank == 0 or splits
    return LocalState(
        chunks=chunks_to_write(tensors),
        once=once if may_write else [],
        values=values if may_write else {},
        own_values=extra | own if rank == 0 else own,
        description=description,
        is_split=splits,
    )


def _extra_values(extra_state: Mapping[str, Any], rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the caller's values for rank 0 to write, and those for this rank to write."""
    common, own = {}, {}
    for key, value in extra_state.items():
        if not isinstance(key, str) or key.startswith(f"{PER_RANK}."):
            raise TypeError(f"keys of extra_state must be strings that do not begin with {PER_RANK}., got {key!r}")
        if key == PER_RANK:
            own[f"{EXTRA_STATE}{PER_RANK}.{rank}"] = plain_copy(value, f"extra_state[{PER_RANK!r}]")
        else:
            common[EXTRA_STATE + key] = plain_copy(value, f"extra_state[{key!r}]")
    return common, own


class Save:
    """A save in two rounds of ``agree``: on what is written to which folder, and on its success.

    Where ranks hold different parts of the model there is a third round, on which rank writes what several of them
    have.

    Args:
        path: the folder's final name.
        group: process group of all ranks; None: the default process group.
        layout: as in ``save_checkpoint``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        group: dist.ProcessGroup | None = None,
        layout: ForeignLayout | None = None,
    ) -> None:
        self._layout = layout
        self._path = Path(os.path.abspath(path))
        self._group = group
        self._rank = dist.get_rank()
        self._state: LocalState | None = None
        self._beside = Path()
        self._writers: dict[str, int] = {}  # rank that writes an entry of ``once`` or ``values``; rank 0 if absent
        # On rank 0:
        self._folder: FolderInProgress | None = None
        self._sizes: dict[str, torch.Size] = {}  # shapes of all tensors
        self._merged: dict[str, Any] = {}  # the optimizer's values, merged from ranks that hold parts of the model

    def prepare(self, collect: Callable[[], LocalState]) -> None:
        """Collect this rank's share with ``collect`` and make an empty folder for all shares. Ranks: all; blocks."""

        def local() -> tuple[Path, str, bool]:
            self._state = collect()
            own = self._state.description
            return self._path, digest_of((own.tensors, own.once)), self._state.is_split

        with self._naming_wait("agree on what they write to"):
            beside, speakers = agree(local, self._begin, group=self._group)
            if beside is None:
                # One rank for each part of the model says what is in it, and all agree on which rank writes what.
                assert self._state is not None
                own = self._state.description if self._rank in speakers else None
                beside, self._writers = agree(lambda: own, self._judge_parts, group=self._group)
        self._beside = beside

    def write(self) -> None:
        """Write this rank's share and publish the folder; if this raises, delete it. Ranks: all; blocks."""
        try:
            with self._naming_wait("write their shares of"):
                agree(self._write, self._publish, group=self._group)
        except BaseException:
            if self._folder is not None:
                self._folder.discard()
            raise

    @contextmanager
    def _naming_wait(self, what: str) -> Iterator[None]:
        """Name what this rank waited for in an error of the backend."""
        try:
            yield
        except RuntimeError as error:
            if raised_on_all_ranks(error):
                raise
            raise RuntimeError(
                f"all ranks must {what} {self._path}; rank {self._rank} waited for the others, of which one has ended, hangs or is "
                f"stopped ({error})"
            ) from error

    def _begin(self, found: list[tuple[Path, str, bool]]) -> tuple[Path | None, list[int]]:
        path, digest, _ = found[0]
        differing = [f"{other} (rank {rank})" for rank, (other, _, _) in enumerate(found) if other != path]
        if differing:
            raise ValueError(f"all ranks must save to one path, got {path} (rank 0) and {', '.join(differing[:8])}")
        differing = [str(rank) for rank, (_, other, _) in enumerate(found) if other != digest]
        if differing and all(is_split for *_, is_split in found):
            return None, firsts([digest for _, digest, _ in found])
        if differing:
            raise ValueError(
                "all ranks must save the same model and optimizer, got other names, shapes or dtypes than rank 0's on "
                f"rank {', '.join(differing[:8])}; entries that rank 0 does not have would be lost"
            )
        assert self._state is not None
        return self._judge_parts([self._state.description])[0], []

    def _judge_parts(self, found: list[Description | None]) -> tuple[Path, dict[str, int]]:
        writers: dict[str, int] = {}
        tensors: dict[str, tuple[torch.Size, torch.dtype]] = {}
        for rank, part in enumerate(found):
            for name, kind in part.tensors.items() if part is not None else ():
                if tensors.setdefault(name, kind) != kind:
                    (size, dtype), (other_size, other_dtype) = tensors[name], kind
                    raise ValueError(
                        f"{name} must be the same tensor on all ranks, got shape {list(size)} of {dtype}, and "
                        f"{list(other_size)} of {other_dtype} on rank {rank}; parts of a model need names of their own"
                    )
            for name in part.once if part is not None else ():
                writers.setdefault(name, rank)
        self._sizes = {name: size for name, (size, _) in tensors.items()}
        optimizers = [part.optimizer for part in found if part is not None]
        if all(optimizers):
            self._merged = merged_values(optimizers)
        elif any(optimizers):
            raise ValueError("all ranks must save an optimizer or none, got one on some ranks only")
        self._folder = begin_folder(self._path)
        return self._folder.beside, writers

    def _write(self) -> Written:
        assert self._state is not None
        state, writers, rank = self._state, self._writers, self._rank
        chunks = [*state.chunks, *(chunk for chunk in state.once if writers.get(chunk.name, 0) == rank)]
        values = {name: value for name, value in state.values.items() if writers.get(name, 0) == rank} | self._merged
        own_values = state.own_values
        if self._layout is not None:
            values, own_values = self._layout.named(values), self._layout.named(own_values)
            chunks = [moved for chunk in chunks for moved in self._layout.chunks(chunk)]
            if rank == 0:
                values |= self._layout.values(self._merged)
        written = write_data(self._beside, chunks, {**values, **own_values}, rank=rank)
        # Free copies in host memory.
        self._state = replace(state, chunks=[], once=[], values={}, own_values={})
        return written

    def _publish(self, written: list[Written]) -> None:
        assert self._folder is not None and self._state is not None
        if self._layout is None:
            write_metadata(self._beside, written, self._sizes)
        else:
            layout = self._layout
            write_metadata(self._beside, written, layout.sizes(self._sizes), layout.aliases, layout.files)
        self._folder.publish()


class AsyncSave:
    """A save that a thread of this process writes; ``save_checkpoint`` makes it.

    The process does not exit before the thread ends. Keep torch.distributed initialised until ``wait`` has returned.
    """

    def __init__(self, save: Save, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group
        thread = ThreadPoolExecutor(1, "checkpoint")
        self._written = thread.submit(save.write)
        thread.shutdown(wait=False)  # it ends after this save

    def done(self) -> bool:
        """Return whether this rank has finished, with or without success. Does not block."""
        return self._written.done()

    def wait(self) -> None:
        """Block until the checkpoint is published.

        Raises:
            Exception: the save failed on some rank; at each call, on all ranks.

        Ranks: all, at any time; blocks until all ranks have written.
        """
        error = self._written.exception()  # blocks
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        if error is not None:
            raise error


def host_copy(state: LocalState) -> LocalState:
    """Copy the state to host memory, where training does not change it. Blocks until it is copied."""
    return replace(state, chunks=copied_to_host(state.chunks), once=copied_to_host(state.once))
