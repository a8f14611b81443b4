"""The history of a run: few points that hide no spike, and a file that outlives restarts and kills."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.training.telemetry.watch import history as history_module
from megatron.training.telemetry.watch.history import MAX_POINTS, History
from tests.training.telemetry.watch.watched import board


def _read(path: Path) -> History:
    history = History(path)
    history.read()
    return history


def test_many_lines_make_few_points_with_means_extremes_and_sums(tmp_path: Path) -> None:
    history = board(tmp_path).history
    assert MAX_POINTS / 2 <= len(history.points) <= MAX_POINTS
    assert sum(point["lines"] for point in history.points) == 3000
    assert [point["iteration"] for point in history.points][-1] == 3000
    assert max(point["loss high"] for point in history.points) == 50.0, "a spike is not averaged away"
    assert history.total("skipped iterations") == 6
    first = history.points[0]
    assert first["lines"] == 2 and first["iteration"] == 2
    assert first["loss low"] <= first["loss"] <= first["loss high"]
    assert sum(event["what"] == "skipped" for event in history.events) == 6


def test_a_restart_enter_root_the_history_and_drops_what_is_trained_again(tmp_path: Path) -> None:
    first = board(tmp_path, stop=700)
    first.write(0.0)
    second = board(tmp_path, start=600, stop=650)
    assert [point["iteration"] for point in second.history.points] == list(range(1, 651))
    assert [one["iteration"] for one in second.history.evaluations] == [650], (
        "that of iteration 700 is not of this path"
    )
    assert [event["iteration"] for event in second.history.events if event["what"] == "start"] == [0, 600]
    second.write(0.0)
    third = _read(tmp_path / "status.history.jsonl")
    assert third.points == json.loads(json.dumps(third.points))
    assert [point["iteration"] for point in third.points] == list(range(1, 651))


def test_a_torn_last_line_costs_that_line_alone(tmp_path: Path) -> None:
    """A kill may come within a line; the next one begins afresh."""
    first = board(tmp_path, stop=20)
    first.write(0.0)
    path = tmp_path / "status.history.jsonl"
    path.write_bytes(path.read_bytes() + b'{"kind": "line", "time": 1.0, "itera')
    second = _read(path)
    assert len(second.points) == 20
    second.add_line(21, 1.7e9, {"loss": 1.0})
    second.write()
    assert [point["iteration"] for point in _read(path).points] == list(range(1, 22))


def test_lines_that_a_full_disk_took_in_part_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "h.jsonl"
    history = History(path)
    for iteration in range(1, 11):
        history.add_line(iteration, 1e9 + iteration, {"skipped iterations": 1})

    @contextmanager
    def full(file: Path, mode: str, **named: Any) -> Iterator[SimpleNamespace]:
        def write(text: str) -> None:
            file.write_text(text[:400])
            raise OSError(28, "No space left on device")

        yield SimpleNamespace(write=write)

    with monkeypatch.context() as patch:
        patch.setattr(history_module, "open", full, raising=False)
        with pytest.raises(OSError, match="No space left"):
            history.write()
    history.add_line(11, 1e9 + 11, {"skipped iterations": 1})
    history.write()
    again = _read(path)
    assert [point["iteration"] for point in again.points] == list(range(1, 12))
    assert again.total("skipped iterations") == 11


def test_a_clock_that_is_set_back_changes_no_order(tmp_path: Path) -> None:
    """What a start drops was written before it, whatever the times say; so it stays when the file is written anew."""
    path = tmp_path / "h.jsonl"
    history = History(path)
    history.add_start(0, 2e9, "training starts")
    for iteration in range(1, 101):
        history.add_line(iteration, 2e9 + iteration, {"loss": 1.0})
    history.add_evaluation(100, 2e9, "validation", 3.0)
    history.add_start(100, 1e9, "training goes on")
    for iteration in range(101, 8_001):
        history.add_line(iteration, 1e9 + iteration, {"loss": 1.0})
    history.add_evaluation(8_000, 1e9, "validation", 2.0)
    history.write()
    again = _read(path)
    iterations = [point["iteration"] for point in again.points]
    assert iterations == sorted(iterations) and sum(point["lines"] for point in again.points) == 8_000
    assert [one["loss"] for one in again.evaluations] == [3.0, 2.0], "the last one is the last"


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'["kind"]',
        b'{"kind": "line", "time": 1, "iteration": "<b>", "lines": 1}',
        b'{"kind": "line", "time": 1, "iteration": 1, "lines": 0}',
        b'{"kind": "line", "time": NaN, "iteration": 1, "lines": 1}',
        b'{"kind": "line", "time": 1, "iteration": 1, "lines": 1, "loss": {"a": 1}}',
        b'{"kind": "line", "time": 1, "iteration": 1, "lines": 1, "loss": 1' + b"0" * 400 + b"}",
        b'{"kind": "line", "time": 1, "iteration": 1, "lines": 1, "text": "a"}',
        b'{"kind": ["line"], "time": 1, "iteration": 1, "lines": 1}',
        b'{"kind": "event", "time": 1, "iteration": 1, "what": "save", "text": 3}',
        b'{"kind": "event", "time": 1, "iteration": 1, "what": "save", "text": "' + b"a" * 5000 + b'"}',
        b'{"kind": "evaluation", "time": 1, "iteration": 1, "loss": 3}',
    ],
    ids=range(13),
)
def test_lines_that_are_none_of_ours_are_passed_over(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "h.jsonl"
    path.write_bytes(line + b'\n{"kind": "line", "time": 1, "iteration": 7, "lines": 1, "loss": null}\n')
    history = _read(path)
    assert [point["iteration"] for point in history.points] == [7] and not history.events and not history.evaluations


def test_the_file_stays_small_in_a_long_run(tmp_path: Path) -> None:
    """30,000 lines: it is written anew with the points that are kept."""
    path = tmp_path / "h.jsonl"
    history = History(path)
    for iteration in range(1, 30_001):
        history.add_line(iteration, 1e9 + iteration, {"loss": float(iteration), "skipped iterations": 1})
        if iteration % 10 == 0:
            history.add_event("save", iteration, 1e9 + iteration, "saved")
        if iteration % 500 == 0:
            history.write()
    assert len(path.read_bytes().splitlines()) <= 3 * MAX_POINTS
    again = _read(path)
    assert again.total("skipped iterations") == 30_000 and again.points[-1]["iteration"] == 30_000
    assert len(again.points) <= MAX_POINTS and len(again.events) == 200 and again.events[-1]["iteration"] == 30_000
    mean = sum(point["loss"] * point["lines"] for point in again.points) / 30_000
    assert mean == pytest.approx(15_000.5, rel=1e-5)


def test_a_file_that_is_no_history_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "h.jsonl"
    with open(path, "wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(ValueError, match="must be a history of at most"):
        _read(path)
