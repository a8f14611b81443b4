"""The status page of a run: one HTML file with all that it shows."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from megatron.core.regular_file import read_regular
from megatron.training.telemetry.watch.history import MAX_POINTS, History
from megatron.training.telemetry.watch.run_state import About, State

_MARK = "@STATUS@"
_NOT_COLUMNS = ("kind", "lines")


@cache
def _template() -> tuple[str, str]:
    """Return what stands before and after the status."""
    before, after = (files(__package__) / "status_page.html").read_text(encoding="utf-8").split(_MARK)
    return before, after


def status_page(about: About, state: State, history: History, *, now: float, pace_s: float) -> str:
    """Format the page.

    Args:
        now: when it is written, in seconds since 1970.
        pace_s: seconds until it is written again at least.
    """
    status: dict[str, Any] = {
        "about": vars(about),
        "state": vars(state),
        "written": now,
        "pace_s": pace_s,
        "points": _columns(history),
        "evaluations": [[one["iteration"], one["time"], one["name"], one["loss"]] for one in history.evaluations],
        "events": [[one["iteration"], one["time"], one["what"], one["text"]] for one in history.events],
    }
    text = json.dumps(status, allow_nan=False, separators=(",", ":"))
    # Inside of a script element, whatever the texts hold.
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    before, after = _template()
    return f"{before}{text}{after}"


def is_status_page(path: Path) -> bool:
    """Return whether a file is a status page, or the beginning of one.

    Raises:
        ValueError: it is no regular file.
        OSError: it cannot be read.
    """
    before = _template()[0].encode()
    mark = before.splitlines()[-1]  # the element that holds the status
    data = read_regular(path)
    return mark in data or before.startswith(data)


def _columns(history: History) -> dict[str, list[Any]]:
    points = history.points[-MAX_POINTS:]
    names = dict.fromkeys(name for point in points for name in point if name not in _NOT_COLUMNS)
    return {name: [_short(point.get(name)) for point in points] for name in names}


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) and abs(value) < 1e9 else value
