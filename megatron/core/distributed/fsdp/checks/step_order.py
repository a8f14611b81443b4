"""Whether all ranks have issued the same collectives and updates: compared once a step, and after a collective that failed."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod
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
from megatron.core.distributed.fsdp.comm.streams import Role, Streams
from megatron.core.distributed.fsdp.comm.transport import Transport, unfinished
from megatron.core.distributed.fsdp.layout.plan import GATHERS, KINDS, LOAD, NUM_KINDS, REDUCTIONS, SYNC, UPDATE
from megatron.core.distributed.fsdp.runtime.observer import Ballot
from megatron.core.distributed.fsdp.runtime.unit import UnitRegistry

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


class StepOrder:
    """The order of this rank's collectives, and the errors for ranks with other orders.

    See [Note: the order of a step].

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

    def begin_pass(self) -> None:
        """Count a forward that begins while no graph waits."""
        self._num_passes += 1
        if len(self.issued) > _MAX_ENTRIES:  # evaluation without end: no step ends to clear the list
            self._earlier = _hash(self._earlier, self.issued)
            self._clear()

    def depart(self, ran: str, planned: str, num_uses: int) -> None:
        """Post that this step leaves its plan, for ranks that may wait for this one in vain. Ranks: each alone."""
        if self.departure is None:
            self.departure = Departure((self._num_passes, num_uses), ran, planned)
            self._notices().post(self._notice(num_uses))

    def end_step(self) -> None:
        """Begin the order of the next step."""
        before = self.latest
        is_other = self.issued != before.entries or self._earlier != before.earlier
        # A step like the one before keeps that one's list, by which ``OrderComparison`` sees that its bits are sent already.
        entries = self.issued.copy() if is_other else before.entries
        self.latest = Order(before.step + 1, entries, self._earlier, self.departure)
        self.forget()

    def forget(self) -> None:
        """Start over: a pass was given up, or other units are registered."""
        self._clear()
        self.departure, self._earlier, self._num_passes = None, 0, 0

    def _clear(self) -> None:
        self._counts.update(map(NUM_KINDS.__rmod__, self.issued))
        self.issued.clear()  # in place: the core keeps the list's bound ``append``

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
    def progress(self) -> tuple[int, str]:
        """How many collectives this rank has begun, and the last all-gather and reduction in words; from any thread."""
        newest = [*self.latest.entries, *self.issued][::-1]
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
        number = _hash(_hash(self.latest.earlier, self._made(members)), _of(self.latest.entries, members))
        return [float(number >> bit & 1) for bit in range(NUM_BITS)]

    def _made(self, members: Collection[int]) -> list[int]:
        return [self._registry.numbers_on_ranks[index] for index in sorted(members)]

    def compare(
        self,
        entries: Sequence[int],
        groups: Sequence[FsdpParameterGroup],
        device: torch.device,
        *,
        first: int = 1,
    ) -> None:
        """Check that all ranks issue the same of these groups in one order.

        Units of equal size in another order would exchange wrong shards, and a backend sees only sizes.

        Raises:
            RuntimeError: on all ranks, with the first collective that differs.

        Ranks: all of the groups' meshes; blocks the host.
        """
        if is_capturing(device):
            return
        by_mesh: dict[DeviceMesh, list[int]] = {}
        for group in groups:
            by_mesh.setdefault(group.group_mesh.mesh, []).append(group.index)
        for mesh, members in by_mesh.items():
            words = [self._words(entry) for entry in _of(entries, members)]
            check_same_order(words, [mesh.get_group(axis) for axis in range(mesh.ndim)], device, first=first)

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
        for kind in (UPDATE, LOAD):
            writes = {rank: word if word.startswith(KINDS[kind]) else "none" for rank, word in got.items()}
            if len(set(writes.values())) > 1:
                return writes_differ(f"before the end of step {order.step}", writes, is_load=kind == LOAD)
        return order_differs(f"collective {at + 1} of step {order.step}", got)

    def failure(self, what: str, axes: Sequence[Transport], error: RuntimeError, num_uses: int) -> RuntimeError:
        """Return the error for a failed collective; it names what ranks ran in different orders, where they posted that.

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
        found = notices.read(ranks, step, "place", waits=departure is not None)
        departures = [notice for notice in found.values() if notice["ran"]]
        if not departures:
            return failed
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

    def _notice(self, num_uses: int) -> dict[str, Any]:
        departure = self.departure or Departure((self._num_passes, num_uses), "", "")
        return {
            "step": self.latest.step + 1,
            "place": list(departure.place),
            "ran": departure.ran,
            "planned": departure.planned,
        }

    def _notices(self, ranks: Sequence[int] | None = None) -> Notices:
        """Return the notices of this model's ranks or, for a comparison of ``ranks`` that failed, new ones of these."""
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


