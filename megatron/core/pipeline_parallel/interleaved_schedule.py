"""Schedules of ranks with several pipeline stages each (virtual stages), which take turns.

With ``v`` stages (chunks) on each of ``p`` ranks, stage ``i`` of the model is chunk ``i // p`` of rank ``i % p``. A rank runs a group of
microbatches through its first chunk, then the same group through its second one, and so on; backwards come in the order of the chunks
reversed. A bubble is then as long as ``p - 1`` forwards and backwards of a chunk, not of all of a rank's layers.

2 ranks, 2 chunks, 4 microbatches in groups of 2 (number: forward, letter: backward; the second chunk's are primed):

```
tick     0   1   2   3    4    5    6    7    8    9   10  11
rank 0   0   1   0'  1'   2a'  3b'  2'a  3'b  c'   d'  c   d
rank 1       0   1   0'a' 1'b' 2a   3b   2'c' 3'd' c   d
```

[Note: ticks] A tick is a forward and a backward, either of which may be missing. In its forward half a rank of index ``r`` runs its
``k``-th forward at tick ``r + k``; its backward half has the ``k``-th backward at tick ``(v - 1) N + 2 (p - 1) - r + k``, where ``N`` is the group's size. So
neighbours are one tick apart, and what a rank makes in half a tick, its neighbour needs in a later tick. Messages are exchanged at the end of the half in
which they were made: all ranks' batches of one half belong together, and none waits for another half's. So no rank waits in a circle.
A message that is needed later is kept until then, and travels beside the other half.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from megatron.core.pipeline_parallel.stage_schedules import Act, Exchange, Message


class HalfTick(NamedTuple):
    """What a rank does in half a tick, whose number is ``tick``: an act, or none, and the exchange behind it."""

    act: Act | None
    exchange: Exchange
    tick: int


InterleavedSchedule = tuple[HalfTick, ...]
_Made = Callable[[int, int], Act | None]  # (rank, tick) -> what it runs in the half that is looked at


def interleaved_one_forward_one_backward(
    rank: int,
    *,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group_size: int,
    are_independent: bool = False,
) -> InterleavedSchedule:
    """Make the 1F1B schedule of a rank with several stages.

    Args:
        group_size: microbatches that run through a chunk before the next chunk's turn.
        are_independent: no backward needs what a forward of the same tick makes, on the last rank either: backwards come a tick later.

    Raises:
        ValueError: there are too few microbatches for the ranks or the groups.

    Ranks: pure; the schedules of all ranks match.
    Source: Megatron-LM (arXiv:2104.04473, section 2.2.2), with the groups of Megatron-Core.
    """
    _check_ranks(num_ranks, num_chunks)
    check_microbatches(num_microbatches, num_ranks=num_ranks, group_size=group_size)
    order = _order(num_chunks, num_microbatches, group_size)
    forwards = [Act(True, microbatch, chunk) for microbatch, chunk in order]
    backwards = [Act(False, microbatch, num_chunks - 1 - chunk) for microbatch, chunk in order]
    first_backward = (num_chunks - 1) * group_size + 2 * (num_ranks - 1) + are_independent

    def forward(of_rank: int, tick: int) -> Act | None:
        return _at(forwards, tick - of_rank)

    def backward(of_rank: int, tick: int) -> Act | None:
        return _at(backwards, tick - first_backward + of_rank)

    ticks = range(first_backward + len(order) + num_ranks)
    halves = [_half(rank, tick, make, num_ranks, num_chunks) for tick in ticks for make in (forward, backward)]
    return _without_pauses(halves)


def interleaved_forwards_only(
    rank: int, *, num_ranks: int, num_chunks: int, num_microbatches: int, group_size: int
) -> InterleavedSchedule:
    """Make the schedule of an evaluation, of any number of microbatches; arguments as for training.

    Where a group is smaller than the number of ranks, these pause until the last one has run its first microbatch.

    Raises:
        ValueError: there is one rank, or no microbatch.
    """
    if num_microbatches < 1:
        raise ValueError(f"an evaluation must have at least one microbatch, got {num_microbatches}")
    _check_ranks(num_ranks, num_chunks)
    order, ticks_of = _order(num_chunks, num_microbatches, group_size), dict[tuple[int, int], int]()
    last = -1
    for microbatch, chunk in order:
        last = max(last + 1, ticks_of.get((microbatch, chunk - 1), -num_ranks) + num_ranks)
        ticks_of[microbatch, chunk] = last
    forwards = {tick: Act(True, *place) for place, tick in ticks_of.items()}

    def forward(of_rank: int, tick: int) -> Act | None:
        return forwards.get(tick - of_rank)

    ticks = range(last + 1 + num_ranks)
    return _without_pauses([_half(rank, tick, forward, num_ranks, num_chunks) for tick in ticks])


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """Return (microbatch, chunk) of a rank's forwards, in order."""
    return _order(num_model_chunks, num_microbatches, microbatch_group_size_per_vp_stage)


def check_microbatches(num_microbatches: int, *, num_ranks: int, group_size: int) -> None:
    """Check that interleaved stages can run so many microbatches.

    Raises:
        ValueError: they cannot; a group would be too small to keep all ranks busy, and wait for itself.
    """
    left = num_microbatches % group_size
    if not num_ranks <= group_size <= num_microbatches or 0 < left < num_ranks:
        raise ValueError(
            "interleaved pipeline stages must run microbatches in groups of at least as many as there are pipeline ranks, also "
            f"the last group: got {num_microbatches} microbatches in groups of {group_size} on {num_ranks} ranks; choose a "
            "global batch of a multiple of these groups, or another microbatch_group_size_per_vp_stage"
        )


def _check_ranks(num_ranks: int, num_chunks: int) -> None:
    if num_ranks < 2 or num_chunks < 1:
        raise ValueError(f"interleaved stages need several ranks, got {num_ranks} ranks and {num_chunks} chunks")


def _order(num_chunks: int, num_microbatches: int, group_size: int) -> list[tuple[int, int]]:
    return [
        (microbatch, chunk)
        for first in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + group_size, num_microbatches))
    ]


def _at(acts: list[Act], index: int) -> Act | None:
    return acts[index] if 0 <= index < len(acts) else None


def _half(rank: int, tick: int, make: _Made, num_ranks: int, num_chunks: int) -> HalfTick:
    message = partial(_message, num_ranks=num_ranks, num_chunks=num_chunks)
    act = make(rank, tick)
    send = None if act is None else message(act, rank)
    receive = None
    for neighbour in {(rank - 1) % num_ranks, (rank + 1) % num_ranks}:
        made = make(neighbour, tick)
        target = (neighbour + (1 if made is not None and made.is_forward else -1)) % num_ranks
        if made is not None and target == rank:
            receive = message(made, neighbour) or receive
    return HalfTick(act, Exchange(send, receive), tick)


def _message(act: Act, rank: int, *, num_ranks: int, num_chunks: int) -> Message | None:
    """Return the message that an act makes; None: it is the end of the pipeline."""
    if act.is_forward:
        chunk = act.chunk + (rank == num_ranks - 1)
        return Message("output", act.microbatch, chunk) if chunk < num_chunks else None
    chunk = act.chunk - (rank == 0)
    return Message("gradient", act.microbatch, chunk) if chunk >= 0 else None


def _without_pauses(halves: list[HalfTick]) -> InterleavedSchedule:
    return tuple(half for half in halves if half.act is not None or half.exchange != Exchange(None, None))
