"""Schedules as lists: the acts of each stage, and that all stages match and never wait in a circle."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.pipeline_parallel.stage_schedules import (
    Act,
    Exchange,
    Message,
    Schedule,
    forwards_only,
    one_forward_one_backward,
)
from megatron.core.process_groups_config import ProcessGroupCollection

SIZES = [
    (stages, microbatches) for stages in (1, 2, 3, 4, 5, 8, 16) for microbatches in (1, 2, 3, 4, 5, 7, 8, 16, 17, 33)
]
Maker = Callable[[int, int, int], Schedule]


def text_of(schedule: Schedule) -> str:
    return " ".join(("F" if act.is_forward else "B") + str(act.microbatch) for act in schedule.acts)


def test_the_schedule_of_four_stages_is_the_one_that_is_drawn() -> None:
    lines = [text_of(one_forward_one_backward(stage, 4, 6)) for stage in range(4)]
    assert lines == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_each_stage_runs_each_microbatch_once_and_in_order(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        acts = one_forward_one_backward(stage, stages, microbatches).acts
        for is_forward in (True, False):
            assert [act.microbatch for act in acts if act.is_forward is is_forward] == list(range(microbatches))
        assert all(acts.index(Act(True, m)) < acts.index(Act(False, m)) for m in range(microbatches))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_no_more_microbatches_are_in_flight_than_stages_lie_ahead(stages: int, microbatches: int) -> None:
    """The bound is on activations: a later stage keeps fewer."""
    for stage in range(stages):
        in_flight = most = 0
        for act in one_forward_one_backward(stage, stages, microbatches).acts:
            in_flight += 1 if act.is_forward else -1
            most = max(most, in_flight)
        assert in_flight == 0
        assert most == min(stages - stage, microbatches)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("make", [one_forward_one_backward, forwards_only])
def test_an_act_gets_what_it_needs_and_what_it_makes_is_sent(make: Maker, stages: int, microbatches: int) -> None:
    for stage in range(stages):
        schedule = make(stage, stages, microbatches)
        assert len(schedule.exchanges) == len(schedule.acts) + 1
        for before, act, after in zip(schedule.exchanges, schedule.acts, schedule.exchanges[1:], strict=False):
            message = Message("output" if act.is_forward else "gradient", act.microbatch)
            has_source = stage > 0 if act.is_forward else stage < stages - 1
            has_target = stage < stages - 1 if act.is_forward else stage > 0
            assert before.receive == (message if has_source else None)
            assert after.send == (message if has_target else None)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize("make", [one_forward_one_backward, forwards_only])
def test_no_stage_waits_in_a_circle(make: Maker, stages: int, microbatches: int) -> None:
    assert stuck_stages([make(stage, stages, microbatches) for stage in range(stages)]) == []


def test_a_stage_that_receives_before_it_sends_would_wait_in_a_circle() -> None:
    """The replay detects a deadlock: here a message is sent one batch too late."""
    first, last = (one_forward_one_backward(stage, 2, 1) for stage in range(2))
    start, (sent, received), end = first.exchanges
    late = first._replace(exchanges=(start, Exchange(None, received), end._replace(send=sent)))
    assert stuck_stages([late, last]) == [0, 1]


@pytest.mark.parametrize("arguments", [(2, 2, 1), (-1, 2, 1), (0, 1, 0)])
def test_a_stage_or_a_step_that_does_not_exist_is_refused(arguments: tuple[int, int, int]) -> None:
    for make in (one_forward_one_backward, forwards_only):
        with pytest.raises(ValueError, match="at least one microbatch, got stage"):
            make(*arguments)


def stuck_stages(schedules: list[Schedule]) -> list[int]:
    """Return the stages that never finish, if a batch ends only when both its send and its receive have ended.

    This is the strictest transport: nothing is buffered, and no batch begins before the last one has ended.
    Messages between two stages in one direction are matched in the order of posting.
    """
    at = [0] * len(schedules)  # the batch that each stage is in
    posted: dict[tuple[int, int, str], deque[Message]] = {}  # (from, to, which half) -> messages that have not met
    open_halves: list[set[Message]] = [set() for _ in schedules]

    def post(stage: int) -> None:
        exchange = schedules[stage].exchanges[at[stage]]
        for half, message in zip(("send", "receive"), exchange, strict=True):
            if message is None:
                continue
            step = 1 if (message.kind == "output") == (half == "send") else -1
            pair = (stage, stage + step) if half == "send" else (stage + step, stage)
            posted.setdefault((*pair, half), deque()).append(message)
            open_halves[stage].add(message)

    def meet() -> bool:
        met = False
        for sender, receiver, half in list(posted):
            sent, awaited = posted.get((sender, receiver, "send")), posted.get((sender, receiver, "receive"))
            while half == "send" and sent and awaited:
                message = sent.popleft()
                assert message == awaited.popleft()
                open_halves[sender].remove(message)
                open_halves[receiver].remove(message)
                met = True
        return met

    for stage in range(len(schedules)):
        post(stage)
    progress = True
    while progress:
        progress = meet()
        for stage, schedule in enumerate(schedules):
            while not open_halves[stage] and at[stage] < len(schedule.exchanges) - 1:
                at[stage] += 1
                post(stage)
                progress = True
    return [s for s, schedule in enumerate(schedules) if open_halves[s] or at[s] < len(schedule.exchanges) - 1]


@pytest.mark.parametrize("reports_tokens", [False, True])
def test_a_schedule_runs_a_model_of_a_plain_configuration(reports_tokens: bool) -> None:
    """Models of callers are no transformers: their configuration has the parallel fields alone."""
    model: Any = torch.nn.Linear(4, 1)
    model.config = ModelParallelConfig()

    def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
        def loss(output: torch.Tensor) -> Any:
            tokens = (torch.tensor(output.numel()),) if reports_tokens else ()
            return (output.sum() if tokens else output.mean(), *tokens, float(output.detach().mean()))

        return model(next(data)), loss

    batches = torch.arange(24.0).view(3, 2, 4)
    arguments: dict[str, Any] = {"forward_step_func": forward_step, "model": [model], "num_microbatches": 3}
    arguments |= {"seq_length": 1, "micro_batch_size": 2, "pg_collection": ProcessGroupCollection()}
    reports = forward_backward_no_pipelining(data_iterator=iter(batches), **arguments)
    assert reports == pytest.approx([float(model(batch).detach().mean()) for batch in batches])
    torch.testing.assert_close(model.weight.grad, batches.view(6, 4).mean(0, keepdim=True))
    again = forward_backward_no_pipelining(data_iterator=iter(batches), forward_only=True, **arguments)
    assert again == pytest.approx(reports)
    own: Any = P2PCommunicator(None, model.config)  # type: ignore[arg-type]
    once_more = forward_backward_no_pipelining(
        data_iterator=iter(batches), p2p_communicator=own, forward_only=True, **arguments
    )
    assert once_more == again
    with pytest.raises(NotImplementedError, match="p2p_communicator None or a P2PCommunicator of the model's pp group"):
        forward_backward_no_pipelining(data_iterator=iter(batches), p2p_communicator=model, **arguments)
