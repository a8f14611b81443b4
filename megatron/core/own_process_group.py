"""Process groups of which each rank makes its own alone, however many there are.

[Note: one group for each rank] ``torch.distributed.new_group`` wants every rank to make every process group: thousands on
16,384 ranks, for each of which NCCL splits the communicator of all ranks. Where no rank is in two of them, one call on each rank is enough. The
groups are named after their first ranks, which torch would number in the order in which they are made, and NCCL makes all of them
in one split.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

_BARRIER = "TORCH_DIST_INIT_BARRIER"


def make_own_group(ranks: Sequence[int] | None, **settings: Any) -> ProcessGroup | None:
    """Make one of several disjoint process groups, that which holds this rank; None where none does.

    Args:
        ranks: of the group, in ascending order; None: no group holds this rank.
        settings: those of ``torch.distributed.new_group``.

    Raises:
        RuntimeError: torch.distributed is not initialised.

    Ranks: all of the run, each with its own group; blocks until the ranks of the group have come, with NCCL all ranks.
    """
    source = _split_source()
    if source is not None and _some_share_a_color(ranks):
        return _make_in_turn(ranks, settings)
    # torch names the next group by this number, which is the same on all ranks before and after.
    world, first = distributed_c10d._world, distributed_c10d._world.group_count
    try:
        if ranks is not None:
            world.group_count = first + ranks[0]
            with _without_barrier():
                made: ProcessGroup = dist.new_group(list(ranks), **settings)
            return made
        if source is not None:
            source.perform_nocolor_split(_default_group().bound_device_id)
        return None
    finally:
        world.group_count = first + dist.get_world_size()


def _default_group() -> Any:
    return distributed_c10d._get_default_group()


def _split_source() -> Any:
    """Return the backend whose communicator all ranks split to make a group; None where groups are made without the others."""
    default = _default_group()
    return distributed_c10d._get_split_source(default) if default.bound_device_id else None


def _some_share_a_color(ranks: Sequence[int] | None) -> bool:
    """Return whether NCCL would take two groups for one: what it tells them apart by are hashes of their ranks."""
    own = (-1, -1) if ranks is None else (distributed_c10d._process_group_color(list(ranks)), ranks[0])
    device = _default_group().bound_device_id or torch.device("cpu")
    found = torch.zeros(dist.get_world_size(), 2, dtype=torch.int64, device=device)
    found[dist.get_rank()] = torch.tensor(own, device=device)
    dist.all_reduce(found)
    distinct = set(map(tuple, found.tolist()))
    return len({color for color, _ in distinct}) < len(distinct)


def _make_in_turn(ranks: Sequence[int] | None, settings: dict[str, Any]) -> ProcessGroup | None:
    """Make all groups on all ranks, one after the other."""
    found: list[list[int] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, ranks and list(ranks))
    own: ProcessGroup | None = None
    for group in sorted({tuple(some) for some in found if some}):
        made = dist.new_group(list(group), **settings)
        own = made if dist.get_rank() in group else own
    return own


@contextmanager
def _without_barrier() -> Iterator[None]:
    """Do not wait for the ranks of other groups where the environment asks for that: they come under other names."""
    asked = os.environ.pop(_BARRIER, None)
    try:
        yield
    finally:
        if asked is not None:
            os.environ[_BARRIER] = asked
