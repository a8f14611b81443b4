"""Signs of life of all ranks through the store, so that after a failure the ranks that are down can be named.

A collective that fails or times out knows that a rank is missing, not which. Each rank writes a counter to the store from a
thread. A rank that was killed, stopped or disconnected no longer does; a rank that waits for it still does. The thread also
looks whether a rank has announced its failure, so that no rank waits for one that will not come.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple, TypeVar

from torch.distributed import PrefixStore, Store

T = TypeVar("T")
Progress = Callable[[], tuple[int, str]]
"""Returns how many collectives a rank has begun, and where it is, in words; from any thread."""

INTERVAL_S = 2.0
"""Seconds between two signs of a rank."""

_SILENCE = 3
"""After a failure: intervals without a sign after which a rank counts as silent."""

_WATCH = 15
"""Intervals between two checks of all ranks by rank 0 during training."""

_MAX_ACTS = 8
"""Ranks whose last act is said."""

_FAILURE, _FOLLOWED, _NOTED = "failure", "failures are followed", "failure is noted"
_GONE = "gone"


class SilentRank(NamedTuple):
    """A rank that gives no sign of life."""

    rank: int
    host: str
    told_s: float
    """When its last sign said to have been given, by its host's clock, in seconds since 1970."""

    act: str
    """Where it was then, in words."""

    @classmethod
    def of(cls, rank: int, sign: str) -> SilentRank:
        """Read its last sign."""
        _, host, _, told_s, act = sign.split(maxsplit=4)
        return cls(rank, host, float(told_s), act)


