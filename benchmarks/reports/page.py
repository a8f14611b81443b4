"""Write the page of a comparison: how it was run, the table, the losses."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.engines.registry import engine_kind, is_ours
from benchmarks.measure.steps import GIB, Measurement
from benchmarks.reports.loss_check import (
    FIRST_LOSS_TOLERANCE,
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    differences,
    largest_difference,
)

_VARIABLES = ("NCCL_", "TORCH_SYMM_", "PYTORCH_", "CUDA_DEVICE_MAX_")
_PACKAGES = ("triton", "megatron-fsdp")


def page(title: str, facts: Sequence[tuple[str, str]], sections: Sequence[str]) -> str:
    """Join title, facts and sections to a markdown page."""
    lines = [f"- {name}: {value}" for name, value in facts]
    return "\n\n".join([f"# {title}", "\n".join(lines), *filter(None, sections)]) + "\n"


def facts_of_run(
    device: torch.device, extra: Sequence[tuple[str, str]], *, num_parameters: int | None = None
) -> list[tuple[str, str]]:
    """List what a reader needs to run it again; ``num_parameters`` where all runs have one model."""
    command = f"torchrun --nproc-per-node {dist.get_world_size()} {shlex.join([f'benchmarks/{Path(sys.argv[0]).name}', *sys.argv[1:]])}"
    if device.type == "cuda":
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
        versions = f"CUDA {torch.version.cuda}, NCCL {nccl}"
        hardware = torch.cuda.get_device_name(device)
    else:
        versions, hardware = "no CUDA", platform.machine()
    versions += "".join(f", {package} {version}" for package in _PACKAGES if (version := _version_of(package)))
    environment = [f"{key}={os.environ[key]}" for key in sorted(os.environ) if key.startswith(_VARIABLES)]
    return [
        ("command", f"`{command}`"),
        ("commit", commit()),
        ("date", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
        ("versions", f"Python {platform.python_version()}, torch {torch.__version__}, {versions}"),
        ("environment", ", ".join(environment) or "no settings of NCCL and PyTorch"),
        ("world size", f"{dist.get_world_size()} x {hardware}, {dist.get_backend()}"),
        *([] if num_parameters is None else [("parameters", f"{num_parameters / 1e9:.3f} billion")]),
        *extra,
    ]


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Return the commit of the source: git's answer, else the variable ``COMMIT``, else "unknown"."""
    root = Path(__file__).resolve().parents[2]
    try:
        asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True)
        return answer.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("COMMIT", "unknown")


def times_table(measurements: Sequence[Measurement], not_run: Mapping[str, str]) -> str:
    """Write times, ratios and memory, a row for each engine, and why others did not run (``not_run``, by name)."""
    by_name = {m.name: m for m in measurements}
    ideal, fsdp2 = by_name.get("ideal"), by_name.get("fsdp2")
    rows = [
        "| engine | median ms | min ms | host ms | ideal / it | fsdp2 / it | in a row ms | ideal / it in a row | allocated GiB | outside GiB | reserved GiB | "
        "reserved / allocated | steady GiB | last loss |",
        "|---" * 14 + "|",
    ]
    for m in measurements:
        rows.append(
            f"| {m.name} | {m.median_ms:.1f} | {m.min_ms:.1f} | {m.median_host_ms:.1f} | {_ratio(ideal, m)} | "
            f"{_ratio(fsdp2, m)} | {m.row_ms:.1f} | {_row_ratio(ideal, m)} | {m.peak_allocated / GIB:.2f} | {m.outside / GIB:.2f} | {m.reserved / GIB:.2f} | "
            f"{f'{m.reserved / m.peak:.3f}' if m.peak else '-'} | {m.steady_allocated / GIB:.2f} / "
            f"{m.steady_reserved / GIB:.2f} | {m.losses[-1]:.4f} |"
        )
    notes = [
        "Median and minimum over the measured steps of the slowest rank's time. Host: median time until the step's Python",
        "returns, without waiting for the device. Ratios of medians: higher is better. In a row: a step's share of as many steps",
        "without a wait between them, as in training. Memory is the most of any rank.",
        "Allocated: peak of PyTorch's allocator from construction to the end. Outside: the most that the device had given to",
        "the process past that allocator (symmetric memory, communicators, graphs, kernels loaded meanwhile), above what it",
        "had before the engine was built. Reserved: by the allocator, and outside. Reserved / allocated: with outside in both.",
        "Steady: peak allocated / reserved by the allocator in the last step of the warm-up and after it.",
    ]
    engines = [f"- `{m.name}`: {engine_kind(m.name).what}" for m in measurements]
    engines += [f"- `{name}` did not run: {reason}" for name, reason in not_run.items()]
    return "\n".join(["## Times and memory", "", *rows, "", *notes, "", *engines])


