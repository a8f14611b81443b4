"""Whether all ranks have issued the same collectives and updates, compared once a step and after a collective that failed."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron.core.distributed.fsdp.comm.alike import (
    OrderDiffersError,
    made_in_other_orders,
    order_differs,
    writes_differ,
)
from megatron.core.distributed.fsdp.comm.notices import Notices
from megatron.core.distributed.fsdp.comm.transport import Transport, unfinished
from megatron.core.distributed.fsdp.layout.plan import GATHERS, KINDS, LOAD, NUM_KINDS, REDUCTIONS, UPDATE
from megatron.core.distributed.fsdp.runtime.unit import UnitRegistry

NUM_BITS = 24
"""Of the number that stands for a step's collectives. Ranks add each bit up, so any number of them is exact in fp32."""

_MAX_ENTRIES = 100_000


_num_differences: Counter[tuple[str, tuple[int, ...]]] = Counter()


@dataclass(frozen=True)
class Departure:
    """The first use of a unit in a step that its plan did not expect.

    Attributes:
        place: passes since the last step's end, and uses in this pass before this one.
        ran: what ran, in words.
        planned: what the plan expected.
    """

    place: tuple[int, int]
    ran: str
    planned: str


@dataclass
class Order:
    """The collectives of one step, as ``SameOrder.issued`` has them; ``earlier`` stands for those that are not kept."""

    step: int
    entries: list[int]
    earlier: int = 0
    departure: Departure | None = None


