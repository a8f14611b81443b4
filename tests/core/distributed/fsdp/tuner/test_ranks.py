"""All ranks take one decision, and a candidate that one rank loses is lost on all of them; ranks are threads here."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.core.distributed.fsdp.tuner import Choice, Outcome, Ranks, Request, Search, Visit

_Answer = Visit | str | None
_DEPTH = Choice(name="depth", options=[{"depth": 2}, {"depth": 3}])


class _Scripted:
    """A worker that answers as a function of rank and settings says; None: it never does."""

    def __init__(self, answer: Callable[[Mapping[str, Any]], _Answer]) -> None:
        self._answer = answer
        self.found: _Answer = None
        self.is_alive = True

    def ask(self, request: Request) -> None:
        self.found = self._answer(request.settings)

    def answer(self, within_s: float) -> _Answer:
        if self.found is None:
            time.sleep(min(within_s, 0.01))
        return self.found

    def kill(self) -> None:
        self.is_alive = False


def _visit(seconds: float, *, spare: int = 10) -> Visit:
    return Visit(seconds=(seconds,) * 4, peak_nbytes=7, spare_nbytes=spare, total_nbytes=100, facts={})


def _run(answer: Callable[[int, Mapping[str, Any]], _Answer], *, limit_s: float | None = None) -> tuple[list[Any], Any]:
    """Search on two ranks; return what each of them took, and the workers that each started, by name."""
    store, outcomes = dist.HashStore(), dict[int, Any]()
    started: list[dict[str, _Scripted]] = [{}, {}]

    def on(rank: int) -> None:
        def start(name: str) -> _Scripted:
            assert all(not worker.is_alive for worker in started[rank].values()), "one at a time"
            started[rank][name] = _Scripted(lambda settings: answer(rank, settings))
            return started[rank][name]

        ranks = Ranks(store=store, rank=rank, world_size=2, start=start)
        if rank == 0:

            def visit(request: Request) -> Visit | str:
                return ranks.visit(Request(**{**asdict(request), "limit_s": limit_s or request.limit_s}))

            outcome = Search([_DEPTH], visit, seconds=1e6, say=lambda line: None).run()
            ranks.finish(asdict(outcome))
        else:
            outcome = Outcome(**ranks.follow(60.0))
        outcomes[rank] = outcome

    threads = [threading.Thread(target=on, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert all(not worker.is_alive for workers in started for worker in workers.values())
    return [outcomes[rank] for rank in range(2)], started


def test_ranks_whose_clocks_differ_decide_alike() -> None:
    """Each rank alone would choose another depth; the slowest rank's time counts."""
    times = [{1: 1.0, 2: 0.5, 3: 0.8}, {1: 1.0, 2: 1.5, 3: 0.7}]
    (first, second), started = _run(lambda rank, settings: _visit(times[rank][settings.get("depth", 1)]))
    assert first.settings == second.settings == {"depth": 3}
    assert first.rows == [tuple(row) for row in second.rows]
    assert [list(workers) for workers in started] == [["trial 1"], ["trial 1"]], "one process measures all"


def test_a_candidate_that_one_rank_loses_is_lost_on_all() -> None:
    """The others wait in a collective for ever; they are ended, and the next candidate has new processes on all ranks."""

    def answer(rank: int, settings: Mapping[str, Any]) -> _Answer:
        if settings.get("depth") == 2:
            return "out of memory: 5 GiB" if rank == 1 else None
        return _visit(1.0 / settings.get("depth", 1))

    (first, second), started = _run(answer)
    assert first.settings == second.settings == {"depth": 3}
    assert ("depth=2", "out of memory: 5 GiB (rank 1)") in [tuple(row) for row in second.rows]
    assert [list(workers) for workers in started] == [["trial 1", "trial 2"]] * 2


def test_the_cause_is_told_not_what_follows_from_it() -> None:
    def answer(rank: int, settings: Mapping[str, Any]) -> _Answer:
        if settings.get("depth") == 2:
            return "RuntimeError: gloo: Connection closed by peer" if rank == 0 else "its process ended with status -9"
        return _visit(1.0)

    (first, _), _ = _run(answer)
    assert ("depth=2", "its process ended with status -9 (rank 1)") in first.rows


def test_a_candidate_that_hangs_is_lost() -> None:
    (first, second), _ = _run(
        lambda rank, settings: None if settings.get("depth") == 2 else _visit(1.0 / settings.get("depth", 1)),
        limit_s=0.2,
    )
    assert first.settings == second.settings == {"depth": 3}
    assert ("depth=2", "it took longer than 0 s (rank 0)") in first.rows


def test_rank_0_waits_for_a_rank_that_hangs_alone() -> None:
    """Its own process may have answered: the other rank is lost after its own limit, and only then says so."""
    waits: list[timedelta] = []

    class Store(dist.HashStore):
        def wait(self, *given: Any, **named: Any) -> None:
            waits.append(given[-1])
            self.set("found/1/1", json.dumps("it took longer than 560 s"))

    ranks = Ranks(store=Store(), rank=0, world_size=2, start=lambda name: _Scripted(lambda settings: _visit(1.0)))
    found = ranks.visit(Request(settings={}, num_steps=1, key="", limit_s=500.0))
    assert (found, waits) == ("it took longer than 560 s (rank 1)", [timedelta(seconds=620)])


def test_the_least_of_all_ranks_memory_counts() -> None:
    visit = Visit.of_ranks([_visit(1.0, spare=30), _visit(2.0, spare=20)])
    assert (visit.spare_nbytes, visit.seconds) == (20, (2.0,) * 4)
