"""What is known of a run at the moment, and its files: history, status page, metrics for Prometheus."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from megatron.core.distributed.fsdp.overlap_report import read_report
from megatron.core.regular_file import read_regular
from megatron.training.telemetry.watch.history import History, finite
from megatron.training.telemetry.watch.prometheus import is_prometheus_file, prometheus_text
from megatron.training.telemetry.watch.replace_file import replace_file
from megatron.training.telemetry.watch.run_state import UNKNOWN_S, About, State
from megatron.training.telemetry.watch.status_page import is_status_page, status_page
from megatron.training.telemetry.watch.time_left import format_percent

_NUM_INTERVALS = 5
_NAMED = 8  # ranks in an event


class Board:
    """The state and the history of a run, and where they are written.

    Args:
        page: file of the status page; its history lies beside it.
        prometheus: file of metrics.

    Ranks: 0; one thread at a time.
    """

    def __init__(self, about: About, *, page: Path | None, prometheus: Path | None) -> None:
        self.about, self.page, self.prometheus = about, page, prometheus
        self.state = State()
        self.history = History((page or prometheus or Path("unused")).with_suffix(".history.jsonl"))
        self._lines: list[float] = []  # when the last ones came
        self._of_pauses: dict[str, float] = {}
        self._has_written = False
        self.take_warnings: Callable[[], Iterable[str]] = tuple
        """Returns warnings of other ranks since the last call."""

    def begin(self, iteration: int, text: str) -> None:
        """Take up the history and write everything once.

        Raises:
            OSError, ValueError: a file cannot be read or written, or holds what no run has written.
        """
        for path, is_ours in ((self.page, is_status_page), (self.prometheus, is_prometheus_file)):
            if path is not None and path.exists() and not is_ours(path):
                raise ValueError(f"{path} holds something else, which would be lost; move it away")
        for path in (self.page, self.prometheus):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
        if self.page is not None:
            self.history.read()
        self.history.add_start(iteration, time.time(), text + self._fate_of_last_start())
        self.write(0.0)

    def _fate_of_last_start(self) -> str:
        """Say where the start before was last seen, unless it said itself how it ended."""
        words = (*self.history.points[-1:], *self.history.events[-1:])
        if not words or (self.history.events[-1:] and self.history.events[-1]["what"] in ("end", "failure")):
            return ""
        return f"; the start before was last seen at iteration {max(word['iteration'] for word in words)}, and did not say how it ended"

    def set_progress(self, **values: Any) -> None:
        """Set fields of the state."""
        for name, value in values.items():
            setattr(self.state, name, value)

    def add_line(self, iteration: int, now: float, values: Mapping[str, float | None], *, is_due: bool) -> None:
        """Take a log line; one that is not due is shown until the next and counts no more then."""
        known = {name: finite(value) for name, value in values.items()}
        self.state.latest = known
        if is_due:
            self.history.add_line(iteration, now, known)
            self._tell_of_bad_steps(iteration, now, known)
        self._lines = [*self._lines, now][-_NUM_INTERVALS - 1 :]
        self._work("training")

    def _tell_of_bad_steps(self, iteration: int, now: float, values: Mapping[str, float | None]) -> None:
        words = {"skipped iterations": "skipped", "nan iterations": "with a loss that is not finite"}
        for name, what in words.items():
            if number := int(values.get(name) or 0):
                text = f"{number} {'iterations' if number > 1 else 'iteration'} {what}"
                self.history.add_event(name.split()[0], iteration, now, text)

    def add_overlap_report(self, page: Path, iteration: int, now: float) -> None:
        """Link an overlap report from the page, and tell what it says."""
        report = read_report(page.parent)
        self.history.add_event("overlap", iteration, now, f"overlap report: {report['headline']}")
        self.state.exposed = (report["totals"]["exposed"], report["step_ms"], iteration)
        # From the page's folder, so that both can be moved or shown by a web server.
        there = os.path.relpath(page, self.page.parent) if self.page is not None else str(page)
        self.state.links = [(f"Overlap report of iteration {iteration}", quote(there))]

    def set_silent(self, ranks: Sequence[tuple[int, str, float, str]], now: float) -> None:
        """Take the ranks that give no sign of life, and tell who fell silent and who came back."""
        known, given = {rank for rank, *_ in self.state.silent}, {rank for rank, *_ in ranks}
        fallen = [f"rank {rank} (host {host}), last at {act}" for rank, host, _, act in ranks if rank not in known]
        back = [f"rank {rank}" for rank in sorted(known - given)]
        for names, words in ((fallen, "no sign of life from"), (back, "signs of life again from")):
            if names:
                more = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
                text = f"{words} {'; '.join(names[:_NAMED])}{more}"
                self.history.add_event("silent", self.state.iteration, now, text)
        self.state.silent = list(ranks)

    def pause(self, what: str, now: float) -> None:
        """Note that training waits for something else."""
        self._work(what, now)

    def resume(self, what: str, seconds: float, now: float) -> None:
        """Note that a pause has ended."""
        self._of_pauses[what] = seconds
        self._work("training", now)

    def _work(self, what: str, now: float | None = None) -> None:
        if self.state.what != what:
            self.state.what, self.state.since = what, now or time.time()
        gaps = [after - before for before, after in zip(self._lines, self._lines[1:], strict=False)]
        usual = median(gaps) if gaps else UNKNOWN_S
        self.state.expected_s = usual if what == "training" else max(usual, self._of_pauses.get(what, UNKNOWN_S))

    def end(self, what: str, text: str, now: float) -> None:
        """Note that training has ended, and why."""
        self.state.what, self.state.since, self.state.text = what, now, text
        # Nobody trains any more: an end that is foreseen would be taken for the run's.
        self.state.seconds_left = 0.0
        self.state.progress = f"{format_percent(self.state.fraction_done)} done"
        self.history.add_event(what, self.state.iteration, now, text)

    def write(self, pace_s: float) -> None:
        """Write all files.

        Args:
            pace_s: seconds until they are written again at least.

        Raises:
            OSError: one cannot be written.
            ValueError: another run has written the page since.
        """
        now = time.time()
        if self.page is not None and self._has_written:
            self._check_own(self.page)
        for text in self.take_warnings():
            self.history.add_event("warning", self.state.iteration, now, text)
        if self.prometheus is not None:
            replace_file(self.prometheus, prometheus_text(self.about, self.state, self.history, now=now))
        if self.page is not None:
            self.history.write()
            replace_file(self.page, status_page(self.about, self.state, self.history, now=now, pace_s=pace_s))
            self._has_written = True

    def _check_own(self, page: Path) -> None:
        if page.exists() and self.state.start.encode() not in read_regular(page):
            raise ValueError(
                f"{page} must be of one run, and another one writes it by now: this one no longer does; give each a page of its own"
            )
