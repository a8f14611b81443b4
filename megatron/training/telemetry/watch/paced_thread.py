"""A thread that writes what changes, at a pace that leaves the time to training."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable

_SHARE = 1e-3
"""Part of the time that the thread may compute, since it takes it from training."""

_LAST_S = 10.0
"""Seconds that the end of training waits for the last writing: a folder on a network may not answer."""


class PacedThread:
    """A thread that applies changes and then writes, so that a slow or broken disk stops nobody.

    Args:
        write: is given the seconds that will pass at least until it is called again; what it raises is told once on stderr.
        interval_s: the least of these seconds.

    Ranks: any, each alone.
    """

    def __init__(self, write: Callable[[float], None], *, interval_s: float) -> None:
        self._write, self._interval_s, self.pace_s = write, interval_s, interval_s
        self._changes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def post(self, change: Callable[[], None]) -> None:
        """Apply a change in the thread, and write soon. Does not block."""
        self._changes.put(change)

    def close(self) -> None:
        """Write what is left, and end the thread; waits a few seconds at most."""
        self._ending.set()
        self._changes.put(None)
        self._thread.join(timeout=_LAST_S)

    def _run(self) -> None:
        ends, next_s = False, 0.0
        while not ends:
            ends = self._apply(self._changes.get())
            self._ending.wait(max(0.0, next_s - time.monotonic()))
            while not self._changes.empty():
                ends = self._apply(self._changes.get()) or ends
            began = time.thread_time()
            self._try(lambda: self._write(self.pace_s))
            self.pace_s = max(self._interval_s, (time.thread_time() - began) / _SHARE)
            next_s = time.monotonic() + self.pace_s

    def _apply(self, change: Callable[[], None] | None) -> bool:
        if change is not None:
            self._try(change)
        return change is None

    def _try(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            if not self._has_failed:
                print(
                    f" what shows how the run goes could not be written, and training goes on without it until it can "
                    f"be: {type(error).__name__}: {error}",
                    file=sys.stderr,
                    flush=True,
                )
            self._has_failed = True
