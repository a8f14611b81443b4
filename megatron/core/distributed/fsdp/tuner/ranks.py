"""All ranks measure together: rank 0 asks, every rank's own trial process answers, and what one loses all have lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import Store

from megatron.core.distributed.fsdp.tuner.figures import Visit
from megatron.core.distributed.fsdp.tuner.search import OUT_OF_MEMORY, Request
from megatron.core.distributed.fsdp.tuner.trial import Place, Trial, serve

ENDED = "its process ended"
_POLL_S = 0.05
_LOOK_S, _LOOK_S_OF_RANK = 0.1, 0.002
_GRACE_S = 60.0
"""How much longer than rank 0 the others wait, for their own process and for rank 0's next request."""


class Worker(Protocol):
    """A process that measures for one rank."""

    def ask(self, request: Request) -> None:
        """Begin to measure."""

    def answer(self, within_s: float) -> Visit | str | None:
        """Return what was measured, or why it was lost; None if there is no answer yet."""

    def kill(self) -> None:
        """End the process, and wait until its memory is free."""


class TrialProcess:
    """A trial process of this rank, started when it is made.

    Raises:
        TypeError: functions of the trial cannot be pickled.
    """

    def __init__(self, trial: Trial, place: Place, context: Any = None) -> None:
        context = context or multiprocessing.get_context("spawn")
        self._requests, requests = context.Pipe()
        self._log = tempfile.NamedTemporaryFile("r+", errors="replace", prefix="fsdp-tune-")  # noqa: SIM115 (until kill)
        place = replace(place, log=self._log.name)
        self._process = context.Process(target=serve, args=(trial, place, requests), daemon=True)
        self._process.start()
        requests.close()

    def ask(self, request: Request) -> None:
        with suppress(OSError):  # it has ended: the answer will say so
            self._requests.send((dict(request.settings), request.num_steps))

    def answer(self, within_s: float) -> Visit | str | None:
        try:
            if not self._requests.poll(within_s):
                return None
            found: Visit | str = self._requests.recv()
            return found
        except (EOFError, OSError):
            self._process.join(_GRACE_S)
            lines = self._log.read().strip().splitlines()
            return f"{ENDED} with status {self._process.exitcode}" + (f": {lines[-1][:200]}" if lines else "")

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._requests.close()
        self._log.close()


@dataclass(kw_only=True)
class Ranks:
    """This rank among those that measure.

    Args:
        store: shared by the ranks; its keys are of this tuning alone.
        start: starts this rank's worker; the name is of no other workers, and alike on all ranks.

    Ranks: rank 0 calls ``visit`` and then ``finish``, the others ``follow``.
    """

    store: Store
    rank: int
    world_size: int
    start: Callable[[str], Worker]
    _worker: Worker | None = None
    _name: str = ""
    _number: int = 0
    _generation: int = 0
    _key: str = ""

    def visit(self, request: Request) -> Visit | str:
        """Measure on all ranks. Ranks: 0."""
        if request.key != self._key:
            self._key = request.key
            self._generation += 1
        self._number += 1
        asked = asdict(request) | {"name": f"trial {self._generation}"}
        self.store.set(f"asked/{self._number}", json.dumps(asked))
        self._measure(request, asked["name"], limit_s=request.limit_s)
        keys = [f"found/{self._number}/{rank}" for rank in range(self.world_size)]
        self.store.wait(keys, timedelta(seconds=request.limit_s + 2 * _GRACE_S))  # another rank alone may hang
        found = [json.loads(self.store.get(key)) for key in keys]
        lost = [f"{text} (rank {rank})" for rank, text in enumerate(found) if isinstance(text, str) and text]
        if lost or "" in found:
            self._generation += 1  # the processes of the other ranks have waited for one that will not come
            return min(lost, key=_follows) if lost else "lost"
        return Visit.of_ranks([Visit(**{**one, "seconds": tuple(one["seconds"])}) for one in found])

    def finish(self, outcome: Any) -> None:
        """Tell the others what was chosen, as JSON. Ranks: 0."""
        self.close()
        self.store.set(f"asked/{self._number + 1}", json.dumps({"outcome": outcome}))

    def follow(self, wait_s: float) -> Any:
        """Measure what rank 0 asks for until it has chosen; return what it has chosen. Ranks: all but 0.

        Args:
            wait_s: how long to wait for the first request.
        """
        try:
            while True:
                self._number += 1
                self.store.wait([f"asked/{self._number}"], timedelta(seconds=wait_s))
                asked = json.loads(self.store.get(f"asked/{self._number}"))
                if "outcome" in asked:
                    return asked["outcome"]
                name = asked.pop("name")
                request = Request(**asked)
                wait_s = request.limit_s + 3 * _GRACE_S
                self._measure(request, name, limit_s=request.limit_s + _GRACE_S)
        finally:
            self.close()

    def close(self) -> None:
        """End this rank's worker."""
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def _measure(self, request: Request, name: str, *, limit_s: float) -> None:
        """Measure on this rank, as long as no other one has lost the candidate, and say what was found."""
        if name != self._name or self._worker is None:
            self.close()
            self._worker, self._name = self.start(name), name
        found = self._answer(self._worker, request, limit_s)
        if isinstance(found, str):
            if found:  # before this worker ends, which others see as a lost connection
                self.store.set(f"lost/{self._number}", found)
            self.close()
        text = json.dumps(found if isinstance(found, str) else asdict(found))
        self.store.set(f"found/{self._number}/{self.rank}", text)

    def _answer(self, worker: Worker, request: Request, limit_s: float) -> Visit | str:
        """Return this rank's answer; an empty one if another rank has lost the candidate."""
        now = time.monotonic()
        deadline, next_look = now + limit_s, now
        worker.ask(request)
        while True:
            if (found := worker.answer(_POLL_S)) is not None:
                return found
            now = time.monotonic()
            if now > next_look:
                if self.store.check([f"lost/{self._number}"]):
                    return ""
                next_look = now + _LOOK_S + self.world_size * _LOOK_S_OF_RANK  # one process serves the store of all
            if now > deadline:
                return f"it took longer than {limit_s:.0f} s"


def _follows(reason: str) -> int:
    """Return how likely a reason follows from another rank's: a rank's memory ends, then its process, then connections to it."""
    if reason.startswith(OUT_OF_MEMORY):
        return 0
    if reason.startswith(ENDED):
        return 1
    return 3 if any(word in reason.lower() for word in ("connection", "timed out", "gloo", "nccl")) else 2


def reachable_host() -> str:
    """Return the name under which all ranks reach rank 0, as torchrun has it; without it all are here. Ranks: 0."""
    return os.environ.get("MASTER_ADDR") or "127.0.0.1"
