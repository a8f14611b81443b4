"""The time between moments of training: of the host, or, where steps run after their launch, of the device."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class StepClock(Protocol):
    """Takes moments, and tells what lies between two of them."""

    def now(self) -> Any:
        """This moment: when the work that was issued until now is done. Does not wait."""

    def seconds(self, begin: Any, end: Any) -> float:
        """From one moment to a later one; waits for that to come."""


class HostClock:
    """Work is done when its call returns."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class DeviceClock:
    """Moments are events on the current stream: the host, which runs ahead, would see steps end when it has launched others."""

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def make_step_clock(device: torch.device) -> StepClock:
    """The clock of steps on ``device``."""
    return DeviceClock() if device.type == "cuda" else HostClock()