@dataclass
class _Tail:
    """The end of a ballot, in which the ranks over its axes add up the bits of their steps.

    Attributes:
        sent: [NUM_BITS] of this rank, in the ballot.
        counts: [NUM_BITS] of all ranks, in the ballot.
        members: numbers of the groups whose collectives are compared.
        ranks: all that count.
        num_ranks: how often each bit is counted.
        is_fake: a process group communicates nothing, so there is nothing to compare.
        expected: [NUM_BITS] the counts if all ranks have issued the same.
    """

    sent: torch.Tensor
    counts: torch.Tensor
    members: frozenset[int]
    ranks: list[int]
    num_ranks: int
    is_fake: bool
    expected: list[float] = field(default_factory=list)

    def send(self, bits: list[float]) -> None:
        """Write this rank's bits into the ballot, where they stay for steps with the same order."""
        self.sent.copy_(torch.tensor(bits, device=self.sent.device))
        self.expected = [self.num_ranks * bit for bit in bits]

    @staticmethod
    def of(ballot: Ballot) -> _Tail:
        """Return the end of the ballot."""
        mesh = ballot.mesh
        return _Tail(
            ballot.everything[-NUM_BITS:],
            ballot.counts[-NUM_BITS:],
            ballot.members,
            mesh.mesh.flatten().tolist(),
            prod(axis.size for axis in ballot.axes),
            any(dist.get_backend(mesh.get_group(axis)) == "fake" for axis in range(mesh.ndim)),
        )


class _Answer:
    """Counts of bits on their way to the host, of a step whose host does not wait for them.

    Attributes:
        tails: what was counted.
        counts: [NUM_BITS] of each, pinned.
        expected: [NUM_BITS] of each.
        order: the step's.
        arrived: an event that fires when the counts are there.
    """

    def __init__(self, tails: list[_Tail]) -> None:
        self.tails = tails
        self.counts = [torch.empty(NUM_BITS, pin_memory=tail.counts.is_cuda) for tail in tails]
        self.expected: list[list[float]] = []
        self.order = Order(0, [])
        self.arrived: Any = None

    def take(self, order: Order, streams: Streams) -> None:
        """Copy the counts of this step to the host, without waiting for it."""
        for tail, counts in zip(self.tails, self.counts, strict=True):
            counts.copy_(tail.counts, non_blocking=True)
        self.arrived = streams.record(Role.COMPUTE, self.arrived)
        self.expected, self.order = [tail.expected for tail in self.tails], order


class OrderComparison:
    """Compares the hashes of steps between ranks, in the all-reduce that counts missing gradients."""

    def __init__(self, order: StepOrder, device: torch.device) -> None:
        self._order, self._device = order, device
        self._ballots: Sequence[Ballot] = ()
        self._tails: list[_Tail] = []
        self._sent: list[int] | None = None  # entries of the step whose bits are in the ballots
        self._awaited: list[_Answer] = []
        self._spent: list[_Answer] = []  # whose pinned memory serves again

    def fill(self, ballots: Sequence[Ballot]) -> None:
        """Write the bits of the step that has ended into the ballots, unless they are there from the step before."""
        if ballots is not self._ballots:
            self._ballots, self._tails = ballots, list(map(_Tail.of, ballots))
            self._sent, self._spent = None, []
        entries = self._order.latest.entries
        if self._sent is entries or is_capturing(self._device):
            return
        self._sent = entries
        for tail in self._tails:
            tail.send(self._order.bits(tail.members))

    def compare(self, streams: Streams) -> None:
        """Check that all ranks have issued the same collectives in the step that has ended. Compute has waited for the ballots.

        On CUDA only a rank that left its plan waits for the answer, which blocks the host; others read it later (``check``).

        Raises:
            OrderDiffersError: on all ranks, with the first collective that differs.
        """
        if not self._tails or is_capturing(self._device):
            return
        if self._waits:
            for tail in self._tails:
                self._compare(tail, tail.expected, tail.counts, self._order.latest)
            return
        self.check()
        answer = self._spent.pop() if self._spent else _Answer(self._tails)
        answer.take(self._order.latest, streams)
        self._awaited.append(answer)

    @property
    def _waits(self) -> bool:
        """True if the host waits for the answer: where collectives are done when they return, and out of plan."""
        return self._device.type != "cuda" or self._order.latest.departure is not None

    def check(self) -> None:
        """Compare the answers that have arrived since ``compare`` did not wait for them."""
        while self._awaited and not is_capturing(self._device) and self._awaited[0].arrived.query():
            answer = self._awaited.pop(0)
            for tail, expected, counts in zip(answer.tails, answer.expected, answer.counts, strict=True):
                self._compare(tail, expected, counts, answer.order)
            if answer.tails is self._tails:
                self._spent.append(answer)

    def _compare(self, tail: _Tail, expected: list[float], counts: torch.Tensor, order: Order) -> None:
        if counts.tolist() != expected and not tail.is_fake:
            raise self._order.difference(order, tail.members, tail.ranks)


def is_capturing(device: torch.device) -> bool:
    """Return whether a step is captured into a CUDA graph: nothing can be compared then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _of(entries: Sequence[int], members: Collection[int]) -> list[int]:
    """Return what ranks must issue together of these groups: a rank may evaluate by itself where nothing is gathered."""
    return [entry for entry in entries if entry // NUM_KINDS in members and entry % NUM_KINDS != SYNC]


def _hash(earlier: int, entries: Sequence[int]) -> int:
    return zlib.crc32(repr(entries).encode(), earlier)