class LifeSigns:
    """The signs of life of this rank, and the check of the other ranks'.

    Args:
        store: a store that all ranks reach; separate connections to it are made.
        name: of this start; keys begin with it.
        server: words for what serves the store.
        watches: check all ranks at intervals, and report on stderr when one falls silent.
        on_failure: is called from the thread, once, with what another rank has announced.
        stall_s: seconds without progress after which this rank reports what it waits for, on stderr: a backend may end
            the process at its time-out without an exception. None: it does not.

    Ranks: all, each for itself; a thread runs until ``close``.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        name: str = "",
        server: str = "the store",
        interval_s: float = INTERVAL_S,
        watches: bool = False,
        on_failure: Callable[[str], None] | None = None,
        stall_s: float | None = None,
    ) -> None:
        self.rank, self.world_size, self.interval_s, self.server = rank, world_size, interval_s, server
        self._store = PrefixStore(f"{name}/life_signs", store.clone())  # type: ignore[attr-defined]
        self._asking = PrefixStore(f"{name}/life_signs", store.clone())  # type: ignore[attr-defined]
        self._host, self._watches, self._on_failure = socket.gethostname(), watches, on_failure
        self._stall_s, self._moved = stall_s, (0, time.monotonic())
        self._answers = True  # the store
        self._ended = threading.Event()
        self._progress: Progress = lambda: (0, "set-up")
        self._on_silence: Callable[[Sequence[SilentRank]], None] | None = None
        self._note_failure: Callable[[str], None] | None = None
        self._sign(0)
        self._thread = threading.Thread(target=self._run, name="life signs", daemon=True)
        self._thread.start()

    def silent_ranks(self) -> dict[int, str] | None:
        """Return the last sign, by rank, of the ranks without one within a few intervals; None: the store does not answer.

        Blocks for these intervals.
        """
        before = self._signs()
        if before is None or self._ended.wait(_SILENCE * self.interval_s):
            return None
        after = self._signs()
        return None if after is None else _unchanged(before, after)

    def describe(self) -> str:
        """Describe in a sentence which ranks are silent; blocks as ``silent_ranks``."""
        silent, seconds = self.silent_ranks(), _SILENCE * self.interval_s
        if silent is None:
            return (
                f"rank {self.rank} on host {self._host} could not ask which ranks are silent: {self.server} did not answer: "
                "ended, stopped, or disconnected"
            )
        if silent:
            return (
                f"no sign of life within {seconds:.0f} s from {_names(silent)}: ended, stopped, or disconnected"
                f"{_last_acts(silent)}"
            )
        return f"all ranks gave a sign of life within {seconds:.0f} s: none has ended; {self._who_is_behind()}"

    @property
    def where(self) -> str:
        """Where this rank is, in words."""
        return self._progress()[1]

    def watch_progress(self, progress: Progress) -> None:
        """Add to each sign from now on how far this rank is."""
        self._progress = progress

    def follow_silence(self, tell: Callable[[Sequence[SilentRank]], None]) -> None:
        """Tell from now on, where this rank watches, which ranks are silent, whenever others are. From the thread of the signs."""
        self._on_silence = tell

    def follow_failure(self, note: Callable[[str], None]) -> None:
        """Tell, once, what another rank announces, before this one is ended. From the thread of the signs. Ranks: one."""
        self._note_failure = note
        self._ask(lambda: self._asking.set(_FOLLOWED, ""))

    def _who_is_behind(self) -> str:
        """Describe which ranks have begun fewer collectives than others."""
        signs = self._signs() or []
        begun = [int(sign.split()[2]) for sign in signs]
        behind = {rank: sign for rank, sign in enumerate(signs) if begun[rank] < max(begun)}
        if not behind:
            return "all have begun equally many collectives, so one may hang in its computation, or the network"
        return f"not come to where the others wait: {_names(behind)}{_last_acts(behind)}"

    def announce_failure(self, text: str) -> str:
        """Tell all ranks that this one has failed; return what the first one to fail has announced."""

        def announce() -> str:
            return self._asking.compare_set(_FAILURE, "", text).decode()

        return self._ask(announce) or text

    def wait_until_noted(self, within_s: float) -> None:
        """Wait until the rank that follows failures has noted this one's: what ended first makes launchers end the others."""
        if self._note_failure is None and self._ask(lambda: self._asking.check([_FOLLOWED])):
            self._ask(lambda: self._asking.wait([_NOTED], timedelta(seconds=within_s)))

    def failure(self) -> str | None:
        """Return what the first rank to fail has announced; None: none has, or the store does not answer."""
        return self._ask(lambda: self._asking.get(_FAILURE).decode() if self._asking.check([_FAILURE]) else None)

    def leave(self, *, waits_s: float = 0.0) -> None:
        """Note that this rank ends; wait until all others have, at most so many seconds."""
        if self._note_failure is not None:  # it has its own
            self._ask(lambda: self._asking.set(_NOTED, ""))
        deadline = time.monotonic() + waits_s
        gone = self._ask(lambda: self._asking.add(_GONE, 1))
        while gone is not None and gone < self.world_size and time.monotonic() < deadline:
            time.sleep(0.05)
            gone = self._ask(lambda: self._asking.add(_GONE, 0))

    def closed(self, *, within_s: float) -> bool:
        """Return whether ``close`` has been called; wait for it so many seconds."""
        return self._ended.wait(within_s)

    def close(self) -> None:
        """Stop giving signs."""
        self._ended.set()
        self._thread.join(timeout=self.interval_s)

    def _run(self) -> None:
        count, known, seen = 0, dict[int, str](), None
        while not self._ended.wait(self.interval_s):
            count += 1
            try:
                self._sign(count)
                if self._on_failure is not None and self._store.check([_FAILURE]):
                    self._meet_failure(self._on_failure, self._store.get(_FAILURE).decode())
                    self._on_failure = None
                self._report_stall()
            except RuntimeError:
                continue  # the network may recover; if not, a collective fails
            if self._watches and count % _WATCH == 0:
                now = self._signs()
                if now is not None and seen is not None:
                    known = self._tell(_unchanged(seen, now), known)
                seen = now

    def _meet_failure(self, act: Callable[[str], None], failure: str) -> None:
        if self._note_failure is not None:
            self._note_failure(failure)
            self._store.set(_NOTED, "")
        act(failure)

    def _report_stall(self) -> None:
        """Say what this rank waits for, and who has not come, once after each progress."""
        number, words = self._progress()
        last, since = self._moved
        if number != last:
            self._moved = (number, time.monotonic())
        elif self._stall_s is not None and number and time.monotonic() - since > self._stall_s:
            self._moved = (number, float("inf"))
            # In a thread, since this one must go on giving signs.
            threading.Thread(target=self._say_stall, args=(words,), daemon=True).start()

    def _say_stall(self, words: str) -> None:
        report = f"rank {self.rank} has begun no collective for {self._stall_s:.0f} s, at {words}; {self.describe()}"
        if not self._ended.is_set():
            print(f" {report}", file=sys.stderr, flush=True)

    def _tell(self, silent: dict[int, str], known: dict[int, str]) -> dict[int, str]:
        if fallen := {rank: host for rank, host in silent.items() if rank not in known}:
            seconds = _WATCH * self.interval_s
            print(f" no sign of life for {seconds:.0f} s from {_names(fallen)}", file=sys.stderr, flush=True)
        if self._on_silence is not None and silent.keys() != known.keys():
            self._on_silence([SilentRank.of(rank, sign) for rank, sign in silent.items()])
        return silent

    def _sign(self, count: int) -> None:
        number, words = self._progress()
        self._store.set(str(self.rank), f"{count} {self._host} {number} {time.time():.1f} {words}")

    def _signs(self) -> list[str] | None:
        """Return the last sign of each rank; None if the store does not answer in time."""
        # A rank that has not given its first sign yet is waited for, which says nothing about the store.
        keys = [str(rank) for rank in range(self.world_size)]
        signs = self._ask(lambda: self._asking.multi_get(keys), tells_of_store=False)
        return None if signs is None else [sign.decode() for sign in signs]

    def _ask(self, question: Callable[[], T], *, tells_of_store: bool = True) -> T | None:
        """Return the store's answer; None if there is none in time, or was none before."""
        answer: list[T] = []
        if not self._answers:
            return None

        def ask() -> None:
            with suppress(RuntimeError):
                answer.append(question())

        # In a thread: on a dead connection the store's client may wait as long as TCP does.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(timeout=_SILENCE * self.interval_s)
        if thread.is_alive() and tells_of_store:
            self._answers = False
        return answer[0] if answer else None


def _unchanged(before: list[str], after: list[str]) -> dict[int, str]:
    return {rank: new for rank, (old, new) in enumerate(zip(before, after, strict=True)) if old == new}


def _names(signs: dict[int, str]) -> str:
    """Name ranks with their hosts."""
    return ", ".join(f"rank {rank} (host {sign.split()[1]})" for rank, sign in signs.items())


def _last_acts(signs: dict[int, str]) -> str:
    """Say what ranks did last, as far as their signs do, and how old these are by the hosts' clocks."""
    return "".join(_last_act(rank, sign) for rank, sign in list(signs.items())[:_MAX_ACTS])


def _last_act(rank: int, sign: str) -> str:
    *_, told_s, words = sign.split(maxsplit=4)
    return f"; rank {rank} was last at {words}, as it said {max(time.time() - float(told_s), 0.0):.0f} s ago"
