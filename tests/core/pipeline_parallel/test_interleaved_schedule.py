"""Interleaved schedules as lists: the acts of each rank, that all ranks' messages meet, and that none waits in a circle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from operator import attrgetter

import pytest

from megatron.core.pipeline_parallel.interleaved_schedule import (
    InterleavedSchedule,
    get_schedule_table,
    interleaved_forwards_only,
    interleaved_one_forward_one_backward,
)
from megatron.core.pipeline_parallel.stage_schedules import Act, Exchange, Message

# ranks, chunks, microbatches, microbatches of a group
SIZES = [
    (2, 2, 2, 2), (2, 2, 4, 2), (2, 3, 4, 4), (2, 2, 5, 3), (2, 1, 4, 2), (3, 2, 6, 3), (3, 4, 7, 4), (4, 2, 4, 4),
    (4, 3, 8, 4), (4, 2, 16, 8), (5, 2, 12, 7), (8, 2, 8, 8), (8, 3, 24, 8), (16, 2, 32, 16),
]  # fmt: skip
Maker = Callable[..., InterleavedSchedule]


def schedules_of(make: Maker, ranks: int, chunks: int, microbatches: int, group: int) -> list[InterleavedSchedule]:
    sizes = {"num_ranks": ranks, "num_chunks": chunks, "num_microbatches": microbatches, "group_size": group}
    return [make(rank, **sizes) for rank in range(ranks)]


def acts_of(schedule: InterleavedSchedule) -> list[Act]:
    return [half.act for half in schedule if half.act is not None]


def text_of(schedule: InterleavedSchedule) -> str:
    letters = [("F" if act.is_forward else "B") + str(act.microbatch) + "'" * act.chunk for act in acts_of(schedule)]
    return " ".join(letters)


def test_the_schedule_of_two_ranks_is_the_one_that_is_drawn() -> None:
    lines = [text_of(schedule) for schedule in schedules_of(interleaved_one_forward_one_backward, 2, 2, 4, 2)]
    assert lines == [
        "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3",
        "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3",
    ]


@pytest.mark.parametrize("sizes", SIZES)
def test_each_chunk_runs_each_microbatch_once_and_in_order(sizes: tuple[int, int, int, int]) -> None:
    _, chunks, microbatches, group = sizes
    for schedule in schedules_of(interleaved_one_forward_one_backward, *sizes):
        acts = acts_of(schedule)
        for chunk in range(chunks):
            for is_forward in (True, False):
                own = [act.microbatch for act in acts if (act.is_forward, act.chunk) == (is_forward, chunk)]
                assert own == list(range(microbatches))
            for microbatch in range(microbatches):
                assert acts.index(Act(True, microbatch, chunk)) < acts.index(Act(False, microbatch, chunk))
        forwards = [(act.microbatch, act.chunk) for act in acts if act.is_forward]
        assert forwards == get_schedule_table(microbatches, chunks, group)


@pytest.mark.parametrize("sizes", SIZES)
def test_as_many_forwards_wait_for_their_backward_as_in_megatron_core(sizes: tuple[int, int, int, int]) -> None:
    """The bound is on activations: warm-up forwards and the one of the steady state."""
    ranks, chunks, microbatches, group = sizes
    for rank, schedule in enumerate(schedules_of(interleaved_one_forward_one_backward, *sizes)):
        in_flight = most = 0
        for act in acts_of(schedule):
            in_flight += 1 if act.is_forward else -1
            most = max(most, in_flight)
        assert in_flight == 0
        assert most == min(2 * (ranks - rank - 1) + (chunks - 1) * group + 1, chunks * microbatches)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("make", [interleaved_one_forward_one_backward, interleaved_forwards_only])
def test_what_an_act_needs_has_arrived_and_what_it_makes_is_sent(make: Maker, sizes: tuple[int, int, int, int]) -> None:
    check_messages(schedules_of(make, *sizes), sizes[1])


def check_messages(schedules: list[InterleavedSchedule], chunks: int) -> None:
    """Check that what an act needs has arrived, that what it makes is sent, and that nothing else arrives."""
    ranks = len(schedules)
    for rank, schedule in enumerate(schedules):
        arrived: set[Message] = set()
        for act, exchange, _ in schedule:
            if act is not None:
                is_first, is_last = (rank, act.chunk) == (0, 0), (rank, act.chunk) == (ranks - 1, chunks - 1)
                kind = "output" if act.is_forward else "gradient"
                if not (is_first if act.is_forward else is_last):
                    arrived.remove(Message(kind, act.microbatch, act.chunk))  # type: ignore[arg-type]
                assert (exchange.send is None) is (is_last if act.is_forward else is_first)
            else:
                assert exchange.send is None
            if exchange.receive is not None:
                arrived.add(exchange.receive)
        assert arrived == set(), "nothing arrives that nobody needs"


@pytest.mark.parametrize("sizes", SIZES)
def test_the_acts_of_a_tick_can_take_turns(sizes: tuple[int, int, int, int]) -> None:
    """What both need has arrived before the tick, and a forward does not make what the backward of its tick starts from."""
    make = partial(interleaved_one_forward_one_backward, are_independent=True)
    schedules = schedules_of(make, *sizes)
    check_messages(schedules, sizes[1])
    assert stuck_ranks(schedules) == []
    for schedule in schedules:
        num_pairs, arrived, run = 0, set[Message](), set[tuple[int, int]]()
        for _, halves in groupby(schedule, key=attrgetter("tick")):
            of_tick = list(halves)
            acts = [half.act for half in of_tick if half.act is not None]
            num_pairs += len(acts) == 2
            for act in acts:
                assert act.is_forward or (act.microbatch, act.chunk) in run
                needed = Message("output" if act.is_forward else "gradient", act.microbatch, act.chunk)
                assert needed in arrived or all(half.exchange.receive != needed for half in schedule)
            arrived |= {half.exchange.receive for half in of_tick if half.exchange.receive is not None}
            run |= {(act.microbatch, act.chunk) for act in acts if act.is_forward}
        assert num_pairs > 0 or sizes[1] * sizes[2] <= (sizes[1] - 1) * sizes[3] + 2 * (sizes[0] - 1) + 1


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("make", [interleaved_one_forward_one_backward, interleaved_forwards_only])
def test_no_rank_waits_in_a_circle(make: Maker, sizes: tuple[int, int, int, int]) -> None:
    assert stuck_ranks(schedules_of(make, *sizes)) == []


def test_the_replay_detects_messages_that_never_meet() -> None:
    first, last = schedules_of(interleaved_one_forward_one_backward, 2, 2, 2, 2)
    assert stuck_ranks([(first[1], first[0], *first[2:]), last]) == [0, 1]


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 9])
def test_an_evaluation_may_have_any_number_of_microbatches(microbatches: int) -> None:
    schedules = schedules_of(interleaved_forwards_only, 4, 3, microbatches, 4)
    assert stuck_ranks(schedules) == []
    for schedule in schedules:
        assert [(act.microbatch, act.chunk) for act in acts_of(schedule)] == get_schedule_table(microbatches, 3, 4)
    check_messages(schedules, 3)


@pytest.mark.parametrize(
    ("sizes", "got"),
    [
        ((2, 2, 1, 2), "got 1 microbatches in groups of 2 on 2 ranks"),
        ((4, 2, 6, 4), "got 6 microbatches in groups of 4 on 4 ranks"),
        ((4, 2, 4, 2), "got 4 microbatches in groups of 2 on 4 ranks"),
        ((1, 2, 4, 4), "several ranks, got 1 ranks"),
    ],
)
def test_too_few_microbatches_are_refused(sizes: tuple[int, int, int, int], got: str) -> None:
    with pytest.raises(ValueError, match=got):
        schedules_of(interleaved_one_forward_one_backward, *sizes)


def test_an_evaluation_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one microbatch, got 0"):
        schedules_of(interleaved_forwards_only, 2, 2, 0, 2)


def stuck_ranks(schedules: list[InterleavedSchedule]) -> list[int]:
    """Return the ranks that never finish, if a batch ends only when its send and its receive have met another's.

    This is the strictest transport: nothing is buffered, and no batch begins before the last one of its rank has ended.
    Messages between two ranks in one direction meet in the order of their batches.
    """
    num_ranks, at = len(schedules), [0] * len(schedules)

    def batch_of(rank: int) -> Exchange | None:
        return schedules[rank][at[rank]].exchange if at[rank] < len(schedules[rank]) else None

    sent, received = [False] * num_ranks, [False] * num_ranks
    progress = True
    while progress:
        progress = False
        for rank in range(num_ranks):
            own = batch_of(rank)
            if own is None:
                continue
            if own.send is not None and not sent[rank]:
                peer = (rank + (1 if own.send.kind == "output" else -1)) % num_ranks
                theirs = batch_of(peer)
                if theirs is not None and theirs.receive == own.send and not received[peer]:
                    sent[rank] = received[peer] = progress = True
            if (own.send is None or sent[rank]) and (own.receive is None or received[rank]):
                at[rank], sent[rank], received[rank], progress = at[rank] + 1, False, False, True
    return [rank for rank in range(num_ranks) if batch_of(rank) is not None]
