"""Listing of a checkpoint, or comparison of two; needs no GPU and no other ranks.

Example::

    python tools/checkpoint/inspect.py runs/a                              # the latest iteration of a run
    python tools/checkpoint/inspect.py runs/a/iter_0000100 --only 'decoder.layers.0.*'
    python tools/checkpoint/inspect.py runs/a/iter_0000100 runs/b/iter_0000100
    python tools/checkpoint/inspect.py runs/a --verify                     # compare all files with their checksums

lists tensors with shape, dtype, size, pieces (boxes that a rank wrote) and files, or compares the names, shapes, dtypes and
values of the tensors of two checkpoints, whatever layouts they were saved under. Exit status: 0; 1 if the two differ; 2 if
one cannot be read. Plain values (hyperparameters, counters, random states) are listed, not compared.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Works without an installed package. The tool's own folder must go: this file would hide the standard ``inspect``.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from megatron.core.distributed.fsdp.checkpoint import EXTRA_STATE, OPTIMIZER, CheckpointReader, StoredTensor
from megatron.training.run_folder import TRACKER, checkpoint_path, read_tracker


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_pieces: int
    files: tuple[str, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Checkpoint:
    """One checkpoint, read tensor by tensor.

    Args:
        path: its folder, or the folder of a run, whose latest checkpoint is read.

    Raises:
        FileNotFoundError: there is none, or it is not complete.
        ValueError: its metadata or the run's tracker cannot be read.
    """

    def __init__(self, path: Path) -> None:
        iteration = read_tracker(path / TRACKER)
        if iteration is not None:
            path = checkpoint_path(path, iteration)
        self._reader = CheckpointReader(path)
        self.folder = self._reader.folder
        self.has_checksums = self._reader.has_checksums
        self.tensors = {
            name: TensorEntry(
                name,
                tuple(entry.size),
                entry.dtype,
                len(entry.chunks),
                tuple(dict.fromkeys(chunk.place.file for chunk in entry.chunks)),
            )
            for name, entry in self._reader.entries.items()
            if isinstance(entry, StoredTensor)
        }
        self.values = [name for name in self._reader.entries if name not in self.tensors]

    @property
    def iteration(self) -> int | None:
        """Iteration after which it was saved; None if it was not saved by a training run."""
        name = f"{EXTRA_STATE}state"
        state: Any = self._reader.values([name])[name] if name in self.values else None
        return state.get("iteration") if isinstance(state, dict) else None

    @property
    def file_sizes(self) -> dict[str, int]:
        """Bytes of each file, by name."""
        return {path.name: path.stat().st_size for path in sorted(self.folder.iterdir()) if path.is_file()}

    def verify(self) -> str:
        """Compare all of it with its checksums, and say so.

        Raises:
            FileNotFoundError, ValueError: it is damaged; names the file.
        """
        self._reader.verify_all()
        source = "its checksums" if self.has_checksums else "the checksums of torch.save (it has none of its own)"
        return f"{self.folder}: all of it agrees with {source}"

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """Read the whole tensor.

        Raises:
            FileNotFoundError: a file with a piece of it is missing or truncated.
        """
        return self._reader.tensor(entry.name)


def describe(checkpoint: Checkpoint, only: str) -> Iterator[str]:
    """Yield the lines of the listing of a checkpoint."""
    shown = [entry for name, entry in checkpoint.tensors.items() if fnmatchcase(name, only)]
    iteration = checkpoint.iteration
    yield f"{checkpoint.folder}" + ("" if iteration is None else f" (iteration {iteration})")
    rows = [("tensor", "shape", "dtype", "bytes", "pieces", "files")]
    for entry in shown:
        dtype = str(entry.dtype).removeprefix("torch.")
        files = ", ".join(entry.files[:3]) + (f", ... ({len(entry.files)})" if len(entry.files) > 3 else "")
        rows.append((entry.name, str(list(entry.shape)), dtype, f"{entry.nbytes:,}", str(entry.num_pieces), files))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for name in (name for name in checkpoint.values if fnmatchcase(name, only)):
        yield f"{name}  (plain value)"
    for part, entries in _parts(shown).items():
        numel, nbytes = sum(entry.numel for entry in entries), sum(entry.nbytes for entry in entries)
        yield f"{part}: {len(entries)} tensors, {numel:,} elements, {nbytes:,} bytes"
    for name, nbytes in checkpoint.file_sizes.items():
        yield f"file {name}: {nbytes:,} bytes"


def _parts(entries: Sequence[TensorEntry]) -> dict[str, list[TensorEntry]]:
    parts: dict[str, list[TensorEntry]] = {"model": [], "optimizer": []}
    for entry in entries:
        parts["optimizer" if entry.name.startswith(OPTIMIZER) else "model"].append(entry)
    return parts


def differences(left: Checkpoint, right: Checkpoint, only: str) -> Iterator[str]:
    """Yield a line for each tensor that is not bitwise equal in both."""
    names = [name for name in (left.tensors | right.tensors) if fnmatchcase(name, only)]
    for name in names:
        ours, theirs = left.tensors.get(name), right.tensors.get(name)
        if ours is None or theirs is None:
            yield f"{name}: only in {(left if theirs is None else right).folder}"
        elif ours.shape != theirs.shape:
            yield f"{name}: shape {list(ours.shape)} and {list(theirs.shape)}"
        elif ours.dtype != theirs.dtype:
            yield f"{name}: {ours.dtype} and {theirs.dtype}"
        else:
            yield from _value_difference(name, left.read(ours), right.read(theirs))


def _value_difference(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> Iterator[str]:
    as_bytes = [tensor.reshape(-1).view(torch.uint8) for tensor in (ours, theirs)]
    if torch.equal(*as_bytes):
        return
    wide = torch.complex128 if ours.is_complex() else torch.float64
    gap = (ours.to(wide) - theirs.to(wide)).abs()
    differing = int((gap != 0).sum())  # NaN differs from everything, also from itself
    yield f"{name}: {differing} of {ours.numel()} elements differ, by {float(gap.max()):.3g} at most"


def main(arguments: Sequence[str] | None = None) -> int:
    """List or compare; return the exit status."""
    parser = argparse.ArgumentParser(
        description="List the contents of a checkpoint, or compare two.",
        epilog="exit status: 0; 1 if two checkpoints differ; 2 if one cannot be read",
    )
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or of a run (its latest iteration)")
    parser.add_argument("other", type=Path, nargs="?", help="another checkpoint, to compare with")
    parser.add_argument("--only", default="*", metavar="GLOB", help="names to show or compare, such as 'decoder.*'")
    parser.add_argument("--verify", action="store_true", help="read all of it and compare it with its checksums")
    args = parser.parse_args(arguments)
    try:
        checkpoints = [Checkpoint(path) for path in (args.checkpoint, args.other) if path is not None]
        if args.verify:
            print("\n".join(checkpoint.verify() for checkpoint in checkpoints))
        if args.other is None:
            print("\n".join(describe(checkpoints[0], args.only)))
            return 0
        return _compare(checkpoints[0], checkpoints[1], args.only)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _compare(left: Checkpoint, right: Checkpoint, only: str) -> int:
    if not any(fnmatchcase(name, only) for name in left.tensors | right.tensors):
        raise ValueError(f"--only must match names of tensors, got {only!r}, which matches none in either checkpoint")
    num_differing = 0
    for line in differences(left, right, only):
        print(line, flush=True)
        num_differing += 1
    num_tensors = sum(fnmatchcase(name, only) for name in left.tensors | right.tensors)
    print(f"{num_tensors} tensors: " + (f"{num_differing} differ" if num_differing else "all equal, bit for bit"))
    return 1 if num_differing else 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader such as head may close the pipe early
    sys.exit(main())
