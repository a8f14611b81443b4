"""The picture of a report: where the step's time went, and its memory, for pages that show no HTML."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

COLORS = {
    "compute": "#4c72b0",
    "gather": "#2a9d8f",
    "reduce": "#e9a23b",
    "other": "#8d6bb8",
    "exposed": "#d1495b",
    "host": "#9aa0a6",
    "latency": "#d5d8dc",
    "calls": "#9aa0a6",
}
"""Of lanes and kinds of time, here and on the page."""

MEMORY_COLORS = {
    "weights": "#1f3b63",
    "optimizer": "#4c72b0",
    "gathered weights": "#2a9d8f",
    "gradient staging": "#e9a23b",
    "gradients": "#c77d2e",
    "activations": "#b58bc9",
    "other": "#c3c7cc",
}
_LANES = (("compute", "compute"), ("gather", "all-gather"), ("reduce", "reduce"), ("other", "other comm."))
_NUM_BARS = 16


def draw(report: dict[str, Any], path: Path) -> bool:
    """Draw the report; without matplotlib, say so and return False."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning("no picture is drawn beside the overlap report, which needs matplotlib: pip install matplotlib")
        return False
    figure = Figure(figsize=(13, 11), layout="constrained")
    lanes, bars, memory = figure.subplots(3, 1, height_ratios=[2.2, 3.4, 2.6])
    figure.suptitle(report["headline"], fontsize=12, wrap=True)
    _draw_lanes(lanes, report)
    _draw_bars(bars, report)
    _draw_memory(memory, report)
    figure.savefig(path, dpi=110)
    return True


def _draw_lanes(axes: Any, report: dict[str, Any]) -> None:
    shown = [(lane, text) for lane, text in _LANES if report["blocks"][lane]]
    for at, (lane, _) in enumerate(shown):
        spans = [(begin, end - begin) for begin, end, _ in report["blocks"][lane]]
        axes.broken_barh(spans, (at - 0.35, 0.7), color=COLORS[lane])
    for kind in ("exposed", "host"):
        spans = [(begin, end - begin) for begin, end, own, _ in report["idle"] if own == kind]
        axes.broken_barh(spans, (len(shown) - 0.35, 0.7), color=COLORS[kind])
    axes.set_yticks(range(len(shown) + 1), [*(text for _, text in shown), "no compute"])
    axes.invert_yaxis()
    axes.set_xlim(0, report["step_ms"])
    axes.set_xlabel("ms of the step (no compute: red while communication runs, grey while the host is late)")


def _draw_bars(axes: Any, report: dict[str, Any]) -> None:
    rows = sorted(report["rows"], key=lambda row: -row["wait"])[:_NUM_BARS]
    left = [0.0] * len(rows)
    for kind, text in (("exposed", "exposed communication"), ("host", "host late"), ("latency", "between kernels")):
        widths = [row[kind] for row in rows]
        axes.barh(range(len(rows)), widths, left=left, color=COLORS[kind], label=text)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms without compute before the unit's compute")
    axes.legend(loc="lower right", frameon=False)


def _draw_memory(axes: Any, report: dict[str, Any]) -> None:
    memory = report["memory"]
    if not memory:
        axes.set_axis_off()
        return
    peak = max(1, sum(memory["peak"].values()))
    unit, divisor = ("GiB", 2**30) if peak >= 2**30 else ("MiB", 2**20)
    kinds = [kind for kind in MEMORY_COLORS if max(memory["series"][kind])]
    axes.stackplot(
        memory["times"],
        [[nbytes / divisor for nbytes in memory["series"][kind]] for kind in kinds],
        labels=kinds,
        colors=[MEMORY_COLORS[kind] for kind in kinds],
        step="post",
    )
    axes.set_xlim(0, memory["times"][-1])
    axes.set_ylabel(f"memory, {unit}")
    axes.set_xlabel(f"ms of the host in iteration {report['memory_of']}; peak {peak / divisor:.2f} {unit}")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
