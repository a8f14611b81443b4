"""Signs of life of all ranks through the store, so that after a failure the ranks that are down can be named.

A collective that fails or times out knows that a rank is missing, not which. Each rank writes a counter to the store from a
thread. A rank that was killed, stopped or disconnected no longer does; a rank that waits for it still does.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

INTERVAL_S = 2.0
"""Seconds between two signs of a rank."""

_SILENCE = 3
"""After a failure: intervals without a sign after which a rank counts as silent."""

_WATCH = 15
"""Intervals between two checks of all ranks by rank 0 during training."""

_SMALL_WORLD = 256
"""Up to this many ranks, all of them ask which are silent; in larger runs the first rank of each host asks."""


class LifeSigns:
    """The signs of life of this rank, and the check of the other ranks'.

    Args:
        store: a store that all ranks reach; a separate connection to it is made.
        watches: check all ranks at intervals, and report on stderr when one falls silent.

    Ranks: all, each for itself; a thread runs until ``close``.
    """

    def __init__(
        self, store: Store, *, rank: int, world_size: int, interval_s: float = INTERVAL_S, watches: bool = False
    ) -> None:
        self.rank, self.world_size, self.interval_s = rank, world_size, interval_s
        self._store = PrefixStore("life_signs", store.clone())  # type: ignore[attr-defined]
        self._asking = PrefixStore("life_signs", store.clone())  # type: ignore[attr-defined]
        self._host, self._watches = socket.gethostname(), watches
        self._ended = threading.Event()
        self._sign(0)
        self._thread = threading.Thread(target=self._run, name="life signs", daemon=True)
        self._thread.start()

    def silent_ranks(self) -> dict[int, str] | None:
        """Return the hosts, by rank, of the ranks without a sign within a few intervals; None: the store does not answer.

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
                f"rank {self.rank} on host {self._host} could not ask which ranks are silent: the store of the first host "
                f"({os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}) did not answer; that host has ended, or"
                " this one is disconnected from it"
            )
        if not silent:
            return f"all ranks gave a sign of life within {seconds:.0f} s: none has ended, but one may hang in its computation"
        return f"no sign of life within {seconds:.0f} s from {_names(silent)}: ended, stopped, or disconnected"

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
            except RuntimeError:
                continue  # the network may recover; if not, a collective fails
            if self._watches and count % _WATCH == 0:
                now = self._signs()
                if now is not None and seen is not None:
                    known = self._tell(_unchanged(seen, now), known)
                seen = now

    def _tell(self, silent: dict[int, str], known: dict[int, str]) -> dict[int, str]:
        if fallen := {rank: host for rank, host in silent.items() if rank not in known}:
            seconds = _WATCH * self.interval_s
            print(f" no sign of life for {seconds:.0f} s from {_names(fallen)}", file=sys.stderr, flush=True)
        return silent

    def _sign(self, count: int) -> None:
        self._store.set(str(self.rank), f"{count} {self._host}")

    def _signs(self) -> list[str] | None:
        """Return the last sign of each rank; None if the store does not answer in time."""
        answer: list[list[bytes]] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answer.append(self._asking.multi_get([str(rank) for rank in range(self.world_size)]))

        # In a thread: on a dead connection the store's client may wait as long as TCP does.
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(timeout=_SILENCE * self.interval_s)
        return [sign.decode() for sign in answer[0]] if answer else None


@contextmanager
def naming_silent_ranks() -> Iterator[None]:
    """Give signs of life within the scope, and add the silent ranks to an error of communication.

    It works where the ranks use a TCP store, as with torchrun; otherwise it does nothing.

    Ranks: all of the default process group.
    """
    store, rank, world_size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if world_size == 1 or not isinstance(store, TCPStore):
        yield
        return
    signs = LifeSigns(store, rank=rank, world_size=world_size, watches=rank == 0)
    try:
        yield
    except RuntimeError as error:
        asks = world_size <= _SMALL_WORLD or os.environ.get("LOCAL_RANK", "0") == "0"
        if asks and _is_of_communication(error):
            error.add_note(signs.describe())
        raise
    finally:
        signs.close()


def _is_of_communication(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(
        word in text for word in ("gloo", "nccl", "connection", "timed out")
    )


def _unchanged(before: list[str], after: list[str]) -> dict[int, str]:
    return {rank: new.split()[1] for rank, (old, new) in enumerate(zip(before, after, strict=True)) if old == new}


def _names(ranks: dict[int, str]) -> str:
    return ", ".join(f"rank {rank} (host {host})" for rank, host in ranks.items())
