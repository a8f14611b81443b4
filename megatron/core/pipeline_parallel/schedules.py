"""In which order a pipeline stage runs the forwards and backwards of a step, and what travels between them.

A schedule is data: a list of acts, and before each act (and after the last) one exchange with the neighbouring stages.
Whoever runs it computes and communicates by that list alone, so what is shown of the lists holds of the run.

1F1B, 4 stages, 6 microbatches (number: forward, letter: backward):

```
stage 0   0 1 2 3 . . . a 4 b 5 c . d . e . f
stage 1     0 1 2 . . a 3 b 4 c 5 d . e . f
stage 2       0 1 . a 2 b 3 c 4 d 5 e . f
stage 3         0 a 1 b 2 c 3 d 4 e 5 f
          |(1)    |     |(2)          |(3)
```

(1) warm-up: forwards until the first gradient can come back, one fewer on each later stage; (2) steady: a forward and a
backward by turns, so no more than ``num_stages - stage`` microbatches hold activations; (3) cool-down: what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple


class Act(NamedTuple):
    """The forward or the backward of one microbatch on one stage."""

    is_forward: bool
    microbatch: int


class Message(NamedTuple):
    """A microbatch's hidden states, on their way to the next stage, or their gradient, to the one before."""

    kind: Literal["output", "gradient"]
    microbatch: int


class Exchange(NamedTuple):
    """What travels at once between two acts; None where nothing does."""

    send: Message | None
    receive: Message | None


class Schedule(NamedTuple):
    """What a stage does in a step.

    Attributes:
        acts: [A] in order.
        exchanges: [A + 1] the one before each act, and the one after the last.
    """

    acts: tuple[Act, ...]
    exchanges: tuple[Exchange, ...]


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> Schedule:
    """The 1F1B schedule without interleaving; with one stage, each forward is followed by its backward.

    Raises:
        ValueError: there is no such stage, or no microbatch.

    Ranks: pure; the schedules of all stages fit together.
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
    """The schedule of an evaluation: all forwards in order.

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
    """Between two acts travels what the first one made and what the second one needs, in one batch.

    [Note: no stage waits in a circle] A batch is over when both of its halves are. Its receiving half needs an earlier act
    of a neighbour, and its sending half that the neighbour has come to the act that needs the message. Outputs depend
    on stages before, gradients on stages behind and on outputs; so there is an order of all batches, which a test replays.
    """
    ends = [None, *acts, None]
    exchanges = [Exchange(_made_by(done, stage, num_stages), _needed_by(due, stage)) for done, due in pairwise(ends)]
    # What the last stage needs for a backward is its own loss.
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
