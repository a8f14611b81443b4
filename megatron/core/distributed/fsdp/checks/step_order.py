"""The order of a rank's collectives and updates, and the errors for ranks with other orders."""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.checks.order_errors import (
    Notices,
    OrderDiffersError,
    check_same_order,
    first_difference,
    made_in_other_orders,
    order_differs,
    writes_differ,
)
from megatron.core.distributed.fsdp.comm.transport import Transport
from megatron.core.distributed.fsdp.layout.plan import GATHERS, KINDS, LOAD, NUM_KINDS, REDUCTIONS, SYNC, UPDATE
from megatron.core.distributed.fsdp.runtime.observer import Ballot, Observer

NUM_BITS = 24
"""Bits of the hash of a step's collectives. Ranks add each bit up on its own, so the sums are exact in fp32."""

_MAX_ENTRIES = 100_000

# Failed comparisons in this process: each has keys of its own in the store, which keeps what was written for earlier ones.
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
    """The collectives of one step, as ``Observer.issued`` got them; ``earlier`` is the hash of those that are not kept."""

    step: int
    entries: list[int]
    earlier: int = 0
    departure: Departure | None = None


class StepOrder(Observer):
    """Keeps the order of this rank's collectives, and explains failures by those of other ranks. See [Note: the order of a step].

    Attributes:
        entries: collectives, updates and loads since the last step ended.
        latest: the step that ended last.
        departure: where this step left its plan.
    """

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._context, self._registry, self._device = weakref.ref(context), context.registry, context.device
        self.entries: list[int] = []
        self.issued = self.entries.append
        self.latest = Order(0, [])
        self.departure: Departure | None = None
        self._earlier = 0
        self._num_passes = 0
        self._counts: Counter[int] = Counter()  # by kind, of what ``entries`` held before

    # ---- a step -------------------------------------------------------------------------------------------------

    def pass_begins(self) -> None:
        """Count the pass, by which ranks name the place where they left the plan."""
        self._num_passes += 1
        if len(self.entries) > _MAX_ENTRIES:  # evaluation without end: no step ends to clear the list
            self._earlier = _hash(self._earlier, self.entries)
            self._clear()

    def departed(self, ran: str, planned: str) -> None:
        """Post that this step leaves its plan, for ranks that may wait for this one in vain. Ranks: each alone."""
        # The first departure of a step is what ranks compare: later ones follow from it.
        if self.departure is None:
            self.departure = Departure(self._place, ran, planned)
            self._notices().post(self._notice())

    def step_ended(self, ballots: Sequence[Ballot]) -> None:
        """Begin the order of the next step."""
        before = self.latest
        is_other = self.entries != before.entries or self._earlier != before.earlier
        # A step like the one before keeps that one's list, by which the comparison sees that its bits are in the ballots already.
        entries = self.entries.copy() if is_other else before.entries
        self.latest = Order(before.step + 1, entries, self._earlier, self.departure)
        self.pass_failed()

    def pass_failed(self) -> None:
        """Start over: a step has ended, or will not end, or groups have other numbers."""
        self._clear()
        self.departure, self._earlier, self._num_passes = None, 0, 0

    def _clear(self) -> None:
        self._counts.update(map(NUM_KINDS.__rmod__, self.entries))
        self.entries.clear()  # in place: ``issued`` is this list's ``append``

    @property
    def _running(self) -> Any:
        """The ``FsdpContext``, which owns this observer: a strong reference would keep the model's memory after its deletion."""
        context = self._context()
        assert context is not None, "a context reports only while it exists"
        return context

    @property
    def _place(self) -> tuple[int, int]:
        return self._num_passes, self._running.planner.num_uses

    @property
    def num_gathers(self) -> int:
        """All-gathers that this rank has begun; from any thread."""
        return self._count(GATHERS)

    @property
    def num_reductions(self) -> int:
        """Reductions that this rank has begun; from any thread."""
        return self._count(REDUCTIONS)

    def _count(self, kinds: Sequence[int]) -> int:
        # A list first, in one call to C: the main thread may append meanwhile.
        now = list(map(NUM_KINDS.__rmod__, self.entries))
        return sum(self._counts[kind] + now.count(kind) for kind in kinds)

    @property
    def progress(self) -> tuple[int, str]:
        """How many collectives this rank has begun, and the last all-gather and reduction in words; from any thread."""
        # Copies: another thread asks, while the main thread appends.
        newest = [*self.latest.entries, *self.entries][::-1]
        gathered, reduced = (
            self._registry.describe(next((entry // NUM_KINDS for entry in newest if entry % NUM_KINDS in kinds), -1))
            for kinds in (GATHERS, REDUCTIONS)
        )
        num_gathers, num_reductions = self.num_gathers, self.num_reductions
        return (
            num_gathers + num_reductions,
            f"all-gather {num_gathers} of {gathered}, reduction {num_reductions} of {reduced}",
        )

    def bits(self, members: Collection[int]) -> list[float]:
        """Return the hash [NUM_BITS] of the last step's collectives of these groups, and of which groups they are, bit by bit."""
        # Numbers of groups too: ranks that made their units in another order issue the same entries, of other weights.
        number = _hash(_hash(self.latest.earlier, self._made(members)), _of(self.latest.entries, members))
        return [float(number >> bit & 1) for bit in range(NUM_BITS)]

    def _made(self, members: Collection[int]) -> list[int]:
        return [self._registry.numbers_on_ranks[index] for index in sorted(members)]

    def compare(self, entries: Sequence[int], groups: Sequence[FsdpParameterGroup], *, first: int = 1) -> None:
        """Check that all ranks issue the same of these groups in one order.

        Units of equal size in another order would exchange wrong shards, and a backend sees only sizes.

        Raises:
            RuntimeError: on all ranks, with the first collective that differs.

        Ranks: all of the groups' meshes; blocks the host.
        """
        if is_capturing(self._device):
            return
        # In the order of the registry, the same on all ranks: each comparison is a collective over its mesh.
        for mesh, members in by_mesh(groups).items():
            words = [self._words(entry) for entry in _of(entries, [group.index for group in members])]
            check_same_order(words, mesh.get_all_groups(), self._device, first=first)

    # ---- errors -------------------------------------------------------------------------------------------------

    def difference(self, order: Order, members: Collection[int], ranks: Sequence[int]) -> OrderDiffersError:
        """Return the error for an order of these groups that is not that of all these ranks. Ranks: all; blocks the host."""
        notices = self._notices(ranks)
        issued = [self._words(entry) for entry in _of(order.entries, members)]
        notices.post({"step": order.step, "issued": issued, "made": self._made(members)})
        found = notices.read(ranks, order.step, "issued", waits=True)
        for numbers in zip(*(notice["made"] for notice in found.values()), strict=False):
            if len(set(numbers)) > 1:
                return made_in_other_orders(dict(zip(found, map(str, numbers), strict=True)))
        differs = first_difference({rank: notice["issued"] for rank, notice in found.items()})
        if differs is None:
            return order_differs(f"collectives of step {order.step}", {dist.get_rank(): "others than some rank"})
        at, got = differs
        # A rank that has not updated or loaded has another entry in that place; its collectives are not what is wrong.
        for kind in (UPDATE, LOAD):
            writes = {rank: word if word.startswith(KINDS[kind]) else "none" for rank, word in got.items()}
            if len(set(writes.values())) > 1:
                return writes_differ(f"before the end of step {order.step}", writes, is_load=kind == LOAD)
        return order_differs(f"collective {at + 1} of step {order.step}", got)

    def failed(self, what: str, axes: Sequence[Transport], error: RuntimeError) -> RuntimeError:
        """Return the error for a failed collective; it names what ranks ran in different orders, where they posted that.

        Args:
            what: the collective, in words.
            axes: transports of the mesh axes along which it goes.
            error: what the backend raised.

        Ranks: each alone; blocks the host.
        """
        failed = super().failed(what, axes, error)
        meshes = [group.group_mesh.mesh.mesh for group in self._registry.groups]
        ranks = sorted({rank for mesh in meshes for rank in mesh.flatten().tolist()})
        notices, own = self._notices(), self._notice()
        notices.post(own)
        step, departure = own["step"], self.departure
        found = notices.read(ranks, step, "place", waits=departure is not None)
        departures = [notice for notice in found.values() if notice["ran"]]
        if not departures:
            return failed
        # Ranks that have come past the first departure without one ran what the plan says there; the others have not come to it.
        first = min(departures, key=lambda notice: notice["place"])
        got = {
            rank: notice["ran"] if notice["ran"] and notice["place"] == first["place"] else first["planned"]
            for rank, notice in found.items()
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

    def _notice(self) -> dict[str, Any]:
        return {"step": self.latest.step + 1, **asdict(self.departure or Departure(self._place, "", ""))}

    def _notices(self, ranks: Sequence[int] | None = None) -> Notices:
        """Return the notices of this model's ranks or, for a comparison of ``ranks`` that failed, new ones of these."""
        # Models of one process must not read each other's notices, so the name is made of their parameters.
        names = "\n".join(map(str, self._registry.groups))
        name = f"{zlib.crc32(names.encode()):08x}"
        if ranks is not None:
            _num_differences[name, tuple(ranks)] += 1
            name += f"/{zlib.crc32(repr(list(ranks)).encode()):08x}/{_num_differences[name, tuple(ranks)]}"
        return Notices(name)

    def _words(self, entry: int) -> str:
        group, kind = self._registry.group(entry // NUM_KINDS), entry % NUM_KINDS
        size = "" if kind in (UPDATE, LOAD) else f" ({group.layout.segment_numel * group.layout.num_ranks} elements)"
        return f"{KINDS[kind]} of {group}{size}"


def by_mesh(groups: Iterable[FsdpParameterGroup]) -> dict[DeviceMesh, list[FsdpParameterGroup]]:
    """Return the groups by the mesh over which they are sharded."""
    found: dict[DeviceMesh, list[FsdpParameterGroup]] = {}
    for group in groups:
        found.setdefault(group.group_mesh.mesh, []).append(group)
    return found


def is_capturing(device: torch.device) -> bool:
    """Return whether a step is captured into a CUDA graph: nothing can be compared then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _of(entries: Sequence[int], members: Collection[int]) -> list[int]:
    """Return what ranks must issue together of these groups: a rank may evaluate by itself where nothing is gathered."""
    return [entry for entry in entries if entry // NUM_KINDS in members and entry % NUM_KINDS != SYNC]


def _hash(earlier: int, entries: Sequence[int]) -> int:
    return zlib.crc32(repr(entries).encode(), earlier)
