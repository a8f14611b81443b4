"""Which rank of those that share tensors computes with which of them whole, and in which round of exchanges."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

# Elements that a rank receives in a round, unless one tensor has more: small enough that rounds overlap, large enough that
# messages are long.
ROUND_NUMEL = 2**25


def owners_of(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Give each tensor to one rank so that the ranks' work is about equal: [T] ranks.

    The dearest tensor goes first, each to the rank with the least work so far; of equal ones the first. So the busiest
    rank has at most a third more than with the best choice, and no more than the mean and the dearest tensor together.

    Args:
        costs: [T] work of each tensor, in any unit.

    Ranks: pure; every rank computes the same answer.
    Source: Graham, Bounds on multiprocessing timing anomalies (1969), longest processing time first.
    """
    owners = [0] * len(costs)
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda at: (-costs[at], at)):
        load, rank = loads[0]
        owners[index] = rank
        heapq.heapreplace(loads, (load + costs[index], rank))
    return owners


def rounds_of(owners: Sequence[int], numels: Sequence[int], *, round_numel: int = ROUND_NUMEL) -> list[int]:
    """Give each tensor a round, such that each owner has whole tensors of about ``round_numel`` elements in each: [T].

    An owner takes its tensors in their order, so tensors that come first are ready first.

    Ranks: pure; every rank computes the same answer.
    """
    rounds: list[int] = []
    filled: dict[int, tuple[int, int]] = {}
    for owner, numel in zip(owners, numels, strict=True):
        number, used = filled.get(owner, (0, 0))
        if used and used + numel > round_numel:
            number, used = number + 1, 0
        filled[owner] = number, used + numel
        rounds.append(number)
    return rounds
