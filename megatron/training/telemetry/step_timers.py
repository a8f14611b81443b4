"""Times of the parts of steps, on all ranks, in the format of Megatron-LM's logs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.training.telemetry.step_clock import StepClock

LEVELS = {
    "forward-backward": 1,
    "optimizer": 1,
    "batch-generator": 2,
    "forward-compute": 2,
    "backward-compute": 2,
}
"""Parts of a step with the ``--timing-log-level`` from which on they are timed, in the order of Megatron-LM's logs."""

Spans = Mapping[str, Sequence[tuple[Any, Any]]]
"""For each part the marks of the clock at its begins and ends."""


class StepTimers:
    """Times parts of steps by marks of a clock, which no part waits for.

    Args:
        level: parts of a higher level are not timed.
        clock: the clock of steps, on CUDA that of the device.
    """

    def __init__(self, level: int, clock: StepClock) -> None:
        self._names = [name for name, of_name in LEVELS.items() if of_name <= level]
        self._clock = clock
        self._begun: dict[str, Any] = {}
        self._spans: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def start(self, name: str) -> None:
        """Begin a part. Does not wait."""
        if name in self._names:
            self._begun[name] = self._clock.now()

    def stop(self, name: str) -> None:
        """End a part that has begun. Does not wait."""
        if name in self._names:
            self._spans[name].append((self._begun.pop(name), self._clock.now()))

    def spans(self, *, resets: bool) -> Spans:
        """Return the marks since the last reset."""
        spans = {name: list(self._spans[name]) for name in self._names if self._spans[name]}
        if resets:
            self._spans.clear()
        return spans

    def seconds(self, spans: Spans) -> dict[str, float]:
        """Return the seconds of each part; waits for its last mark."""
        return {name: sum(self._clock.seconds(*span) for span in of_name) for name, of_name in spans.items()}


def of_all_ranks(seconds: Mapping[str, float], device: torch.device) -> dict[str, list[float]]:
    """Gather times: for each name the milliseconds of every rank. Ranks: all, with the same names; blocks."""
    of_ranks = torch.zeros(len(seconds), dist.get_world_size(), dtype=torch.float64)
    of_ranks[:, dist.get_rank()] = torch.tensor(list(seconds.values()), dtype=torch.float64)
    of_ranks = of_ranks.to(device)
    dist.all_reduce(of_ranks)
    return {name: [1000.0 * value for value in row] for name, row in zip(seconds, of_ranks.tolist(), strict=True)}


def format_timers(milliseconds: Mapping[str, Sequence[float]], option: str) -> str:
    """Format the times of parts on all ranks as Megatron-LM does.

    Args:
        option: what is shown of the ranks: "max", "minmax" or "all".
    """
    if option == "all":
        lines = ["times across ranks (ms):"]
        for name, of_ranks in milliseconds.items():
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {value:.2f}" for rank, value in enumerate(of_ranks)]
        return "\n".join(lines)
    lines = ["max time across ranks (ms):" if option == "max" else "(min, max) time across ranks (ms):"]
    for name, of_ranks in milliseconds.items():
        shown = f"{max(of_ranks):.2f}" if option == "max" else f"({min(of_ranks):.2f}, {max(of_ranks):.2f})"
        lines.append(f"    {(name + ' ').ljust(48, '.')}: {shown}")
    return "\n".join(lines)
