"""Megatron-Core's timer of parts of a step, which tells the slowest and the fastest rank of an interval."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from megatron.core._rank_utils import log_single_rank

logger = logging.getLogger(__name__)


class _Span:
    """The time between making it and ``stop``, of the host and of what runs in the current CUDA stream."""

    def __init__(self) -> None:
        self._start, self._end = time.perf_counter(), 0.0
        self._events = [self._record()] if torch.cuda.is_available() else []

    @staticmethod
    def _record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def stop(self) -> None:
        self._end = time.perf_counter()
        if self._events:
            self._events.append(self._record())

    def milliseconds(self) -> float:
        """Return the longer of the two times; on CUDA blocks the host until the stream came that far."""
        of_host = 1e3 * (self._end - self._start)
        if not self._events:
            return of_host
        self._events[1].synchronize()
        return max(of_host, float(self._events[0].elapsed_time(self._events[1])))


class StragglerDetector:
    """A timer of the parts of a step; all calls of the class return the one of the process.

    ``with detector:`` times a computation, and ``with detector(bdata=True):`` the wait for a batch. Both do nothing until
    ``configure(..., enabled=True)``. ``report`` logs on rank 0 which ranks were slowest and fastest since the last report.

    Source: Megatron-Core's class of this name; nothing here listens on a port, and temperatures and clocks are not read.
    """

    _of_process: ClassVar[StragglerDetector | None] = None

    configured: bool
    enabled: bool
    world_size: int
    my_rank: int

    def __new__(cls) -> StragglerDetector:
        if cls._of_process is None:
            found = cls._of_process = super().__new__(cls)
            found.configured = found.enabled = False
            found.world_size, found.my_rank = 0, 0
            found._num_shown, found._passes = 1, 3.0
            found._is_batch = False
            found._running = []
            found.reset()
        return cls._of_process

    _num_shown: int
    _passes: float
    _is_batch: bool
    _running: list[_Span]
    _spans: list[_Span]
    _batches: list[_Span]

    def configure(
        self,
        world: int,
        rank: int,
        mmcnt: int = 1,
        amp: float = 3.0,
        port: int = 65535,
        prefill: int = 1024,
        enabled: bool = False,
    ) -> None:
        """Say which ranks there are and whether they are timed; later calls do nothing.

        Args:
            mmcnt: how many of the slowest and of the fastest ranks are named, by operations per second.
            amp: operations of a step for each one of what is timed: 3 where only forward is.
            port: must be the default: nothing listens to switch the timer on and off.
            prefill: accepted: events are made when they are needed.

        Raises:
            NotImplementedError: another ``port``.
        """
        if port != 65535:
            raise NotImplementedError(
                f"port must be left out, got {port}: nothing listens; call configure with enabled=True or False"
            )
        if not self.configured:
            self.configured, self.enabled = True, enabled
            self.world_size, self.my_rank, self._num_shown, self._passes = world, rank, max(1, mmcnt), amp

    def reset(self) -> None:
        """Forget what was timed."""
        self._spans, self._batches = [], []

    def start(self) -> None:
        """Begin a part."""
        if self.enabled:
            self._running.append(_Span())
            (self._batches if self._is_batch else self._spans).append(self._running[-1])
        self._is_batch = False

    def stop(self) -> None:
        """End the part that began last."""
        if self._running:
            self._running.pop().stop()

    def __call__(self, bdata: bool = False) -> StragglerDetector:
        """Return this timer, whose next part is a wait for a batch with ``bdata``."""
        self._is_batch = bdata
        return self

    def __enter__(self) -> StragglerDetector:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()

    def elapsed(self) -> tuple[float, float, int, int, int, int]:
        """Return (time of all parts, longest wait for a batch, 0, 0, 0, 0) in milliseconds, and forget them."""
        spans = sum(span.milliseconds() for span in self._spans)
        batches = max((span.milliseconds() for span in self._batches), default=0.0)
        self.reset()
        return spans, batches, 0, 0, 0, 0

    def report(self, total_flops: float = 0.0, log_interval: int = 0) -> bool:
        """Log on rank 0 the slowest and the fastest ranks of ``log_interval`` steps; return whether it logged.

        Args:
            total_flops: operations of all ranks in these steps.

        Ranks: all; blocks the host.
        """
        if not self.enabled or total_flops <= 0 or log_interval <= 0:
            return False
        elapsed, batch, *_ = self.elapsed()
        per_step = elapsed / log_interval
        rate = total_flops / log_interval / (max(per_step, 1e-9) * 1e9 * self.world_size) / self._passes
        own = (per_step, batch, rate)
        all_ranks: list[Any] = [own] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(all_ranks, own)
        for line in _lines(all_ranks, self._num_shown):
            log_single_rank(logger, logging.INFO, line)
        return self.my_rank == 0


def _lines(all_ranks: list[tuple[float, float, float]], num_shown: int) -> list[str]:
    """Return the lines of a report of [rank] (milliseconds, longest wait for a batch, TFLOP/s), with Megatron-Core's words."""

    def ends(column: int, name: str, unit: str) -> str:
        order = sorted(range(len(all_ranks)), key=lambda rank: all_ranks[rank][column])
        shown: Callable[[int], str] = lambda rank: f"{all_ranks[rank][column]:.2f}{unit}/{rank}"  # noqa: E731
        return f"Mn{name}/Rnk: {shown(order[0])} | Mx{name}/Rnk: {shown(order[-1])}"

    lines = [" | ".join((ends(0, "Rtt", "ms"), ends(1, "DRtt", "ms"), ends(2, "Etpt", "TF")))]
    if 1 < num_shown < len(all_ranks):
        rates = sorted((row[2], rank) for rank, row in enumerate(all_ranks))
        for which, chosen in (("lowest", rates[:num_shown]), ("highest", rates[-num_shown:])):
            lines.append(f"{num_shown} ranks with {which} Etpt: " + ", ".join(f"{r:.2f}TF/{k}" for r, k in chosen))
    return lines
