"""The folder of ``--save`` at the start of a run: it is the run's alone, and training does not take it back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.core.distributed.fsdp.checkpoint import agree, check_replaceable, is_complete
from megatron.training.checkpointing import CheckpointConfig
from megatron.training.folder_lock import FolderLock
from megatron.training.formats.recognise import is_foreign
from megatron.training.launch.rendezvous import Rendezvous
from megatron.training.launch.restart import EarlierStarts, continues
from megatron.training.run_folder import TRACKER, make_folder, read_tracker, saved_iterations

_LOCK_OF_THIS_JOB = "megatron/lock of --save"
"""Key in the store, outside the keys of a start: torchrun's store outlives a start."""


@contextmanager
def claimed_save(
    config: CheckpointConfig, rendezvous: Rendezvous, starts: EarlierStarts
) -> Iterator[FolderLock | None]:
    """Make the folder of ``--save`` and lock it within the scope, if this run may save there.

    Yields:
        On rank 0 the lock; None elsewhere, and without ``--save``.

    Raises:
        FileExistsError: another run saves there, or something that is not a checkpoint is where one would be saved.
        ValueError: the folder has checkpoints of a run that this one does not continue.
        OSError: it cannot be made or written.

    Ranks: all; blocks, up to half a minute where the lock's owner may be lost.
    Source: ours.
    """
    if config.save is None:
        yield None
        return
    folder, locks = Path(config.save), list[FolderLock]()
    try:
        agree(lambda: None, lambda _: locks.append(_claim(folder, config, rendezvous, starts)))
        yield locks[0] if locks else None
    finally:
        for lock in locks:
            lock.release()


def _claim(folder: Path, config: CheckpointConfig, rendezvous: Rendezvous, starts: EarlierStarts) -> FolderLock:
    make_folder(folder)
    store, key = rendezvous.connection, f"{_LOCK_OF_THIS_JOB} {os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    earlier = store.get(key).decode() if store.check([key]) else ""
    try:
        lock = FolderLock.acquire(folder, earlier=earlier, say=lambda text: print(text, flush=True))
    except FileExistsError:
        raise
    except OSError as error:
        raise OSError(
            f"--save {folder} must be a folder that can be written, got: {error}; give another one"
        ) from error
    try:
        store.set(key, lock.owner.token)
        _check_contents(folder, config, is_own=starts.were_admitted())
        starts.remember_admission()
    except BaseException:
        lock.release()
        raise
    return lock


def _check_contents(folder: Path, config: CheckpointConfig, *, is_own: bool) -> None:
    """Check that the run continues what is in the folder, and can save beside it."""
    if is_foreign(folder):
        raise ValueError(
            f"--save {folder} must be a folder of this framework's runs, got one with a checkpoint of another program, which --load "
            "would read again in place of what this run saves; give --save another folder"
        )
    saved = saved_iterations(folder)
    try:
        latest = read_tracker(folder / TRACKER)
    except ValueError:
        if not is_own:
            raise
        latest = None  # the next save writes it again
    begins_at = (latest or 0) if config.load_step is None else config.load_step
    for iteration, path in saved.items():
        if not continues(config) or iteration > begins_at:
            check_replaceable(path)
    complete = [iteration for iteration, path in saved.items() if is_complete(path)]
    if is_own or continues(config) or (latest is None and not complete):
        return
    begins = "iteration 0" if config.load is None or config.finetune else f"what is in {config.load}"
    step = "" if latest is not None else f" --ckpt-step {max(complete)}"
    raise ValueError(
        f"--save {folder} must hold no checkpoints but those of the run that --load continues, got iteration "
        f"{max(complete) if latest is None else latest} there, while training would start from {begins}; continue it with "
        f"--load {folder}{step}, or give --save another folder"
    )
