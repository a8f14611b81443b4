"""Garbage collection at the same iterations on all ranks, so that no rank waits for another's collection."""

from __future__ import annotations

import gc
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GarbageConfig:
    """Settings of Python's garbage collection."""

    manual: bool = False
    """Switch Python's automatic collection off."""

    interval: int = 0
    """Iterations between collections; 0: none."""

    at_evaluation: bool = True
    """Collect before and after an evaluation."""

    def __post_init__(self) -> None:
        if self.interval < 0:
            raise ValueError(f"--manual-gc-interval must not be negative, got {self.interval}")
        if self.interval and not self.manual:
            raise ValueError(f"--manual-gc-interval {self.interval} needs --manual-gc")


class GarbageCollector:
    """The garbage collection of a run, as configured; ``close`` switches Python's automatic collection on again."""

    def __init__(self, config: GarbageConfig) -> None:
        self.config = config
        self._was_enabled = gc.isenabled()
        if config.manual:
            gc.disable()
            gc.collect()

    def after_step(self, iteration: int) -> None:
        if self.config.manual and self.config.interval and iteration % self.config.interval == 0:
            gc.collect()

    def around_evaluation(self) -> None:
        if self.config.manual and self.config.at_evaluation:
            gc.collect()

    def close(self) -> None:
        if self.config.manual and self._was_enabled:
            gc.enable()
