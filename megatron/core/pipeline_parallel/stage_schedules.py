"""Schedules of pipeline stages: the order of forwards and backwards of a step, and the messages between them.

A schedule is data: a list of acts, with one exchange with the neighbouring stages before each act and after the last. The
run follows the list alone, so properties that tests show of the list hold for the run.

1F1B, 4 stages, 6 microbatches (number: forward, letter: backward):

```
stage 0   0 1 2 3 . . . a 4 b 5 c . d . e . f
stage 1     0 1 2 . . a 3 b 4 c 5 d . e . f
stage 2       0 1 . a 2 b 3 c 4 d 5 e . f
stage 3         0 a 1 b 2 c 3 d 4 e 5 f
          |(1)    |     |(2)          |(3)
```

(1) warm-up: forwards until the first gradient can arrive, one fewer on each later stage; (2) steady state: a forward and a
backward in turn, so that at most ``num_stages - stage`` microbatches hold activations; (3) cool-down: the remaining
backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple


class Act(NamedTuple):
    """The forward or the backward of one microbatch on one stage; ``chunk`` says on which of the rank's stages."""

    is_forward: bool
    microbatch: int
    chunk: int = 0


class Message(NamedTuple):
    """The hidden states of a microbatch, for the next stage, or their gradient, for the previous one.

    ``chunk`` says for which of the receiving rank's stages.
    """

    kind: Literal["output", "gradient"]
    microbatch: int
    chunk: int = 0


class Exchange(NamedTuple):
    """The messages of one batch between two acts; None: no message."""

    send: Message | None
    receive: Message | None


class Schedule(NamedTuple):
    """The acts and exchanges of a stage in a step.

    Attributes:
        acts: [A] in order.
        exchanges: [A + 1] one before each act, and one after the last.
    """

    acts: tuple[Act, ...]
    exchanges: tuple[Exchange, ...]


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> Schedule:
    """Make the 1F1B schedule without interleaving; with one stage, each forward is followed by its backward.

    Raises:
        ValueError: there is no such stage, or no microbatch.

    Ranks: pure; the schedules of all stages match.
    Source: PipeDream-Flush (arXiv:2006.09503), as in Megatron-LM (arXiv:2104.04473, section 2.2.1).
    """
    _check(stage, num_stages, num_microbatches)
    num_ahead = min(num_stages - stage - 1, num_microbatches)
    acts = [Act(True, microbatch) for microbatch in range(num_ahead)]
    for microbatch in range(num_microbatches - num_ahead):
        acts += [Act(True, num_ahead + microbatch), Act(False, microbatch)]
    acts += [Act(False, microbatch) for microbatch in range(num_microbatches - num_ahead, num_microbatches)]
    return _with_exchanges(acts, stage, num_stages)


def forwards_only(stage: int, num_stages: int, num_microbatches: int) -> Schedule:
    """Make the schedule of an evaluation: all forwards in order.

    Raises:
        ValueError: there is no such stage, or no microbatch.
    """
    _check(stage, num_stages, num_microbatches)
    return _with_exchanges([Act(True, microbatch) for microbatch in range(num_microbatches)], stage, num_stages)


def _check(stage: int, num_stages: int, num_microbatches: int) -> None:
    if not 0 <= stage < num_stages or num_microbatches < 1:
        raise ValueError(
            "a schedule needs a stage in [0, num_stages) and at least one microbatch, got stage "
            f"{stage} of {num_stages} and {num_microbatches} microbatches"
        )


def _with_exchanges(acts: Sequence[Act], stage: int, num_stages: int) -> Schedule:
    """Add the exchanges: between two acts, the first one's result is sent and the second one's input received.

    [Note: no stage waits in a circle] A batch ends when its send and its receive have ended. The receive needs an earlier act
    of a neighbour, and the send needs the neighbour to reach the act that uses the message. Outputs depend on earlier stages,
    gradients on later stages and on outputs. So there is an order of all batches without a cycle, which a test replays.
    """
    ends = [None, *acts, None]
    exchanges = [Exchange(_made_by(done, stage, num_stages), _needed_by(due, stage)) for done, due in pairwise(ends)]
    # The last stage's backward starts from its own loss and receives nothing.
    exchanges = [_without_gradient(exchange) if stage == num_stages - 1 else exchange for exchange in exchanges]
    return Schedule(tuple(acts), tuple(exchanges))


def _made_by(act: Act | None, stage: int, num_stages: int) -> Message | None:
    if act is None:
        return None
    if act.is_forward:
        return Message("output", act.microbatch) if stage < num_stages - 1 else None
    return Message("gradient", act.microbatch) if stage > 0 else None


def _needed_by(act: Act | None, stage: int) -> Message | None:
    if act is None:
        return None
    if act.is_forward:
        return Message("output", act.microbatch) if stage > 0 else None
    return Message("gradient", act.microbatch)


def _without_gradient(exchange: Exchange) -> Exchange:
    receive = exchange.receive
    return exchange._replace(receive=None if receive is not None and receive.kind == "gradient" else receive)
