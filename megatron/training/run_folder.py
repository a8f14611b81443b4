"""The folder in which a run has its checkpoints: their names, the tracker that names the latest one, and whether they fit."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

import torch.distributed as dist

from megatron.core.distributed.fsdp.checkpoint import agree, is_complete
from megatron.core.regular_file import read_regular

TRACKER = "latest_checkpointed_iteration.txt"
_MOST_NBYTES = 1 << 16
_ITERATION = re.compile(r"iter_([0-9]{7,15})")


def checkpoint_path(folder: str | Path, iteration: int) -> Path:
    """Return the folder of an iteration's checkpoint, named as in Megatron-LM."""
    return Path(folder) / f"iter_{iteration:07d}"


def saved_iterations(folder: Path) -> dict[int, Path]:
    """Return what is named as a checkpoint in the folder, by iteration from the first to the last. Ranks: each on its own."""
    found = {int(match[1]): entry for entry in folder.iterdir() if (match := _ITERATION.fullmatch(entry.name))}
    return dict(sorted(found.items()))


def latest_iteration(folder: Path) -> int | None:
    """Return the iteration that the tracker names, read on rank 0, on all ranks; None if there is no tracker.

    Raises:
        ValueError: the tracker does not hold a number.

    Ranks: all; blocks.
    """
    return agree(lambda: None, lambda _: read_tracker(folder / TRACKER))


def read_tracker(tracker: Path) -> int | None:
    """Return the iteration that the tracker file names; None if there is no such file.

    Raises:
        ValueError: it is no file, or does not hold a number.
        OSError: it cannot be read.

    Ranks: each on its own.
    """
    try:
        text = read_regular(tracker, _MOST_NBYTES)
    except FileNotFoundError:
        return None
    if not re.fullmatch(rb"\s*[0-9]{1,15}\s*", text):
        complete = [iteration for iteration, path in saved_iterations(tracker.parent).items() if is_complete(path)]
        raise ValueError(
            f"{tracker} must hold the number of an iteration, got {text[:40].decode(errors='replace')!r}; write the number "
            f"of a checkpoint into it, or name one with --ckpt-step ({f'the latest complete one is {complete[-1]}' if complete else 'none is complete'})"
        )
    return int(text)


def newest_iteration(folder: Path) -> int:
    """Return the last iteration that has a complete checkpoint, on rank 0; -1 where there is none, and on other ranks."""
    if dist.get_rank() != 0 or not folder.is_dir():
        return -1
    return max((iteration for iteration, path in saved_iterations(folder).items() if is_complete(path)), default=-1)


def write_tracker(folder: Path, iteration: int) -> None:
    """Write the iteration to the tracker, which is never missing or half written in between."""
    # A name of its own: another run that writes here in spite of the lock must not write into this very file.
    beside = folder / f".{TRACKER}.new-{secrets.token_hex(6)}"
    try:
        with open(beside, "w") as file:
            file.write(str(iteration))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, folder / TRACKER)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise OSError(f"{folder / TRACKER} could not be written, got: {error}") from error


def make_folder(folder: Path) -> None:
    """Make the folder of ``--save``; raise an OSError that names it. Ranks: one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"--save {folder} must be a folder that can be made, got: {error}; give another one") from error


def try_to_write(folder: Path) -> None:
    """Write a file and remove it; raise an OSError that names the folder. Ranks: each on its own."""
    probe = folder / f".write-test-{dist.get_rank()}-{secrets.token_hex(4)}"
    try:
        with open(probe, "wb") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
        probe.unlink()
    except OSError as error:
        raise OSError(
            f"--save {folder} must be one folder that all ranks see and can write to, got: {error}; give another one"
        ) from error


def check_space(folder: Path, nbytes: int) -> None:
    """Raise an OSError if fewer bytes are free. Ranks: each on its own."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise OSError(
            f"--save {folder} must have space for a checkpoint of {nbytes:,} bytes, got {free:,} free; free some, give "
            "another folder, or save without optimizer state (--no-save-optim)",
        )
