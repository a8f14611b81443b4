"""The record of allocations on a CUDA device: a snapshot for PyTorch's viewer, and what is alive at the peak in text.

``python -m megatron.training.telemetry.memory_history FILE`` prints the text for a snapshot that is there already.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.checkpoint import read_plain_pickle

_MAX_EVENTS = 200_000
_NUM_SITES, _NUM_FRAMES = 30, 3
_MIB = 2**20


class Block(NamedTuple):
    """An allocation that was alive at some time."""

    nbytes: int
    site: str
    """Where it was allocated: the innermost lines outside of torch."""


class Peak(NamedTuple):
    """What was alive when most bytes were."""

    nbytes: int
    at_end_nbytes: int
    """Bytes alive at the end of the record."""

    num_events: int
    blocks: list[Block]


class MemoryHistory:
    """Records where this rank's device memory is allocated, from its construction on.

    Args:
        path: file of the snapshot; ``_<rank>`` is put before its suffix.

    Ranks: each its own; does not communicate. Each allocation takes about 2 microseconds more.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        self.device, self.rank = device, dist.get_rank()
        base = Path(path)
        self.file = base.with_name(f"{base.stem}_{self.rank}{base.suffix}")
        self._file_of_failure = base.with_name(f"{base.stem}_oom_rank_{self.rank}{base.suffix}")
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=_MAX_EVENTS)
        torch._C._cuda_attach_out_of_memory_observer(self._out_of_memory)  # type: ignore[attr-defined]

    def write_snapshot(self) -> None:
        """Write the snapshot and its summary beside it."""
        self._write(self.file, at_end=False)

    def _out_of_memory(self, device: int, nbytes: int, device_total: int, device_free: int) -> None:
        self._write(self._file_of_failure, at_end=True)

    def _write(self, file: Path, *, at_end: bool) -> None:
        snapshot = torch.cuda.memory._snapshot()
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as stream:
            pickle.dump(snapshot, stream)
        summary = file.with_suffix(".txt")
        summary.write_text(summarize_snapshot(snapshot, at_end=at_end) + "\n")
        print(f" rank {self.rank}: the memory snapshot is in {file}, its summary in {summary}", flush=True)


def summarize_snapshot(snapshot: dict[str, Any], *, at_end: bool = False) -> str:
    """List what was alive at the peak of the recorded events, or at their end, by the place that allocated it.

    Args:
        snapshot: as ``torch.cuda.memory._snapshot`` returns it.

    Returns:
        Lines for each device that has memory or events.
    """
    lines = []
    for device, trace in enumerate(snapshot["device_traces"]):
        segments = [segment for segment in snapshot["segments"] if segment.get("device", 0) == device]
        if not trace and not segments:
            continue
        peak = alive_at_peak(segments, trace, at_end=at_end)
        reserved = sum(segment["total_size"] for segment in segments)
        what = "the end" if at_end else "the peak"
        lines.append(
            f"Device {device}: {peak.nbytes / _MIB:.1f} MiB alive at {what} of {peak.num_events} recorded events; at their "
            f"end {peak.at_end_nbytes / _MIB:.1f} MiB alive, {reserved / _MIB:.1f} MiB reserved"
        )
        lines.append(
            f"Alive at {what} by place of allocation (MiB, blocks, largest MiB, innermost line < its callers):"
        )
        lines += _by_site(peak.blocks)
    return "\n".join(lines) or "No memory of a device is recorded."


def _by_site(blocks: Iterable[Block]) -> list[str]:
    sizes: dict[str, list[int]] = defaultdict(list)
    for block in blocks:
        sizes[block.site].append(block.nbytes)
    ranked = sorted(sizes.items(), key=lambda item: -sum(item[1]))
    rows = [
        f"  {sum(of_site) / _MIB:10.1f} {len(of_site):6d} {max(of_site) / _MIB:10.1f}  {site}"
        for site, of_site in ranked[:_NUM_SITES]
    ]
    rest = [nbytes for _, of_site in ranked[_NUM_SITES:] for nbytes in of_site]
    if rest:
        rows.append(
            f"  {sum(rest) / _MIB:10.1f} {len(rest):6d} {max(rest) / _MIB:10.1f}  {len(ranked) - _NUM_SITES} more places"
        )
    return rows


