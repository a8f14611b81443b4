"""The estimate of the time that is left: medians, pauses that are still due, and its sentence."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from megatron.training.telemetry.watch.run_watch import RunWatch, Scale, WatchConfig
from megatron.training.telemetry.watch.time_left import Pauses, TimeLeft, format_duration, format_percent
from tests.training.telemetry.watch.watched import record

_SAVES = Pauses(plural="saves", interval=25, at_end="if not due")
_EVALUATIONS = Pauses(plural="evaluations", interval=10, begins_at=30, at_end="always")
_SCALE = Scale(num_devices=1, tokens_per_sample=16, flops_per_sample=1)


def _of_100(**pauses: Pauses) -> TimeLeft:
    return TimeLeft(iteration=0, consumed_samples=0, last_iteration=100, last_samples=800, pauses=pauses)


def test_one_slow_interval_does_not_move_the_estimate() -> None:
    """The first one, with compilation, or one in which a host hung."""
    left = _of_100()
    assert left.seconds() is None and left.sentence() == "0.0 % done"
    for iteration, seconds in ((10, 500.0), (20, 20.0), (30, 21.0), (40, 20.0), (50, 900.0)):
        left.add_interval(iteration, 8 * iteration, seconds)
    assert left.seconds() == pytest.approx(50 * 2.1) and left.fraction_done == 0.5


def test_a_lasting_change_of_the_rate_is_followed() -> None:
    left = TimeLeft(iteration=0, consumed_samples=0, last_iteration=1000, last_samples=1000, pauses={})
    for number in range(1, 41):
        left.add_interval(10 * number, 10 * number, 10.0 if number <= 25 else 30.0)
    assert left.seconds() == pytest.approx(600 * 3.0)


def test_a_batch_that_grows_is_foreseen() -> None:
    """100 iterations of 2 samples, then 100 of 6: after a quarter of the samples half of the iterations are done."""
    left = TimeLeft(iteration=0, consumed_samples=0, last_iteration=200, last_samples=800, pauses={})
    left.add_interval(100, 200, 50.0)
    assert left.seconds() == pytest.approx(150.0) and left.fraction_done == 0.25


def test_saves_and_evaluations_that_are_due_are_counted() -> None:
    """After iteration 50: saves at 75 and 100, evaluations at 60, 70, 80, 90, 100, and the last one after training."""
    left = _of_100(save=_SAVES, evaluation=_EVALUATIONS)
    left.add_interval(50, 400, 50.0)
    for seconds in (60.0, 3.0, 4.0):
        left.add_pause("save", seconds)
    left.add_pause("evaluation", 10.0)
    left.add_pause("compiling", 1000.0)
    assert left.seconds() == pytest.approx(50 + 2 * 4.0 + 6 * 10.0)


@pytest.mark.parametrize(
    ("pauses", "iteration", "number"),
    [
        (_SAVES, 0, 4),
        (_SAVES, 25, 3),
        (_SAVES, 100, 0),
        (Pauses(plural="saves", interval=30, at_end="if not due"), 0, 4),
        (Pauses(plural="saves", interval=None, at_end="if not due"), 0, 1),
        (_EVALUATIONS, 0, 9),
        (_EVALUATIONS, 30, 8),
        (Pauses(plural="checks", interval=40), 0, 2),
    ],
)
def test_pauses_that_are_due(pauses: Pauses, iteration: int, number: int) -> None:
    assert pauses.between(iteration, 100) == number


def test_the_sentence_says_when_training_ends_and_what_is_not_known_yet() -> None:
    left = TimeLeft(
        iteration=1000, consumed_samples=8000, last_iteration=10000, last_samples=80000, pauses={"save": _SAVES}
    )
    left.add_interval(1200, 9600, 200 * 1.2625)
    now = datetime(2026, 11, 23, 11, 5, tzinfo=UTC)
    unseen = "; without saves, of which none has been timed yet"
    assert left.sentence(now=now) == f"12 % done, 3 h 05 min left (ends 2026-11-23 14:10 UTC{unseen})"
    left.add_pause("save", 0.0)
    assert left.sentence(now=now) == "12 % done, 3 h 05 min left (ends 2026-11-23 14:10 UTC)"
    left.add_interval(10000, 80000, 1.0)
    assert left.sentence(now=now) == "100 % done"


def test_durations_and_shares_are_rounded_for_people() -> None:
    assert [format_duration(seconds) for seconds in (0.4, 59.6, 61, 3599.7, 11100, 47.9 * 3600, 200000)] == [
        "0 s",
        "1 min 00 s",
        "1 min 01 s",
        "1 h 00 min",
        "3 h 05 min",
        "47 h 54 min",
        "2 d 8 h",
    ]
    assert [format_percent(share) for share in (0.0042, 0.129, 0.9999, 1.0)] == ["0.4 %", "12 %", "99 %", "100 %"]


def test_lines_are_printed_once_in_their_interval(capsys: pytest.CaptureFixture[str]) -> None:
    """After log lines; the line of the first iteration counts with the next one. Pauses are timed between steps."""
    now = [0.0]
    watch = RunWatch(WatchConfig(time_left_interval_s=60), _of_100(save=_SAVES), scale=_SCALE, clock=lambda: now[0])
    for iteration in (1, 10, 20, 30, 40, 50):
        now[0] += 20.0
        watch.add_line(record(iteration, is_due=iteration > 1))
        watch.pause("save")
        now[0] += 1.0
        watch.resume()
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in printed] == [" 20 % done, 2 min 44 s left", " 50 % done, 1 min 42 s left"]
    quiet = RunWatch(WatchConfig(time_left_interval_s=0), _of_100(), scale=_SCALE, clock=lambda: now[0])
    now[0] += 1e6
    quiet.add_line(record(10))
    assert capsys.readouterr().out == ""


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ValueError, match="--time-left-interval must be 0"):
        WatchConfig(time_left_interval_s=-1)
