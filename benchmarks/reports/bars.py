"""The bars that the engine must reach, and a table of whether it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.engines.registry import RIVALS, eager_twin, is_ours
from benchmarks.measure.steps import GIB, Measurement


@dataclass(frozen=True)
class Bar:
    """The lowest ratios of median times that pass."""

    ideal: float
    rival: float
    """Of the fastest peer that ran."""


# (model, tokens, in a CUDA graph).
BARS = {
    ("7.2b", 4096, False): Bar(0.93, 1.10),
    ("7.2b", 4096, True): Bar(0.93, 1.10),
    ("7.2b", 1024, False): Bar(0.75, 1.20),
    ("7.2b", 1024, True): Bar(0.75, 1.20),
    ("1.1b", 2048, False): Bar(0.85, 1.35),
    ("1.1b", 2048, True): Bar(0.92, 1.45),
}
MOST_MEMORY = 1.0
"""Of FSDP2's peak."""
MOST_RESERVED = 1.03
"""Of what is allocated."""


def bars_section(measurements: Sequence[Measurement], model: str, num_tokens: int) -> str:
    """Write a row for each engine of ours, with its bar where this model and this number of tokens have one."""
    by_name = {m.name: m for m in measurements}
    rivals = [by_name[name] for name in RIVALS if name in by_name]
    best = min(rivals, key=lambda m: m.median_ms, default=None)
    rows = [
        f"| engine | ideal / it | {best.name if best else 'best peer'} / it | peak GiB / fsdp2's | reserved / allocated | verdict | both ratios in a row |",
        "|---" * 7 + "|",
    ]
    for m in measurements:
        if is_ours(m.name):
            bar = BARS.get((model, num_tokens, eager_twin(m.name) != m.name))
            rows.append(_row(m, bar, ideal=by_name.get("ideal"), best=best, fsdp2=by_name.get("fsdp2")))
    notes = [
        "Each figure with what is asked of it. Best peer: the fastest of those that ran. Peaks are allocated memory with what",
        "lies outside of PyTorch's allocator, from construction to the end; reserved likewise. In a row: the same ratios to ideal",
        "and best peer of steps that follow each other without a wait, told but not judged.",
    ]
    return "\n".join(["## Bars", "", *rows, "", *notes])


def _row(
    m: Measurement, bar: Bar | None, *, ideal: Measurement | None, best: Measurement | None, fsdp2: Measurement | None
) -> str:
    checks = [
        _at_least(None if ideal is None else ideal.median_ms / m.median_ms, None if bar is None else bar.ideal),
        _at_least(None if best is None else best.median_ms / m.median_ms, None if bar is None else bar.rival),
        _memory_check(m, fsdp2),
        _at_most(m.reserved / m.peak if m.peak else None, MOST_RESERVED),
    ]
    holds = [hold for _, hold in checks]
    verdict = "FAILS" if False in holds else "no bar" if bar is None else "unknown" if None in holds else "passes"
    row = ", ".join("-" if r is None or not m.row_ms else f"{r.row_ms / m.row_ms:.3f}" for r in (ideal, best))
    return f"| {m.name} | " + " | ".join(text for text, _ in checks) + f" | {verdict} | {row} |"


def _memory_check(m: Measurement, fsdp2: Measurement | None) -> tuple[str, bool | None]:
    if fsdp2 is None or not fsdp2.peak:
        return f"{m.peak / GIB:.2f}", None
    text, holds = _at_most(m.peak / fsdp2.peak, MOST_MEMORY)
    return f"{m.peak / GIB:.2f} / {fsdp2.peak / GIB:.2f} = {text}", holds


def _at_least(value: float | None, least: float | None) -> tuple[str, bool | None]:
    if value is None:
        return "-", None
    if least is None:
        return f"{value:.3f}", None
    holds = value >= least
    return f"{value:.3f} {'>=' if holds else '<'} {least}", holds


def _at_most(value: float | None, most: float) -> tuple[str, bool | None]:
    if value is None:
        return "-", None
    holds = value <= most
    return f"{value:.3f} {'<=' if holds else '>'} {most}", holds


def graph_section(measurements: Sequence[Measurement], *, is_deterministic: bool) -> str:
    """Compare the losses of each engine in a CUDA graph with those of the same engine without; "" without graphs.

    ``is_deterministic``: the run used kernels that add in a fixed order; otherwise attention's backward may differ from
    run to run with any engine.
    """
    by_name = {m.name: m for m in measurements}
    lines = []
    for m in measurements:
        twin = by_name.get(eager_twin(m.name))
        if twin is m:
            continue
        if twin is None:
            lines.append(f"- `{m.name}`: `{eager_twin(m.name)}` did not run")
        elif m.losses == twin.losses:
            lines.append(f"- `{m.name}`: all {len(m.losses)} losses bitwise equal to those of `{twin.name}`")
        else:
            step, a, b = next(
                (i, a, b) for i, (a, b) in enumerate(zip(m.losses, twin.losses, strict=True), 1) if a != b
            )
            word = "DIFFERS" if is_deterministic else "differs (without --deterministic, so may any two runs)"
            lines.append(f"- `{m.name}`: {word} from `{twin.name}` from step {step} on, {a!r} for {b!r}")
    return "\n".join(["## Graphs", "", *lines]) if lines else ""
