"""The report of a step: gathered over ranks, put into words, written and read."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.overlap_report.figures import END, Figures
from megatron.core.distributed.fsdp.overlap_report.page import page_of
from megatron.core.distributed.fsdp.overlap_report.picture import draw
from megatron.core.distributed.fsdp.overlap_report.trace import LANES, OUTSIDE
from megatron.core.regular_file import read_json

VERSION = 1
NAME = "overlap"
_READ = {"iteration", "num_ranks", "device", "is_captured", "step_ms", "rows", "headline"}
_OF_RANKS = ("compute", "exposed", "host", "latency", "wait")

Report = dict[str, Any]
"""What ``overlap.json`` holds: see ``make_report``."""


def make_report(
    figures: Figures,
    *,
    iteration: int,
    device: torch.device,
    is_captured: bool,
    usual_ms: float | None,
    memory: dict[str, Any],
    memory_of: int,
    notes: Sequence[str],
) -> Report:
    """Put figures into a report, with those of all ranks. Ranks: all of the process group; blocks the host.

    Args:
        usual_ms: what the host saw steps take before.
        memory: as ``memory_stack`` returns it, of the step ``memory_of``.

    Returns:
        ``version``, ``iteration``, ``rank``, ``num_ranks``, ``device``, ``torch``, ``is_captured``, ``step_ms``, ``usual_ms``,
        ``totals``, ``rows``, ``blocks``, ``idle`` and ``calls`` (see ``Figures``; milliseconds), ``memory``, ``memory_of``,
        ``ranks`` (a list of totals, by rank), ``notes`` and ``headline``.
    """
    is_cuda = device.type == "cuda"
    totals = {name: round(ms, 4) for name, ms in figures.totals.items()}
    report: Report = {
        "version": VERSION,
        "iteration": iteration,
        "rank": dist.get_rank() if dist.is_initialized() else 0,
        "num_ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "device": torch.cuda.get_device_name(device) if is_cuda else "CPU",
        "torch": torch.__version__,
        "is_captured": is_captured,
        "step_ms": round(figures.step, 4),
        "usual_ms": None if usual_ms is None else round(usual_ms, 4),
        "totals": totals,
        "rows": [{"name": label(row.unit, row.direction), **_rounded(row.as_dict())} for row in figures.rows],
        "blocks": figures.blocks,
        "idle": figures.idle,
        "calls": figures.calls,
        "memory": memory,
        "memory_of": memory_of,
        "notes": [*_notes(is_cuda, is_captured, iteration, memory_of), *notes],
    }
    own = {"step_ms": report["step_ms"], **{name: totals[name] for name in _OF_RANKS}}
    report["ranks"] = [own] * report["num_ranks"]
    if report["num_ranks"] > 1:
        dist.all_gather_object(report["ranks"], own)
    report["headline"] = headline(report)
    return report


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _rounded(value) if isinstance(value, dict) else round(value, 4) if isinstance(value, float) else value
        for key, value in row.items()
    }


def _notes(is_cuda: bool, is_captured: bool, iteration: int, memory_of: int) -> list[str]:
    if not is_cuda:
        return [
            "A CPU has no streams: what the engine sends is done when the call returns, so all communication is exposed, and times "
            "are the host's, with what the profiler adds to each operator."
        ]
    how = "an eager step before the capture" if is_captured else "a step shortly before"
    notes = [
        f"Which unit a kernel is for, and the memory, are of iteration {memory_of}, {how}, which was recorded with the host's "
        f"operators. The times are of iteration {iteration}, recorded with the device's work alone."
    ]
    if is_captured:
        notes.append(
            "The captured step has memory of its own, which is taken once and stays; the memory shown is the eager step's."
        )
    return notes


def headline(report: Report) -> str:
    """Say in a sentence where the step's time went."""
    totals = report["totals"]
    text = f"Step {_ms(report['step_ms'])}: {_ms(totals['compute'])} compute, {_ms(totals['exposed'])} exposed communication"
    worst = sorted((row for row in report["rows"] if row["exposed"] > 0), key=lambda row: -row["exposed"])[:2]
    if worst:
        text += " (most before " + ", ".join(f"{row['name']} {_ms(row['exposed'])}" for row in worst) + ")"
    text += f", {_ms(totals['host'])} waiting for the host" if totals["host"] else ""
    text += f", {_ms(totals['latency'])} between kernels" if totals["latency"] else ""
    return f"{text}.{_slow_host(report)}"


def _slow_host(report: Report) -> str:
    """Say which rank's host is late where that explains what this rank waits for in collectives; else nothing."""
    hosts = [rank["host"] for rank in report["ranks"]]
    slowest = max(range(len(hosts)), key=hosts.__getitem__)
    if slowest == report["rank"] or hosts[slowest] - hosts[report["rank"]] < report["step_ms"] / 10:
        return ""
    return f" Rank {slowest} waits {_ms(hosts[slowest])} for its host, and ranks that wait for it count that as communication."


def label(unit: str, direction: str) -> str:
    """Return the name of a row."""
    if direction == END:
        return END
    return f"{unit} {direction}" if unit != OUTSIDE else f"{direction}, {OUTSIDE}"


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"


def check_folder(folder: Path) -> None:
    """Check that a report can be written into a folder, and leave nothing there.

    Raises:
        OSError: it cannot.

    Ranks: 0.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    finally:
        for each in missing:
            with suppress(OSError):
                each.rmdir()


def write_report(report: Report, folder: Path) -> Path | None:
    """Write page, picture and numbers. Ranks: 0 does, others return None."""
    if report["rank"] != 0:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{NAME}.json").write_text(json.dumps(report, separators=(",", ":")) + "\n", encoding="utf-8")
    page = folder / f"{NAME}.html"
    page.write_text(page_of(report), encoding="utf-8")
    draw(report, folder / f"{NAME}.png")
    return page


def read_report(path: Path) -> Report:
    """Read the numbers of a report.

    Args:
        path: its folder, or its file of numbers.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is none, or of another version.
    """
    file = path / f"{NAME}.json" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{path} must be the folder of an overlap report, with {NAME}.json in it")
    try:
        report = read_json(file)
        version = report["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} must hold an overlap report in JSON, got {error!r}") from error
    if version != VERSION:
        raise ValueError(
            f"{file} must be an overlap report of version {VERSION}, got version {version}; write it again"
        )
    totals = report.get("totals")
    if lacking := [*(_READ - set(report)), *(set(LANES) - set(totals if isinstance(totals, dict) else ()))]:
        raise ValueError(
            f"{file} must hold an overlap report, got JSON without {', '.join(sorted(lacking))}; write it again"
        )
    return dict(report)
