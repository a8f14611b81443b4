"""The past of a run for its status page: few points, the events, and the file of JSON lines that keeps both over restarts."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.core.regular_file import parse_json, read_regular
from megatron.training.telemetry.watch.replace_file import replace_file

MAX_POINTS = 2000
"""Points of a curve: more than a screen has columns. Where there are more log lines, several make one point."""

_MAX_EVENTS = 200
"""Events kept of each kind."""

_MAX_LINES = 3 * MAX_POINTS
"""Lines of the file after which it is written anew with what is kept."""

_MAX_NBYTES = 64 * 2**20
"""A larger file is no history of ours."""

_MAX_TEXT = 4000
_LINE, _EVALUATION, _EVENT = "line", "evaluation", "event"
_SUMS = ("lines", "skipped iterations", "nan iterations")

Record = dict[str, Any]
"""A line of the file: its kind, time and iteration, and what belongs to the kind: numbers, None and texts."""


class History:
    """The points, evaluations and events of a run, over all its starts.

    Args:
        path: of the file.

    Ranks: 0.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.points: list[Record] = []
        self.evaluations: list[Record] = []
        self.events: list[Record] = []
        self._stride = 1  # log lines of a point
        self._unwritten: list[str] = []
        self._num_lines = 0
        self._is_torn = False  # the file ends within a line, or may

    def read(self) -> None:
        """Take up what an earlier start has left; lines that are none of ours, such as a torn last one, are passed over.

        Raises:
            OSError: the file is there and cannot be read.
            ValueError: it is no regular file, or too large.
        """
        try:
            size = self.path.stat().st_size
            if size > _MAX_NBYTES:
                raise ValueError(
                    f"{self.path} must be a history of at most {_MAX_NBYTES:,} bytes, got {size:,}: remove it"
                )
            data = read_regular(self.path)
        except FileNotFoundError:
            return
        self._is_torn = bool(data) and not data.endswith(b"\n")
        for line in data.splitlines():
            self._num_lines += 1
            if (record := _parse(line)) is not None:
                self._take(record)

    def add_start(self, iteration: int, time: float, text: str) -> None:
        """Note that training starts after ``iteration``; points after it, which are trained again, are dropped."""
        self.add({"kind": _EVENT, "what": "start", "time": time, "iteration": iteration, "text": text})

    def add_line(self, iteration: int, time: float, values: Mapping[str, float | None]) -> None:
        """Add the values of a log line; None stands for one that is not finite."""
        self.add({"kind": _LINE, "time": time, "iteration": iteration, "lines": 1, **values})

    def add_evaluation(self, iteration: int, time: float, name: str, loss: float | None) -> None:
        """Add the loss of an evaluation."""
        self.add({"kind": _EVALUATION, "time": time, "iteration": iteration, "name": name, "loss": loss})

    def add_event(self, what: str, iteration: int, time: float, text: str) -> None:
        """Add an event."""
        self.add({"kind": _EVENT, "what": what, "time": time, "iteration": iteration, "text": text[:_MAX_TEXT]})

    def add(self, record: Record) -> None:
        """Take a record, and keep it for the file."""
        self._take(record)
        self._unwritten.append(_dump(record))

    def total(self, name: str) -> float:
        """Sum a value over all points."""
        return float(sum(point.get(name) or 0 for point in self.points))

    def write(self) -> None:
        """Append what is new to the file, or write it anew where it has become long or its end is torn.

        Raises:
            OSError: it cannot be written; the next time it is written anew.
        """
        new, self._unwritten = self._unwritten, []
        if self._is_torn or self._num_lines + len(new) > _MAX_LINES:
            # Starts first: what they drop is dropped already. Times say nothing of the order, since clocks may be set back.
            kept = (*self.events, *self.points, *self.evaluations)
            self._is_torn = True
            replace_file(self.path, "".join(f"{_dump(record)}\n" for record in kept))
            self._num_lines, self._is_torn = len(kept), False
        elif new:
            self._is_torn = True
            with open(self.path, "a", encoding="utf-8") as file:
                file.write("".join(f"{line}\n" for line in new))
            self._num_lines, self._is_torn = self._num_lines + len(new), False

    def _take(self, record: Record) -> None:
        if record["kind"] == _LINE:
            self._take_line(record)
        elif record["kind"] == _EVALUATION:
            self.evaluations.append(record)
            if len(self.evaluations) > MAX_POINTS:
                self.evaluations = self.evaluations[::2]
        else:
            if record["what"] == "start":
                self._drop_after(record["iteration"])
            self.events.append(record)
            if Counter(event["what"] for event in self.events)[record["what"]] > _MAX_EVENTS:
                same = [event for event in self.events if event["what"] == record["what"]]
                self.events.remove(same[0])

    def _take_line(self, record: Record) -> None:
        if self.points and self.points[-1]["lines"] + record["lines"] <= self._stride:
            self.points[-1] = _merge(self.points[-1], record)
        else:
            self.points.append(record)
        if len(self.points) > MAX_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            odd = self.points[-1:] if len(self.points) % 2 else []
            self.points = [_merge(*pair) for pair in pairs] + odd
            self._stride = max(point["lines"] for point in self.points)

    def _drop_after(self, iteration: int) -> None:
        self.points = [point for point in self.points if point["iteration"] <= iteration]
        self.evaluations = [point for point in self.evaluations if point["iteration"] <= iteration]


def _merge(first: Record, second: Record) -> Record:
    """Make one point of two: extremes of lows and highs, sums of counts, else means over log lines."""
    merged = {"kind": _LINE, "time": second["time"], "iteration": second["iteration"]}
    for name in dict.fromkeys((*first, *second)):
        if name in merged:
            continue
        known = [(point[name], point["lines"]) for point in (first, second) if point.get(name) is not None]
        merged[name] = _merged(name, known) if known else None
    return merged


def _merged(name: str, known: list[tuple[float, int]]) -> float:
    values = [value for value, _ in known]
    if name in _SUMS:
        return sum(values)
    if name.endswith((" low", " high")):
        return min(values) if name.endswith(" low") else max(values)
    return sum(value * lines for value, lines in known) / sum(lines for _, lines in known)


def finite(value: float | None) -> float | None:
    """Return a number that JSON has; None stands for others."""
    return value if value is not None and math.isfinite(value) else None


def _dump(record: Record) -> str:
    return json.dumps({name: _rounded(value) for name, value in record.items()}, allow_nan=False)


def _rounded(value: Any) -> Any:
    return float(f"{value:.7g}") if isinstance(value, float) and abs(value) < 1e9 else value


def _parse(line: bytes) -> Record | None:
    """Return a record if the line is one; whatever else there is in the file is data, and no error."""
    try:
        record = parse_json(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not _are_numbers(record.get(name) for name in ("time", "iteration")):
        return None
    texts = {_LINE: (), _EVALUATION: ("name",), _EVENT: ("what", "text")}.get(str(record.get("kind")))
    if texts is None or not all(isinstance(record.get(name), str) and len(record[name]) <= _MAX_TEXT for name in texts):
        return None
    others = [value for name, value in record.items() if name not in ("kind", *texts)]
    if not _are_numbers(value for value in others if value is not None):
        return None
    has_lines = isinstance(record.get("lines"), int) and record["lines"] > 0
    return record if has_lines or record["kind"] != _LINE else None


def _are_numbers(values: Iterable[Any]) -> bool:
    # Neither NaN nor an integer that no float holds.
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300 for value in values
    )
