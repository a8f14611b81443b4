"""Clocks of training steps: the host's, or the device's where steps run after their launch."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class StepClock(Protocol):
    """A clock that measures the time between two of its marks."""

    def now(self) -> Any:
        """Return a mark of the time when all work launched so far is done. Does not wait."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds between two marks; waits for the later one."""


class HostClock:
    """The host's clock, for devices where work is done when its call returns."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class DeviceClock:
    """A clock of events on the current stream, since the host runs ahead of the device."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def make_step_clock(device: torch.device) -> StepClock:
    """Return the clock of steps on ``device``."""
    return DeviceClock() if device.type == "cuda" else HostClock()
