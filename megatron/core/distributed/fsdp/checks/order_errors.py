"""What ranks raise when the orders of their collectives differ, and how they exchange them when no collective can.

The errors are built from words by rank. ``Notices`` carries such words through the store of the process groups, for ranks
whose collectives have failed already.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.comm.process_group import by_value, exchange, is_same_on_ranks
from megatron.core.distributed.fsdp.comm.transport import raise_foreign

PATIENCE_S = 5.0
"""Seconds for which a rank waits for the notices of others, and for the store."""

LOAD_ON_ALL_RANKS = (
    "Call load_state_dict on all ranks; where rank 0 alone has the values, set_model_state_dict of torch.distributed.checkpoint with "
    "StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)"
)


class OrderDiffersError(RuntimeError):
    """Ranks have issued different collectives. All ranks of the mesh raise it together."""


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
    # A hash first, which is one small all-reduce: the lists themselves are exchanged only where they differ.
    try:
        if is_same_on_ranks(repr(list(collectives)), groups, device):
            return
        orders = exchange(list(collectives), groups)
    except RuntimeError as error:
        raise_foreign(error)
        raise RuntimeError(
            f"ranks must compare the order of their collectives after the same step, got on rank {dist.get_rank()}: {error}; "
            "if no rank has stopped, ranks ran units in different orders, or different numbers of steps"
        ) from error
    # Hashes differ, so the lists do. Every rank has all of them, and raises the same error.
    at, got = first_difference(orders) or (0, {})
    raise order_differs(f"collective {first + at}", got)


def first_difference(orders: Mapping[int, Sequence[str]]) -> tuple[int, dict[int, str]] | None:
    """Return the first place where lists of ranks differ, and what each rank has there; None where they are the same."""
    for at in range(max(map(len, orders.values()), default=0)):
        got = {rank: order[at] if at < len(order) else "end" for rank, order in orders.items()}
        if len(set(got.values())) > 1:
            return at, got
    return None


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
        f"all ranks must update weights in the same way, got {place} the {by_value(got)}: their weights are of different steps now. Load a "
        "checkpoint, and let all ranks decide together whether optimizer.step() is called: all-reduce what decides (a loss that is "
        "not finite)"
    )


def made_in_other_orders(got: Mapping[int, str]) -> OrderDiffersError:
    """Return the error for units that ranks sharded in different orders; ``got`` has the places of the first one, by rank."""
    return OrderDiffersError(
        f"all ranks must call fully_shard on the same modules in one order, got units that run together as number {by_value(got)}: "
        "they got each other's weights when they were sharded. Call fully_shard on lists, not on sets, and build the model again"
    )


class Notices:
    """The notices of a set of ranks: each writes its own, over the one before, and reads the others'.

    Where there is no store, or it does not answer, nothing is written and none is there.

    Args:
        name: the same on all ranks, and of these alone.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def post(self, notice: Mapping[str, Any]) -> None:
        """Write this rank's notice. Ranks: each alone; blocks the host for one answer of the store."""
        text = json.dumps(notice)
        _run(lambda: dist.distributed_c10d._get_default_store().set(self._key(dist.get_rank()), text))

    def read(self, ranks: Sequence[int], step: int, field: str, *, waits: bool) -> dict[int, dict[str, Any]]:
        """Return the notices about this step that have the field, by rank; ``waits``: give all ranks a few seconds to write theirs.

        Ranks: each alone; blocks the host.
        """
        found: dict[int, dict[str, Any]] = {}

        def look() -> None:
            # The store answers without collectives, which have failed already or would not match.
            store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + PATIENCE_S
            while True:
                for rank in ranks:
                    if rank not in found and store.check([self._key(rank)]):
                        notice = json.loads(store.get(self._key(rank)))
                        # A notice of an earlier step stays in the store until its rank writes over it.
                        if notice["step"] == step and field in notice:
                            found[rank] = notice
                if not waits or len(found) == len(ranks) or time.monotonic() > deadline:
                    return
                time.sleep(0.05)

        _run(look)
        return dict(sorted(found.items()))

    def _key(self, rank: int) -> str:
        return f"fsdp/notices/{self._name}/{rank}"


def _run(act: Callable[[], object]) -> None:
    """Run ``act`` in a thread, for a few seconds at most: who serves the store may be stopped, and a client waits for it."""

    def quietly() -> None:
        try:
            act()
        except (RuntimeError, ValueError):  # no store, or a broken connection to it
            return

    # A daemon: the process must be able to end while the store does not answer.
    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(timeout=2 * PATIENCE_S)
