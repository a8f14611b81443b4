"""Timers of phases by name, under Megatron-Core's names; the training loop of this framework has timers of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

MAX_LOG_LEVEL = 2
_OPTIONS = ("max", "minmax", "all")


class Timer:
    """The time of one phase, from ``start`` to ``stop``, summed; each makes the host wait for the device."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._elapsed = self._active_time = self._began = 0.0
        self._is_started = False
        self._group: dist.ProcessGroup | None = None

    def set_barrier_group(self, barrier_group: dist.ProcessGroup | None) -> None:
        """Let barriers be of these ranks; None: of all."""
        self._group = barrier_group

    def start(self, barrier: bool = False) -> None:
        """Begin.

        Raises:
            AssertionError: it has begun already.

        Ranks: each on its own; with ``barrier`` all, which wait for each other.
        """
        if self._is_started:
            raise AssertionError(f"the timer {self.name} must be stopped before it is started again")
        self._began, self._is_started = self._now(barrier), True

    def stop(self, barrier: bool = False) -> None:
        """End; ranks as for ``start``.

        Raises:
            AssertionError: it has not begun.
        """
        if not self._is_started:
            raise AssertionError(f"the timer {self.name} must be started before it is stopped")
        lasted = self._now(barrier) - self._began
        self._elapsed, self._active_time, self._is_started = self._elapsed + lasted, self._active_time + lasted, False

    def _now(self, barrier: bool) -> float:
        if barrier and dist.is_initialized():
            dist.barrier(group=self._group)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def reset(self) -> None:
        """Forget what was measured."""
        self._elapsed, self._is_started = 0.0, False

    def set_elapsed(self, value: float) -> None:
        """Set the seconds that were measured."""
        self._elapsed = value

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Return the seconds since the last reset; a timer that runs goes on."""
        is_started = self._is_started
        if is_started:
            self.stop(barrier)
        elapsed = self._elapsed
        if reset:
            self.reset()
        if is_started:
            self.start(barrier)
        return elapsed

    def active_time(self) -> float:
        """Return all seconds that were measured, resets or not."""
        return self._active_time


class DummyTimer(Timer):
    """A timer above the log level: it measures nothing."""

    def __init__(self) -> None:
        super().__init__("of a higher log level")

    def start(self, barrier: bool = False) -> None:
        """Do nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Do nothing."""

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Raise RuntimeError: nothing was measured."""
        raise RuntimeError("a timer must be of the log level to be read, got one above it, which measures nothing")

    active_time = elapsed


class Timers:
    """Timers by name.

    Args:
        log_level: from 0 to 2; timers of higher levels measure nothing.
        log_option: what ``log`` writes: the largest time of all ranks ("max"), the smallest too ("minmax"), or each ("all").

    Raises:
        ValueError: ``log_option`` is another.
    """

    def __init__(self, log_level: int = 0, log_option: str = "minmax") -> None:
        if log_option not in _OPTIONS:
            raise ValueError(f"log_option must be one of {', '.join(_OPTIONS)}, got {log_option!r}")
        self._log_level, self._log_option = log_level, log_option
        self._timers: dict[str, Timer] = {}
        self._levels: dict[str, int] = {}
        self._dummy = DummyTimer()

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Return the timer of a name; the first call makes it, at the highest level if none is given.

        Raises:
            ValueError: the level is above 2, or another than the timer's.
        """
        if name in self._timers:
            if log_level not in (None, self._levels[name]):
                raise ValueError(f"the timer {name} must have its level {self._levels[name]}, got {log_level}")
            return self._timers[name]
        level = MAX_LOG_LEVEL if log_level is None else log_level
        if level > MAX_LOG_LEVEL:
            raise ValueError(f"log_level must be at most {MAX_LOG_LEVEL}, got {level}")
        if level > self._log_level:
            return self._dummy
        self._levels[name] = level
        return self._timers.setdefault(name, Timer(name))

    def get_all_timers_string(
        self,
        names: Sequence[str] | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> str | None:
        """Return the times in milliseconds, each divided by ``normalizer``; None where nothing was measured. Ranks: all."""
        times = self._of_all_ranks(list(self._timers) if names is None else names, reset, barrier)
        lines = [self._line(name, [1000.0 * one / normalizer for one in found]) for name, found in times.items()]
        kind = {"max": "max time across ranks (ms)", "minmax": "(min, max) time across ranks (ms)"}
        return "\n".join([f"{kind.get(self._log_option, 'times across ranks (ms)')}:", *lines]) if lines else None

    def _line(self, name: str, times: Sequence[float]) -> str:
        label = f"    {(name + ' ').ljust(48, '.')}"
        if self._log_option == "all":
            ranks = "".join(
                f"\n     rank {rank:2d}: {time_ms:.2f}" for rank, time_ms in enumerate(times) if time_ms > 0
            )
            return f"  {name}:{ranks}"
        measured = [one for one in times if one > 0]
        if self._log_option == "max":
            return f"{label}: {max(measured):.2f}"
        return f"{label}: ({min(measured):.2f}, {max(measured):.2f})"

    def _of_all_ranks(self, names: Sequence[str], reset: bool, barrier: bool) -> dict[str, list[float]]:
        own = [self._timers[name].elapsed(reset, barrier) if name in self._timers else 0.0 for name in names]
        found: list[list[float]] = [own]
        if dist.is_initialized():
            found = [[]] * dist.get_world_size()
            dist.all_gather_object(found, own)
        by_name = {name: [times[index] for times in found] for index, name in enumerate(names)}
        return {name: times for name, times in by_name.items() if any(time_s > 0 for time_s in times)}

    def log(
        self,
        names: Sequence[str] | None = None,
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Print the times on one rank; None: the last. Ranks: all."""
        text = self.get_all_timers_string(names, normalizer, reset, barrier)
        count, own = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if text is not None and own == (count - 1 if rank is None else rank):
            print(text, flush=True)

    def write(
        self,
        names: Sequence[str],
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Write the largest times, in seconds, to a TensorBoard or wandb writer, or to none. Ranks: all."""
        for name, times in self._of_all_ranks(names, reset, barrier).items():
            if writer is None:
                continue
            value = max(times) / normalizer
            if hasattr(writer, "add_scalar"):
                writer.add_scalar(f"{name}-time", value, iteration)
            else:
                writer.log({f"{name}-time": value}, iteration)
