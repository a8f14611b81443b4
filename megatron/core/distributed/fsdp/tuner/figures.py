"""What was measured of one choice of settings, and whether two of them differ by more than noise."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Settings = Mapping[str, Any]
"""Settings by name, with values that JSON has; what a candidate leaves out is as the caller had it."""

_CLEAR_GAIN = 0.01
"""A faster candidate must save this share of a step, whatever the noise: less is not worth another setting."""

_FEWEST_ROUNDS = 2

_MAD_TO_DEVIATION = 1.4826  # of normally distributed times
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One measurement of a candidate: as one rank saw it, or the slowest and fullest of all ranks."""

    seconds: tuple[float, ...]
    """[S] of each step."""

    peak_nbytes: int
    """The most memory, from the construction of the model on; 0 where it is not counted."""

    spare_nbytes: int
    """What the device had left then."""

    total_nbytes: int
    """What it has."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the caller reports of the model."""

    @property
    def median(self) -> float:
        """The median step, in seconds."""
        return statistics.median(self.seconds)

    @property
    def scatter(self) -> float:
        """How far the median may be off by the scatter of the steps, in seconds."""
        deviation = _MAD_TO_DEVIATION * statistics.median(abs(time - self.median) for time in self.seconds)
        return deviation / len(self.seconds) ** 0.5

    @classmethod
    def of_ranks(cls, visits: Sequence[Visit]) -> Visit:
        """Return the slowest rank's time of each step, the fullest rank's memory, and the first rank's facts."""
        return cls(
            seconds=tuple(map(max, zip(*(visit.seconds for visit in visits), strict=True))),
            peak_nbytes=max(visit.peak_nbytes for visit in visits),
            spare_nbytes=min(visit.spare_nbytes for visit in visits),
            total_nbytes=min(visit.total_nbytes for visit in visits),
            facts=visits[0].facts,
        )


@dataclass(kw_only=True, eq=False)
class Measured:
    """A candidate with its measurements; without any if it was lost, or not measured at all."""

    name: str
    """What it changes, in words."""

    settings: dict[str, Any]
    """All that it changes, with what was chosen before."""

    visits: list[Visit] = field(default_factory=list)
    fate: str = ""
    """Why it was lost, refused or left out; empty if it was measured."""

    @property
    def is_measured(self) -> bool:
        """Whether there is a measurement, and none was lost since."""
        return bool(self.visits) and not self.fate

    @property
    def _recent(self) -> list[Visit]:
        """The visits that count: a first one may find caches and clocks cold, and machines drift."""
        return self.visits[-2:]

    @property
    def seconds(self) -> float:
        """A step: the mean of the medians of the visits that count."""
        return statistics.mean(visit.median for visit in self._recent)

    @property
    def noise(self) -> float:
        """How far that may be off, in seconds: by the scatter of steps, or by that of visits if it is more."""
        medians = [visit.median for visit in self._recent]
        return max(*(visit.scatter for visit in self._recent), (max(medians) - min(medians)) / 2)

    @property
    def last(self) -> Visit:
        """The latest visit."""
        return self.visits[-1]

    @property
    def peak_nbytes(self) -> int:
        """The most memory of any visit."""
        return max(visit.peak_nbytes for visit in self.visits)

    @property
    def spare_nbytes(self) -> int:
        """The least that the device had left in any visit."""
        return min(visit.spare_nbytes for visit in self.visits)

    def text(self) -> str:
        """Format time, noise and memory."""
        if self.fate:
            return self.fate
        memory = f", {self.peak_nbytes / _GIB:.2f} GiB" if self.peak_nbytes else ""
        return (
            f"{self.seconds * 1e3:.2f} ms a step (noise {self.noise * 1e3:.2f}, {len(self.visits)} x "
            f"{len(self.last.seconds)} steps){memory}, {self.spare_nbytes / _GIB:.2f} GiB left"
        )


@dataclass(kw_only=True)
class Comparison:
    """What a candidate gains over what stands, in rounds: in each of them both were measured, one right after the other."""

    gains: list[float] = field(default_factory=list)
    """[R] share of a step that it saves."""

    scatters: list[float] = field(default_factory=list)
    """[R] what the scatter of steps makes uncertain in that."""

    def add(self, standing: Visit, candidate: Visit) -> None:
        """Add a round."""
        self.gains.append(1 - candidate.median / standing.median)
        self.scatters.append((candidate.scatter + standing.scatter) / standing.median)

    @property
    def gain(self) -> float:
        """The share of a step that it saves, on the mean over the rounds."""
        return statistics.mean(self.gains) if self.gains else 0.0

    @property
    def noise(self) -> float:
        """How far the gain may be off: by the scatter of steps, or by the difference between rounds if it is more."""
        return max(statistics.mean(self.scatters), (max(self.gains) - min(self.gains)) / 2)

    @property
    def may_gain(self) -> bool:
        """Return whether it gains enough to matter, noise aside."""
        return self.gain > _CLEAR_GAIN

    @property
    def is_clear(self) -> bool:
        """Return whether it gains in each of several rounds, more than the noise, and enough to matter."""
        return len(self.gains) >= _FEWEST_ROUNDS and self.may_gain and self.gain > self.noise and min(self.gains) > 0
