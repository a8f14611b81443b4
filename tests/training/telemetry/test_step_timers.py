"""Times of parts of steps, as Megatron-LM's logs have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.training.telemetry.step_timers import LEVELS, StepTimers, format_timers, of_all_ranks
from tests.support.launch import run_ranks


class _Counter:
    """A clock that goes on by one second at each look."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 1.0
        return self.time

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


@pytest.mark.parametrize(("level", "names"), [(1, 2), (2, 5)])
def test_parts_of_the_level_are_timed(level: int, names: int) -> None:
    timers = StepTimers(level, _Counter())
    for name in (*LEVELS, *LEVELS):
        timers.start(name)
        timers.stop(name)
    spans = timers.spans(resets=False)
    assert timers.seconds(spans) == dict.fromkeys(list(LEVELS)[:names], 2.0)
    assert timers.spans(resets=True) == spans and timers.spans(resets=True) == {}


def test_lines_are_those_of_megatron_lm() -> None:
    times = {"forward-backward": [1.0, 2.5], "optimizer": [3.0, 0.25]}
    assert format_timers(times, "minmax").splitlines() == [
        "(min, max) time across ranks (ms):",
        "    forward-backward ...............................: (1.00, 2.50)",
        "    optimizer ......................................: (0.25, 3.00)",
    ]
    assert format_timers(times, "max").splitlines()[:2] == [
        "max time across ranks (ms):",
        "    forward-backward ...............................: 2.50",
    ]
    assert format_timers(times, "all").splitlines()[:3] == [
        "times across ranks (ms):",
        "  forward-backward:",
        "     rank  0: 1.00",
    ]


def _gather() -> Any:
    rank = torch.distributed.get_rank()
    return of_all_ranks({"a": 1.0 + rank, "b": 3.0}, torch.device("cpu"))


def test_times_of_all_ranks_in_milliseconds() -> None:
    assert run_ranks(2, _gather) == [{"a": [1000.0, 2000.0], "b": [3000.0, 3000.0]}] * 2
