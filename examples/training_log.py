"""Parser of the log of ``pretrain_gpt.py`` (or Megatron-LM)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_ITERATION = re.compile(
    r"iteration +(?P<iteration>\d+)/ *(?P<last>\d+) \|.*elapsed time per iteration \(ms\): (?P<ms>\S+) "
    r".*lm loss: (?P<loss>\S+) "
)
_RATE = re.compile(r"tokens per second per GPU \(tokens/s/GPU\): (\S+)")
_VALIDATION = re.compile(
    r"validation loss at iteration (?P<iteration>\d+)(?P<where>.*?) \| lm loss value: (?P<loss>\S+) "
)


@dataclass(frozen=True, kw_only=True)
class IterationLine:
    """The log line of one or more iterations."""

    iteration: int
    last_iteration: int
    loss: float
    """Nats per token."""
    ms_per_iteration: float
    tokens_per_second_per_device: float | None
    """None: the log does not have it (``--log-throughput``)."""

    @property
    def seconds_left(self) -> float:
        """Seconds until the last iteration, at the current speed."""
        return (self.last_iteration - self.iteration) * self.ms_per_iteration / 1000.0


@dataclass(frozen=True, kw_only=True)
class ValidationLine:
    """The log line of an evaluation on held-out data."""

    iteration: int
    loss: float
    """Nats per token."""


def parse_line(line: str) -> IterationLine | ValidationLine | None:
    """Parse a line of the log; return None for other lines, such as an evaluation on test data."""
    if found := _ITERATION.search(line):
        rate = _RATE.search(line)
        return IterationLine(
            iteration=int(found["iteration"]),
            last_iteration=int(found["last"]),
            loss=float(found["loss"]),
            ms_per_iteration=float(found["ms"]),
            tokens_per_second_per_device=float(rate[1]) if rate else None,
        )
    found = _VALIDATION.search(line)
    if found and "test set" not in found["where"]:
        return ValidationLine(iteration=int(found["iteration"]), loss=float(found["loss"]))
    return None


@dataclass
class LossCurves:
    """Losses by iteration; of iterations that were trained twice (after a resume), the later loss."""

    train: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)


def read_losses(lines: Iterable[str]) -> LossCurves:
    """Read the losses from a log, which may have several runs one after the other."""
    curves = LossCurves()
    for line in lines:
        parsed = parse_line(line)
        if isinstance(parsed, IterationLine):
            curves.train[parsed.iteration] = parsed.loss
        elif isinstance(parsed, ValidationLine):
            curves.validation[parsed.iteration] = parsed.loss
    return curves
