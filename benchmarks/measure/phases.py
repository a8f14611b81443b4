"""Time the host in a step's phases (forward, backward, the rest), without a profiler."""

from __future__ import annotations

import time
from collections import defaultdict

from benchmarks.engines.engine import Batch, Engine


def time_phases(engine: Engine, batch: Batch) -> dict[str, float]:
    """Run one step and return the host's milliseconds in each phase that the engine marks, in order. Ranks: all.

    The caller must have waited for the device, so that no phase waits for earlier work.
    """
    taken: dict[str, float] = defaultdict(float)
    last = time.perf_counter()

    def mark(phase: str) -> None:
        nonlocal last
        now = time.perf_counter()
        taken[phase] += (now - last) * 1e3
        last = now

    engine.mark = mark
    try:
        engine.step(batch)
    finally:
        del engine.mark
    return dict(taken)