def plans_section(measurements: Sequence[Measurement]) -> str:
    """Write the memory that engines planned beside what they took at rest; "" where none planned."""
    parts = []
    for m in measurements:
        if m.plan is not None:
            rest = f"planned at rest {m.plan.at_rest / GIB:.3f} GiB, measured {m.at_rest / GIB:.3f} GiB"
            parts.append(f"`{m.name}`: {rest}\n\n```\n{m.plan.text}\n```")
    return "\n\n".join(["## Planned memory, rank 0", *parts]) if parts else ""


def losses_table(measurements: Sequence[Measurement]) -> str:
    """Write the loss of each step, and the gradient's norm where it was taken, a column for each engine."""
    sections = [_series_table("Losses", measurements, [m.losses for m in measurements])]
    if measurements and measurements[0].grad_norms:
        sections.append(_series_table("Gradient norms", measurements, [m.grad_norms for m in measurements]))
    return "\n\n".join(sections)


def check_section(measurements: Sequence[Measurement], reference: Measurement) -> tuple[str, list[str]]:
    """Return (the check of each engine against ``reference``, the faults that it found in ours)."""
    lines = [
        f"Relative to `{reference.name}`; tolerated: {FIRST_LOSS_TOLERANCE:.1e} for the first loss, {LOSS_TOLERANCE:.1e} "
        f"for later ones, {NORM_TOLERANCE:.1e} for gradient norms (reasons: `benchmarks/reports/loss_check.py`).",
        "",
    ]
    faults: list[str] = []
    for m in measurements:
        if m is reference:
            continue
        found = differences(m, reference)
        if is_ours(m.name):
            faults += found
            verdict = f"{len(found)} FAULTS" if found else "equal within noise"
        else:
            verdict = "a peer, told but not judged"
        lines.append(
            f"- `{m.name}`: {verdict}; largest difference of a loss {largest_difference(m.losses, reference.losses):.1e}, of a "
            f"gradient norm {largest_difference(m.grad_norms, reference.grad_norms):.1e}"
        )
    return "\n".join(["## Check", "", *lines, *(f"  - {fault}" for fault in faults)]), faults


def _series_table(title: str, measurements: Sequence[Measurement], series: Sequence[Sequence[float]]) -> str:
    rows = [
        "| step | " + " | ".join(m.name for m in measurements) + " |",
        "|---|" + "---|" * len(measurements),
    ]
    for step, values in enumerate(zip(*series, strict=True), start=1):
        rows.append(f"| {step} | " + " | ".join(f"{value:.5f}" for value in values) + " |")
    return "\n".join([f"## {title}", "", *rows])


def _row_ratio(better: Measurement | None, measurement: Measurement) -> str:
    return "-" if better is None or not measurement.row_ms else f"{better.row_ms / measurement.row_ms:.3f}"


def _ratio(better: Measurement | None, measurement: Measurement) -> str:
    return "-" if better is None else f"{better.median_ms / measurement.median_ms:.3f}"
