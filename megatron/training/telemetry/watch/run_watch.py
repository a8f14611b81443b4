"""What rank 0 tells of a run while it runs, beside the log lines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron.training.telemetry.log_line import LogRecord
from megatron.training.telemetry.watch.time_left import TimeLeft


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Settings of what shows how a run goes."""

    time_left_interval_s: float = 60.0
    """Seconds between lines with the time that is left; 0: there are none. They follow log lines."""

    def __post_init__(self) -> None:
        if not self.time_left_interval_s >= 0:
            raise ValueError(
                f"--time-left-interval must be 0 (no lines) or more seconds, got {self.time_left_interval_s}"
            )


class RunWatch:
    """Follows a run, and prints the time that is left.

    Args:
        time_left: at the point where training starts.
        clock: in seconds.

    Ranks: 0.
    """

    def __init__(
        self, config: WatchConfig, time_left: TimeLeft, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config, self.time_left, self._clock = config, time_left, clock
        self._next_line_s = clock() + config.time_left_interval_s
        self._pause: tuple[str, float] | None = None

    def add_line(self, record: LogRecord) -> None:
        """Take the values of a log line."""
        if not record.is_due:
            return  # the next line counts these iterations too
        steps = record.iteration - self.time_left.iteration
        seconds = steps * record.ms_per_iteration / 1000.0
        self.time_left.add_interval(record.iteration, record.consumed_samples, seconds)
        self._print_time_left()

    def _print_time_left(self) -> None:
        interval, now = self.config.time_left_interval_s, self._clock()
        if interval and now >= self._next_line_s and self.time_left.fraction_done < 1:
            self._next_line_s = now + interval
            print(f" {self.time_left.sentence()}", flush=True)

    def pause(self, what: str) -> None:
        """Note that no steps run from now on, and what does; it ends a pause before."""
        self.resume()
        self._pause = (what, self._clock())

    def resume(self) -> None:
        """Note that steps run from now on."""
        if self._pause is not None:
            what, began = self._pause
            self.time_left.add_pause(what, self._clock() - began)
            self._pause = None
