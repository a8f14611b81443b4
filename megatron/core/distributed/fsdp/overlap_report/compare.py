"""Two reports side by side: what changed, unit by unit."""

from __future__ import annotations

from typing import Any

from megatron.core.distributed.fsdp.overlap_report.report import Report, label

_TIMES = ("compute", "gather", "reduce", "exposed", "host", "latency", "wait")
_PARTS = {"compute": "compute", "exposed": "exposed communication", "host": "host", "latency": "between kernels"}
"""What a step's time is divided into, in words."""

_NUM_ROWS = 25


def compare_reports(a: Report, b: Report, *, names: tuple[str, str] = ("A", "B")) -> dict[str, Any]:
    """Return what changed from ``a`` to ``b``.

    Returns:
        ``headline``, ``a`` and ``b`` (in words), ``step_ms`` of ``a``, ``totals`` {name: change}, and ``rows``, one for each unit and
        direction of either: ``name``, ``unit``, ``direction``, for each time ``<time>_a``, ``<time>_b`` and ``<time>_change``, and ``largest``,
        the largest change of a time in which nothing computed, or of compute. Milliseconds.
    """
    of_a, of_b = ({(row["unit"], row["direction"]): row for row in report["rows"]} for report in (a, b))
    rows = []
    for unit, direction in dict.fromkeys([*of_a, *of_b]):
        row: dict[str, Any] = {"name": label(unit, direction), "unit": unit, "direction": direction}
        for name in _TIMES:
            before, after = (float(of.get((unit, direction), {}).get(name, 0.0)) for of in (of_a, of_b))
            row |= {f"{name}_a": before, f"{name}_b": after, f"{name}_change": round(after - before, 4)}
        row["largest"] = max(abs(row[f"{name}_change"]) for name in _PARTS)
        rows.append(row)
    rows.sort(key=lambda row: -row["largest"])
    totals = {name: round(b["totals"][name] - a["totals"][name], 4) for name in a["totals"] if name in b["totals"]}
    change = b["step_ms"] - a["step_ms"]
    parts = ", ".join(f"{words} {totals[name]:+.2f}" for name, words in _PARTS.items())
    return {
        "headline": f"Step {a['step_ms']:.2f} ms -> {b['step_ms']:.2f} ms ({change:+.2f} ms, {change / max(a['step_ms'], 1e-9):+.1%}): {parts}.",
        "a": _described(a, names[0]),
        "b": _described(b, names[1]),
        "step_ms": a["step_ms"],
        "totals": totals,
        "rows": rows,
    }


def _described(report: Report, name: str) -> str:
    captured = "as a CUDA graph" if report["is_captured"] else "eager"
    return f"{name}: iteration {report['iteration']}, {report['num_ranks']} ranks, {captured}, {report['device']}. {report['headline']}"


def comparison_text(comparison: dict[str, Any]) -> str:
    """Return the comparison for a terminal: the units that changed most."""
    changed = [row for row in comparison["rows"] if row["largest"] > 0]
    wide = max([len(row["name"]) for row in changed[:_NUM_ROWS]], default=4)
    columns = ("exposed", "compute", "gather", "reduce", "host", "latency", "wait")
    heads = ["exposed A", "exposed B", *("between" if name == "latency" else name for name in columns)]
    lines = [
        comparison["headline"],
        f"A {comparison['a']}",
        f"B {comparison['b']}",
        "",
        "Changes from A to B in ms:",
        f"{'unit':<{wide}}" + "".join(f" {head:>10}" for head in heads),
    ]
    for row in changed[:_NUM_ROWS]:
        line = f"{row['name']:<{wide}} {row['exposed_a']:>10.3f} {row['exposed_b']:>10.3f}"
        lines.append(line + "".join(f" {row[f'{column}_change']:>+10.3f}" for column in columns))
    if len(changed) > _NUM_ROWS:
        lines.append(f"and {len(changed) - _NUM_ROWS} more with smaller changes")
    return "\n".join(lines)