class SameOrder:
    """The order of this rank's collectives, and what other ranks say of theirs.

    [Note: the order of a step] in DESIGN.md.

    Attributes:
        issued: collectives since the last step ended.
        latest: the step that ended last.
        departure: where this step left its plan.
    """

    def __init__(self, registry: UnitRegistry) -> None:
        self._registry = registry
        self.issued: list[int] = []
        self.latest = Order(0, [])
        self.departure: Departure | None = None
        self._earlier = 0
        self._num_passes = 0
        self._counts: Counter[int] = Counter()  # by kind, of what ``issued`` held before

    # ---- a step -------------------------------------------------------------------------------------------------

    def count_pass(self) -> None:
        """Count a forward that begins while no graph waits."""
        self._num_passes += 1
        if len(self.issued) > _MAX_ENTRIES:  # forwards alone, without end
            self._earlier = _number(self._earlier, self.issued)
            self._clear()

    def depart(self, ran: str, planned: str, num_uses: int) -> None:
        """Note that this step leaves its plan, also for other ranks, which may wait for this one in vain. Ranks: each alone."""
        if self.departure is None:
            self.departure = Departure((self._num_passes, num_uses), ran, planned)
            self._notices().post(self._notice(num_uses))

    def note_update(self, group: int) -> None:
        """Note that an optimizer updates weights of the context: those of the group of this number, and maybe others."""
        self.issued.append(NUM_KINDS * group + UPDATE)

    def note_load(self, group: int) -> None:
        """Note that ``load_state_dict`` writes to weights of the group of this number."""
        self.issued.append(NUM_KINDS * group + LOAD)

    def end_step(self) -> bool:
        """Begin the order of the next step; return whether the collectives are other ones than those of the step before."""
        before = self.latest
        is_other = self.issued != before.entries or self._earlier != before.earlier
        entries = self.issued.copy() if is_other else before.entries
        self.latest = Order(before.step + 1, entries, self._earlier, self.departure)
        self.forget()
        return is_other

    def forget(self) -> None:
        """Begin anew: a pass was given up, or other units are registered."""
        self._clear()
        self.departure, self._earlier, self._num_passes = None, 0, 0

    def _clear(self) -> None:
        self._counts.update(map(NUM_KINDS.__rmod__, self.issued))
        self.issued.clear()

    @property
    def num_gathers(self) -> int:
        """All-gathers that this rank has begun; from any thread."""
        return self._count(GATHERS)

    @property
    def num_reductions(self) -> int:
        """Reductions that this rank has begun; from any thread."""
        return self._count(REDUCTIONS)

    def _count(self, kinds: Sequence[int]) -> int:
        now = list(map(NUM_KINDS.__rmod__, self.issued))
        return sum(self._counts[kind] + now.count(kind) for kind in kinds)

    @property
    def latest_groups(self) -> tuple[int, int]:
        """Numbers of the groups of the last all-gather and the last reduction; -1 where there was none; from any thread."""
        newest = [*self.latest.entries, *self.issued][::-1]
        gathered, reduced = (
            next((entry // NUM_KINDS for entry in newest if entry % NUM_KINDS in kinds), -1)
            for kinds in (GATHERS, REDUCTIONS)
        )
        return gathered, reduced

    def bits(self, members: Collection[int]) -> list[float]:
        """Return the number [NUM_BITS] of the last step's collectives of these groups, and of which groups they are, bit by bit."""
        number = _number(_number(self.latest.earlier, self._made(members)), _of(self.latest.entries, members))
        return [float(number >> bit & 1) for bit in range(NUM_BITS)]

    def _made(self, members: Collection[int]) -> list[int]:
        return [self._registry.numbers_on_ranks[index] for index in sorted(members)]

    # ---- errors -------------------------------------------------------------------------------------------------

    def difference(self, order: Order, members: Collection[int], ranks: Sequence[int]) -> OrderDiffersError:
        """Return the error for an order of these groups that is not that of all these ranks. Ranks: all; blocks the host."""
        notices = self._notices(_next_difference(self._name, ranks))
        issued = [self._words(entry) for entry in _of(order.entries, members)]
        notices.post({"step": order.step, "issued": issued, "made": self._made(members)})
        told = notices.read(ranks, order.step, "issued", waits=True)
        of_rank = {rank: notice["issued"] for rank, notice in told.items()}
        for numbers in zip(*(notice["made"] for notice in told.values()), strict=False):
            if len(set(numbers)) > 1:
                return made_in_other_orders(dict(zip(told, map(str, numbers), strict=True)))
        for at in range(max(map(len, of_rank.values()), default=0)):
            got = {rank: words[at] if at < len(words) else "end" for rank, words in of_rank.items()}
            if len(set(got.values())) > 1:
                for kind in (UPDATE, LOAD):
                    writes = {rank: word if word.startswith(KINDS[kind]) else "none" for rank, word in got.items()}
                    if len(set(writes.values())) > 1:
                        return writes_differ(f"before the end of step {order.step}", writes, is_load=kind == LOAD)
                return order_differs(f"collective {at + 1} of step {order.step}", got)
        return order_differs(f"collectives of step {order.step}", {dist.get_rank(): "others than some rank"})

    def failure(self, what: str, axes: Sequence[Transport], error: RuntimeError, num_uses: int) -> RuntimeError:
        """Return the error for a collective that failed: that ranks ran units in different orders, if they say so.

        Args:
            what: the collective, in words.
            axes: transports of the mesh axes along which it goes.
            error: what the backend raised.
            num_uses: uses in this pass before the step left its plan, or until now.

        Ranks: each alone; blocks the host.
        """
        failed = unfinished(what, axes, error)
        meshes = [group.group_mesh.mesh.mesh for group in self._registry.groups]
        ranks = sorted({rank for mesh in meshes for rank in mesh.flatten().tolist()})
        notices, own = self._notices(), self._notice(num_uses)
        notices.post(own)
        step, departure = own["step"], self.departure
        told = notices.read(ranks, step, "place", waits=departure is not None)
        departures = [notice for notice in told.values() if notice["ran"]]
        if not departures:
            return failed
        first = min(departures, key=lambda notice: notice["place"])
        got = {
            rank: notice["ran"] if notice["ran"] and notice["place"] == first["place"] else first["planned"]
            for rank, notice in told.items()
            if notice["place"] > first["place"] or (notice["ran"] and notice["place"] == first["place"])
        }
        if len(set(got.values())) > 1:
            differs = order_differs(f"use {first['place'][1] + 1} of step {step}", got)
            return OrderDiffersError(f"{differs}. On rank {dist.get_rank()} the {what} failed: {error}")
        if departure is not None:
            return RuntimeError(
                f"{failed}. This rank ran the {departure.ran} where its plan says the {departure.planned}; so must all ranks"
            )
        return failed

    def _notice(self, num_uses: int) -> dict[str, Any]:
        departure, step = self.departure, self.latest.step + 1
        if departure is None:
            return {"step": step, "place": [self._num_passes, num_uses], "ran": "", "planned": ""}
        return {"step": step, "place": list(departure.place), "ran": departure.ran, "planned": departure.planned}

    def _notices(self, of: str = "") -> Notices:
        return Notices(self._name + of)

    @property
    def _name(self) -> str:
        names = "\n".join(map(str, self._registry.groups))
        return f"{zlib.crc32(names.encode()):08x}"

    def _words(self, entry: int) -> str:
        group = self._registry.group(entry // NUM_KINDS)
        if entry % NUM_KINDS in (UPDATE, LOAD):
            return f"{KINDS[entry % NUM_KINDS]} of {group}"
        return f"{KINDS[entry % NUM_KINDS]} of {group} ({group.layout.segment_numel * group.layout.num_ranks} elements)"


def _next_difference(name: str, ranks: Sequence[int]) -> str:
    """Return what tells a difference between these ranks from those of models with the same names before, whose notices are there."""
    _num_differences[name, tuple(ranks)] += 1
    return f"/{zlib.crc32(repr(list(ranks)).encode()):08x}/{_num_differences[name, tuple(ranks)]}"


def _of(entries: Sequence[int], members: Collection[int]) -> list[int]:
    return [entry for entry in entries if entry // NUM_KINDS in members]


def _number(earlier: int, entries: Sequence[int]) -> int:
    return zlib.crc32(repr(entries).encode(), earlier)
