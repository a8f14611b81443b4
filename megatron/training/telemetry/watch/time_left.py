"""The time that training still takes, from medians of what it took lately."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from statistics import median

_NUM_INTERVALS = 20
"""Log intervals whose median is the rate: one slow interval does not move it, a lasting change does within ten."""

_NUM_PAUSES = 5


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """When training pauses for one kind of work, such as saves."""

    plural: str
    """Its name in a sentence."""

    interval: int | None
    """Iterations between pauses; None: there is none before the end."""

    begins_at: int = 0
    """Iteration before which there is none."""

    at_end: str = "none"
    """One more at the end of training: "none", "if not due" there anyhow, or "always"."""

    def between(self, iteration: int, last: int) -> int:
        """Count those after ``iteration`` up to ``last`` and at the end of training. Pure."""
        due = 0
        if self.interval:
            due = last // self.interval - max(iteration, self.begins_at - 1) // self.interval
        is_due_at_end = bool(self.interval) and last % (self.interval or 1) == 0
        return max(due, 0) + (self.at_end == "always" or (self.at_end == "if not due" and not is_due_at_end))


class TimeLeft:
    """An estimate of the time until training is done: steps at their median rate, and the pauses that are still due.

    Steps are counted in samples, so that a batch that grows is foreseen.

    Args:
        iteration, consumed_samples: where training starts.
        last_iteration, last_samples: where it ends.
        pauses: kinds of pauses by name.
    """

    def __init__(
        self,
        *,
        iteration: int,
        consumed_samples: int,
        last_iteration: int,
        last_samples: int,
        pauses: Mapping[str, Pauses],
    ) -> None:
        self.iteration, self.consumed_samples, self.pauses = iteration, consumed_samples, dict(pauses)
        self.last_iteration, self.last_samples = last_iteration, last_samples
        self._seconds_per_sample: deque[float] = deque(maxlen=_NUM_INTERVALS)
        self._seconds_of_pauses = {name: deque[float](maxlen=_NUM_PAUSES) for name in pauses}

    def add_interval(self, iteration: int, consumed_samples: int, seconds: float) -> None:
        """Add the seconds that the steps since the last call took, without pauses."""
        samples = consumed_samples - self.consumed_samples
        self.iteration, self.consumed_samples = iteration, consumed_samples
        if samples > 0:
            self._seconds_per_sample.append(seconds / samples)

    def add_pause(self, name: str, seconds: float) -> None:
        """Add a pause; one of an unknown kind says nothing about those to come."""
        if name in self._seconds_of_pauses:
            self._seconds_of_pauses[name].append(seconds)

    @property
    def fraction_done(self) -> float:
        """Of all samples of the training, also those of earlier runs."""
        return min(1.0, self.consumed_samples / max(self.last_samples, 1))

    def seconds(self) -> float | None:
        """Estimate the seconds that are left; None: no interval has ended yet."""
        if not self._seconds_per_sample:
            return None
        left = median(self._seconds_per_sample) * max(self.last_samples - self.consumed_samples, 0)
        for name, seconds in self._seconds_of_pauses.items():
            if seconds:
                left += median(seconds) * self._num_left(name)
        return left

    def _num_left(self, name: str) -> int:
        return self.pauses[name].between(self.iteration, self.last_iteration)

    def sentence(self, *, now: datetime | None = None) -> str:
        """Say how much is done, and when the rest will be: ``12 % done, 3 h 05 min left (ends 2026-11-23 14:10 UTC)``."""
        done, left = f"{format_percent(self.fraction_done)} done", self.seconds()
        if left is None or self.fraction_done >= 1:
            return done
        end = (now or datetime.now(UTC)).astimezone(UTC) + timedelta(seconds=left)
        # The one at the end is no matter.
        unknown = [
            kind.plural
            for name, kind in self.pauses.items()
            if not self._seconds_of_pauses[name] and self._num_left(name) > 1
        ]
        unseen = f"; without {' and '.join(unknown)}, of which none has been timed yet" if unknown else ""
        return f"{done}, {format_duration(left)} left (ends {end:%Y-%m-%d %H:%M} UTC{unseen})"


def format_percent(fraction: float) -> str:
    """Format a share, never rounded up to all of it."""
    percent = 100.0 * fraction
    return f"{int(percent * 10) / 10:.1f} %" if percent < 10 else f"{int(percent)} %"


def format_duration(seconds: float) -> str:
    """Format seconds in the two largest units that they fill."""
    if round(seconds) < 60:
        return f"{round(seconds)} s"
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"
