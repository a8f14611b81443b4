"""The comparison of what must be the same on all ranks: a number from each, and the values only where numbers differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_MAX_NAMED = 8


def is_same_on_ranks(text: str, groups: Sequence[ProcessGroup], device: torch.device) -> bool:
    """Return whether all ranks have the same text; the same answer on all of them.

    Args:
        groups: a process group for each axis of the ranks' mesh.
        device: one that the process groups serve.

    Ranks: all of the mesh; blocks the host. One all-reduce of 16 bytes for each axis.
    """
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
    extremes = torch.tensor([number, -number], device=device)
    for group in groups:
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    highest, lowest = extremes.tolist()
    return bool(highest == -lowest)


def exchange(value: Any, groups: Sequence[ProcessGroup]) -> dict[int, Any]:
    """Return the values of all ranks, by global rank. Ranks: all of the mesh with these axes; blocks the host."""
    values = {dist.get_rank(): value}
    for group in groups:
        of_axis: list[Any] = [None] * group.size()
        dist.all_gather_object(of_axis, values, group=group)
        values = {rank: theirs for some in of_axis for rank, theirs in some.items()}
    return dict(sorted(values.items()))


def compare_on_ranks(
    settings: Mapping[str, Any], groups: Sequence[ProcessGroup], device: torch.device, *, remedy: str = ""
) -> None:
    """Compare values by name between the ranks of a mesh, given by the process group of each axis.

    Raises:
        ValueError: on all ranks, if a value differs; with its name, the values and their ranks.

    Ranks: all of the mesh; blocks the host.
    """
    groups = [group for group in groups if group.size() > 1]
    texts = {name: repr(value) for name, value in settings.items()}
    if groups and not is_same_on_ranks(repr(texts), groups, device):
        found = list(_differences(exchange(texts, groups)))
        named = [
            f"{name} must be the same on all ranks that shard together, got {got}" for name, got in found[:_MAX_NAMED]
        ]
        more = [f"and {len(found) - _MAX_NAMED} more differ"] if len(found) > _MAX_NAMED else []
        raise ValueError("; ".join((*named, *more, *((remedy,) if remedy else ()))))


def by_value(values: Mapping[int, str]) -> str:
    """Format the values of ranks, each with its ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return " and ".join(f"{value} on ranks {_some(ranks)}" for value, ranks in ranks_of.items())


def _differences(texts: Mapping[int, Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    for name in dict.fromkeys(name for values in texts.values() for name in values):
        of_rank = {rank: values.get(name, "nothing") for rank, values in texts.items()}
        if len(set(of_rank.values())) > 1:
            yield name, by_value(of_rank)
    names = [set(values) for values in texts.values()]
    if all(own == names[0] for own in names) and len({tuple(values) for values in texts.values()}) > 1:
        rest = [name for name in texts[min(texts)] if len({tuple(values).index(name) for values in texts.values()}) > 1]
        got = by_value({rank: ", ".join(name for name in values if name in rest) for rank, values in texts.items()})
        yield "the order of what is compared", got


def _some(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return f"{ranks[:_MAX_NAMED]}{more}"