def alive_at_peak(segments: Sequence[dict[str, Any]], trace: Sequence[dict[str, Any]], *, at_end: bool = False) -> Peak:
    """Find the moment with most bytes alive and what was alive then.

    The record may have lost its oldest events, so time runs backwards: from the blocks that are alive at the end, each
    allocation takes one away and each completed free brings one back.

    Args:
        segments: a device's segments in the snapshot.
        trace: its events, oldest first.
        at_end: take the last moment instead.
    """
    at_end_alive = {
        address: (block["size"], block.get("frames", ()))
        for segment in segments
        for address, block in _blocks_of(segment)
        if block["state"] != "inactive"
    }
    # A block whose free is requested and not yet completed is alive, as long as another stream may read it.
    nbytes = at_end_nbytes = sum(size for size, _ in at_end_alive.values())
    events = [event for event in trace if event["action"] in ("alloc", "free_completed")]
    peak_nbytes, peak_index = nbytes, len(events)
    if not at_end:
        alive = {address: size for address, (size, _) in at_end_alive.items()}
        for index in reversed(range(len(events))):
            event = events[index]
            if event["action"] == "alloc":
                nbytes -= alive.pop(event["addr"], 0)
            else:
                alive[event["addr"]] = event["size"]
                nbytes += event["size"]
            if nbytes > peak_nbytes:
                peak_nbytes, peak_index = nbytes, index
    return Peak(
        nbytes=peak_nbytes,
        at_end_nbytes=at_end_nbytes,
        num_events=len(trace),
        blocks=_alive_before(events, peak_index, at_end_alive),
    )


def _blocks_of(segment: dict[str, Any]) -> Iterable[tuple[int, dict[str, Any]]]:
    """Yield (address, block); older snapshots have addresses of segments alone."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield block.get("address", address), block
        address += block["size"]


def _alive_before(
    events: Sequence[dict[str, Any]], index: int, at_end_alive: dict[int, tuple[int, Sequence[dict[str, Any]]]]
) -> list[Block]:
    """Return the blocks alive before the event ``index``."""
    alive: dict[int, tuple[int, Sequence[dict[str, Any]] | None]] = dict(at_end_alive)
    for event in reversed(events[index:]):
        if event["action"] == "alloc":
            alive.pop(event["addr"], None)
        else:
            alive[event["addr"]] = (event["size"], None)
    # A free does not say where its block was allocated; the events before do, as far as they are recorded.
    places = {event["addr"]: event.get("frames", ()) for event in events[:index] if event["action"] == "alloc"}
    return [
        Block(size, _site(places.get(address) if frames is None else frames, size))
        for address, (size, frames) in alive.items()
    ]


def _site(frames: Sequence[dict[str, Any]] | None, nbytes: int) -> str:
    if frames is None:
        return f"(before the record begins, {nbytes} bytes each)"
    if not frames:
        return f"(no Python line: autograd's backward or a library, {nbytes} bytes each)"
    own = [frame for frame in frames if not _is_of_torch(frame["filename"])] or list(frames)
    return " < ".join(f"{_short(frame['filename'])}:{frame['line']} {frame['name']}" for frame in own[:_NUM_FRAMES])


def _is_of_torch(filename: str) -> bool:
    return "/site-packages/torch/" in filename or "/dist-packages/torch/" in filename or filename.startswith("<")


def _short(filename: str) -> str:
    """Return the path from the package on."""
    for start in ("/site-packages/", "/dist-packages/", "/megatron/"):
        if start in filename:
            return filename[filename.rindex(start) + (1 if start == "/megatron/" else len(start)) :]
    return "/".join(filename.split("/")[-2:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the summary of a snapshot's file; return the exit status. Nothing that stands in the file is run."""
    parser = argparse.ArgumentParser(
        description="List what was alive at the peak of a snapshot of device memory.",
        epilog="exit status: 0; 2 if the file is no snapshot",
    )
    parser.add_argument("file", type=Path, help="a file of --memory-snapshot-path")
    path: Path = parser.parse_args(arguments).file
    try:
        text = summarize_snapshot(read_plain_pickle(path.read_bytes()))
    except OSError as error:
        print(f"memory_history: error: {error}", file=sys.stderr)
        return 2
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        fault = str(error) if isinstance(error, ValueError) else f"got {type(error).__name__}: {error}"
        print(
            f"memory_history: error: {path} must be a snapshot of device memory, {fault}; get one with --record-memory-history",
            file=sys.stderr,
        )
        return 2
    # Names of files are texts of the snapshot: they must not steer a terminal.
    print("\n".join("".join(c if c.isprintable() else "?" for c in line) for line in text.split("\n")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
