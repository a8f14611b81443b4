"""After a failure the ranks that are silent are named, and no others."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.training.telemetry.life_signs import LifeSigns

_INTERVAL_S = 0.05


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(_INTERVAL_S)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[list[LifeSigns]]:
    """Make three ranks in one process, each with its own connection to the store; the parameter is their interval."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    interval_s = request.param
    made = [LifeSigns(server, rank=rank, world_size=3, interval_s=interval_s, watches=rank == 0) for rank in range(3)]
    yield made
    for signs in made:
        signs.close()


@pytest.mark.parametrize("ranks", [0.3], indirect=True)  # threads of a busy machine may come late
def test_ranks_that_stopped_are_named_with_their_host(ranks: list[LifeSigns]) -> None:
    assert ranks[0].silent_ranks() == {}
    assert "none has ended; all have begun equally many" in ranks[0].describe()
    ranks[2].close()
    assert list(ranks[1].silent_ranks() or {}) == [2]
    told = ranks[1].describe()
    assert "from rank 2 (host " in told and "rank 1" not in told
    said = re.search(r"; rank 2 was last at set-up, as it said (\d+) s ago$", told)
    assert said, told
    ago_s = int(said[1])
    assert 1 <= ago_s < 60, "three intervals of 0.3 s, and what the machine takes"
    time.sleep(2)
    later = re.search(r"as it said (\d+) s ago$", ranks[1].describe())
    assert later and int(later[1]) >= ago_s + 2


@pytest.mark.parametrize("ranks", [2 * _INTERVAL_S], indirect=True)
def test_rank_0_says_once_who_fell_silent(ranks: list[LifeSigns], capfd: pytest.CaptureFixture[str]) -> None:
    """NCCL's watchdog may end the process without an exception, and then nothing else reports it."""
    heard: list[list[int]] = []
    ranks[0].follow_silence(
        lambda silent: heard.append([one.rank for one in silent if one.act == "set-up" and one.told_s > 0])
    )
    ranks[1].close()
    _wait_until(lambda: bool(heard))
    time.sleep(_INTERVAL_S * 40)  # another look at all ranks
    told = capfd.readouterr().err
    assert told.count("no sign of life for 2 s from rank 1 (host ") == 1 and "rank 2" not in told
    assert heard == [[1]]


def test_a_store_that_does_not_answer_is_not_waited_for() -> None:
    """A rank that never gave a sign acts like an unreachable store: there is no answer."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False)
    alone = LifeSigns(server, rank=0, world_size=2, interval_s=_INTERVAL_S)
    start = time.monotonic()
    assert "did not answer" in alone.describe()
    assert time.monotonic() - start < 20, "the store's time-out is 30 s"
    alone.close()
    server.set("life_signs/1", "0 nowhere")  # the question that nobody waits for any more ends


def test_a_failure_reaches_all_ranks_once_and_the_first_one_counts() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    heard: list[str] = []
    first, second = (
        LifeSigns(server, rank=rank, world_size=2, name="start 2", interval_s=_INTERVAL_S, on_failure=heard.append)
        for rank in range(2)
    )
    assert second.failure() is None
    assert first.announce_failure("disk full") == "disk full" == second.announce_failure("connection closed")
    assert second.failure() == "disk full"
    _wait_until(lambda: len(heard) == 2)
    time.sleep(5 * _INTERVAL_S)
    assert heard == ["disk full"] * 2
    other = LifeSigns(server, rank=0, world_size=2, name="start 3", interval_s=_INTERVAL_S)
    assert other.failure() is None, "of another start"
    for signs in (first, second, other):
        signs.close()


def test_a_rank_that_fails_waits_until_its_failure_is_noted_where_somebody_does() -> None:
    """Its end makes torchrun end the rank that keeps the status page."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    heard: list[str] = []
    first, second = (LifeSigns(server, rank=rank, world_size=2, on_failure=lambda text: None) for rank in range(2))
    second.wait_until_noted(1e3)
    assert second.announce_failure("disk full") == "disk full", "nobody followed, and the store answers"
    first.follow_failure(heard.append)
    second.wait_until_noted(1e3)
    assert heard == ["disk full"]
    for signs in (first, second):
        signs.close()


def test_a_rank_that_is_behind_the_others_is_named_with_what_it_did_last(capfd: pytest.CaptureFixture[str]) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False)
    ranks = [LifeSigns(server, rank=rank, world_size=3, interval_s=0.3, stall_s=0.5) for rank in range(3)]
    for rank, signs in enumerate(ranks):
        signs.watch_progress(lambda rank=rank: (10 - rank // 2, f"reduction {rank}"))  # type: ignore[misc]
    time.sleep(0.7)
    told = ranks[0].describe()
    assert "not come to where the others wait: rank 2 (host " in told and re.search(
        r"; rank 2 was last at reduction 2, as it said \d+ s ago$", told
    )
    words, said = "rank 0 has begun no collective", [""]

    def has_said() -> bool:
        said[0] += capfd.readouterr().err
        return words in said[0]

    _wait_until(has_said)
    time.sleep(1)
    for signs in ranks:
        signs.close()
    has_said()
    assert said[0].count(f"{words} for 0 s, at reduction 0; all ranks gave a sign") == 1
