"""The comparison of what must be the same on all ranks: a number from each, and the values only where numbers differ."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.comm.transport import raise_foreign

_MAX_NAMED = 8

LOAD_ON_ALL_RANKS = (
    "Call load_state_dict on all ranks; where rank 0 alone has the values, set_model_state_dict of torch.distributed.checkpoint with "
    "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)"
)


class OrderDiffersError(RuntimeError):
    """Ranks have issued different collectives. All ranks of the mesh raise it together."""


def are_alike(text: str, groups: Sequence[ProcessGroup], device: torch.device) -> bool:
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


def check_alike(
    settings: Mapping[str, Any], groups: Sequence[ProcessGroup], device: torch.device, *, remedy: str = ""
) -> None:
    """Compare values by name between the ranks of a mesh, given by the process group of each axis.

    Raises:
        ValueError: on all ranks, if a value differs; with its name, the values and their ranks.

    Ranks: all of the mesh; blocks the host.
    """
    groups = [group for group in groups if group.size() > 1]
    texts = {name: repr(value) for name, value in settings.items()}
    if groups and not are_alike(repr(texts), groups, device):
        found = list(_differences(exchange(texts, groups)))
        named = [
            f"{name} must be the same on all ranks that shard together, got {got}" for name, got in found[:_MAX_NAMED]
        ]
        more = [f"and {len(found) - _MAX_NAMED} more differ"] if len(found) > _MAX_NAMED else []
        raise ValueError("; ".join((*named, *more, *((remedy,) if remedy else ()))))


def check_same_order(
    collectives: Sequence[str], groups: Sequence[ProcessGroup], device: torch.device, *, first: int = 1
) -> None:
    """Compare the collectives that the ranks of a mesh have issued, in order; ``first`` is the number of the first of them.

    Raises:
        OrderDiffersError: on all ranks, with the first one that differs.
        RuntimeError: ranks do not come to compare.

    Ranks: all of the mesh; blocks the host.
    """
    groups = [group for group in groups if group.size() > 1]
    if not groups:
        return
    try:
        if are_alike(repr(list(collectives)), groups, device):
            return
        orders = exchange(list(collectives), groups)
    except RuntimeError as error:
        raise_foreign(error)
        raise RuntimeError(
            f"ranks must compare the order of their collectives after the same step, got on rank {dist.get_rank()}: {error}; "
            "if no rank has stopped, ranks ran units in different orders, or different numbers of steps"
        ) from error
    at = next(
        at for at in range(max(map(len, orders.values()))) if len({_at(order, at) for order in orders.values()}) > 1
    )
    raise order_differs(f"collective {first + at}", {rank: _at(order, at) for rank, order in orders.items()})


def order_differs(place: str, got: Mapping[int, str]) -> OrderDiffersError:
    """Return the error that names what ranks did at the first place where that differs, by rank."""
    return OrderDiffersError(
        f"all ranks must run the same units in one order, got as {place} the {by_value(got)}; those would exchange wrong "
        "weights or gradients. Make what decides which units run the same on all ranks"
    )


def writes_differ(place: str, got: Mapping[int, str], *, is_load: bool) -> OrderDiffersError:
    """Return the error for weights that some ranks alone have updated, or loaded; ``got`` names updates or loads by rank."""
    if is_load:
        return OrderDiffersError(
            f"all ranks must load the same weights, got {place} the {by_value(got)}: each rank loads its own part. {LOAD_ON_ALL_RANKS}"
        )
    return OrderDiffersError(
        f"all ranks must update weights alike, got {place} the {by_value(got)}: their weights are of different steps now. Load a "
        "checkpoint, and let all ranks decide together whether optimizer.step() is called: all-reduce what decides (a loss that is "
        "not finite)"
    )


def made_in_other_orders(got: Mapping[int, str]) -> OrderDiffersError:
    """Return the error for units that ranks sharded in different orders; ``got`` has the places of the first one, by rank."""
    return OrderDiffersError(
        f"all ranks must call fully_shard on the same modules in one order, got units that run together as number {by_value(got)}: "
        "they got each other's weights when they were sharded. Call fully_shard on lists, not on sets, and build the model anew"
    )


def _at(order: Sequence[str], at: int) -> str:
    return order[at] if at < len(order) else "end"


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
