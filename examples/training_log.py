"""Reads the log that ``pretrain_gpt.py`` (or Megatron-LM) prints."""

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
    """The log line of some iterations."""

    iteration: int
    last_iteration: int
    loss: float
    """Nats per token."""
    ms_per_iteration: float
    tokens_per_second_per_device: float | None
    """None: the log does not say (``--log-throughput``)."""

    @property
    def seconds_left(self) -> float:
        """Until the last iteration, at this pace."""
        return (self.last_iteration - self.iteration) * self.ms_per_iteration / 1000.0


@dataclass(frozen=True, kw_only=True)
class ValidationLine:
    """The log line of an evaluation on held-out data."""

    iteration: int
    loss: float
    """Nats per token."""


def parse_line(line: str) -> IterationLine | ValidationLine | None:
    """What a line of the log says; None for lines of other kinds, an evaluation on test data among them."""
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
    """Losses by iteration. Where iterations were trained twice (a run was killed and resumed), the later one counts."""

    train: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)


def read_losses(lines: Iterable[str]) -> LossCurves:
    """The losses in a log, which may hold several runs one after the other."""
    curves = LossCurves()
    for line in lines:
        parsed = parse_line(line)
        if isinstance(parsed, IterationLine):
            curves.train[parsed.iteration] = parsed.loss
        elif isinstance(parsed, ValidationLine):
            curves.validation[parsed.iteration] = parsed.loss
    return curves
