"""Gives ``None`` back to parameters that got a gradient on no rank, as they would have without sharding."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.comm.transport import Transport, raise_foreign
from megatron.core.distributed.fsdp.runtime.grad_reducer import GradReducer
from megatron.core.distributed.fsdp.runtime.same_order import NUM_BITS, Order, SameOrder
from megatron.core.distributed.fsdp.runtime.streams import Role
from megatron.core.distributed.fsdp.runtime.unit import UnitRegistry

logger = logging.getLogger(__name__)


@dataclass
class _Ballot:
    """The parameters of the groups over some axes, each of which counts the ranks that have a gradient of it.

    Behind them are the bits of the number that stands for a step's collectives of all groups over these axes.

    Attributes:
        axes: of the groups' mesh, with several ranks.
        first: place of each group's first parameter, by group number.
        members: numbers of the groups over these axes, frozen ones too.
        ranks: all that count.
        everything: [P + NUM_BITS] what a rank says that has all gradients: ones, and bits.
        counts: [P + NUM_BITS] what all ranks have said.
        told: the step whose bits are in ``everything``.
        expected: [NUM_BITS] the last counts where all ranks have issued the same.
        is_fake: a process group communicates nothing, so nothing is to be heard.
    """

    axes: tuple[Transport, ...]
    first: dict[int, int]
    members: frozenset[int]
    ranks: list[int]
    everything: torch.Tensor
    counts: torch.Tensor
    is_fake: bool
    told: list[int] | None = None
    expected: list[float] = field(default_factory=list)


class _Answer:
    """Counts of bits on their way to the host, of a step whose host does not wait for them.

    Attributes:
        ballots: what was counted.
        counts: [NUM_BITS] of each, pinned.
        expected: [NUM_BITS] of each, where all ranks have issued the same.
        order: the step's.
        arrived: an event that fires when the counts are there.
    """

    def __init__(self, ballots: list[_Ballot]) -> None:
        self.ballots = ballots
        self.counts = [torch.empty(NUM_BITS, pin_memory=ballot.counts.is_cuda) for ballot in ballots]
        self.expected: list[list[float]] = []
        self.order = Order(0, [])
        self.arrived: Any = None


class MissingGradients:
    """Asks at the end of a step's last backward which gradients are missing on all ranks.

    Ranks that have all gradients take part without waiting for the answer: they know theirs. Only a rank that lacks some
    reads it, which blocks its host. [Note: gradients that are missing] in DESIGN.md. The same all-reduce tells whether all
    ranks have issued the same collectives: [Note: the order of a step].
    """

    def __init__(
        self, registry: UnitRegistry, grad_reducer: GradReducer, order: SameOrder, device: torch.device
    ) -> None:
        self._registry, self._grad_reducer, self._order, self.device = registry, grad_reducer, order, device
        self._ballots: list[_Ballot] | None = None
        self._has_warned = False
        self._lacking: list[FsdpParameterGroup] = []
        # What this rank lacked, and what all ranks did, in the step before.
        self._awaited: list[_Answer] = []
        self._spent: list[_Answer] = []
        self._latest: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})

    def clear(self) -> None:
        """Forget the groups: others are registered."""
        self.rebuild_ballots()
        self._order.forget()

    def rebuild_ballots(self) -> None:
        """Rebuild the ballots before the next count, because the set of trained groups changed. Ranks: all."""
        self._ballots = None
        self._spent.clear()

    def ask(self) -> None:
        """Tell the other ranks what this one lacks. Ranks: all of the groups' meshes; all reductions are launched."""
        self._lacking = self._grad_reducer.lacking
        self._order.end_step()
        if self._ballots is None or self._ballots:
            self._grad_reducer.follow_up(self._count)

    def settle(self) -> None:
        """Set ``param.grad`` to None where no rank had a gradient. Compute has waited for the answer to ``ask``."""
        lacking, self._lacking = self._lacking, []
        if not lacking:
            return
        lacks = {group.index: sorted(group.grads.absent) for group in lacking}
        if not self._is_capturing:
            self._latest = (lacks, self._missing_everywhere(lacking, lacks))
        if self._latest[0] == lacks:  # a captured step does as the step before it
            for group in lacking:
                group.grads.remove(self._latest[1][group.index])

    @property
    def _is_capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _count(self) -> None:
        """Count the ranks that have each gradient, on the current stream."""
        if self._ballots is None:
            self._ballots = self._make_ballots()
        for ballot in self._ballots:
            if ballot.told is not self._order.latest.entries and not self._is_capturing:
                self._tell(ballot)
            ballot.counts.copy_(ballot.everything)
            mine = [group for group in self._lacking if group.index in ballot.first]
            if mine and not self._is_capturing:
                places = [ballot.first[group.index] + index for group in mine for index in sorted(group.grads.absent)]
                ballot.counts[torch.tensor(places, device=self.device)] = 0.0
            try:
                for axis in ballot.axes:
                    axis.all_reduce(ballot.counts, ballot.counts)
            except RuntimeError as error:
                raise_foreign(error)
                raise self._grad_reducer.failed("count of missing gradients", ballot.axes, error) from error

    # ---- the order of collectives -------------------------------------------------------------------------------

    def _tell(self, ballot: _Ballot) -> None:
        """Write into the ballot what this rank has issued in this step, which is not what it has in the last one."""
        bits = self._order.bits(ballot.members)
        ballot.everything[-NUM_BITS:] = torch.tensor(bits, device=self.device)
        ballot.expected = [prod(axis.size for axis in ballot.axes) * bit for bit in bits]
        ballot.told = self._order.latest.entries

    def check_order(self) -> None:
        """Check that all ranks have issued the same collectives in this step. Compute has waited for the answer to ``ask``.

        On CUDA a rank that left its plan waits for the answer, which blocks the host. One that did not hears it later.

        Raises:
            OrderDiffersError: on all ranks, with the first collective that differs.
        """
        if self._is_capturing or not self._ballots:
            return
        if self._waits:
            for ballot in self._ballots:
                self._compare(ballot, ballot.expected, ballot.counts[-NUM_BITS:], self._order.latest)
            return
        self.check_heard()
        answer = self._spent.pop() if self._spent else _Answer(self._ballots)
        for ballot, counts in zip(answer.ballots, answer.counts, strict=True):
            counts.copy_(ballot.counts[-NUM_BITS:], non_blocking=True)
        answer.arrived = self._grad_reducer.streams.record(Role.COMPUTE, answer.arrived)
        answer.expected, answer.order = [ballot.expected for ballot in self._ballots], self._order.latest
        self._awaited.append(answer)

    @property
    def _waits(self) -> bool:
        """True if the host waits for the answer: where collectives are done when they return, and out of plan."""
        return self.device.type != "cuda" or self._order.latest.departure is not None

    def check_heard(self) -> None:
        """Do what ``check_order`` did not wait for, as far as answers are on the host."""
        while self._awaited and not self._is_capturing and self._awaited[0].arrived.query():
            answer = self._awaited.pop(0)
            for ballot, expected, counts in zip(answer.ballots, answer.expected, answer.counts, strict=True):
                self._compare(ballot, expected, counts, answer.order)
            if answer.ballots is self._ballots:
                self._spent.append(answer)

    def _compare(self, ballot: _Ballot, expected: list[float], counts: torch.Tensor, order: Order) -> None:
        if counts.tolist() != expected and not ballot.is_fake:
            raise self._order.difference(order, ballot.members, ballot.ranks)

    # ---- gradients ----------------------------------------------------------------------------------------------

    def _missing_everywhere(
        self, lacking: Iterable[FsdpParameterGroup], lacks: dict[int, list[int]]
    ) -> dict[int, list[int]]:
        """Return the parameters that got a gradient on no rank, by group number."""
        found = dict(lacks)
        for ballot in self._ballots or []:
            mine = [group for group in lacking if group.index in ballot.first]
            counts = ballot.counts.tolist() if mine else []
            for group in mine:
                number_of = counts[ballot.first[group.index] :]
                found[group.index] = [index for index in lacks[group.index] if not number_of[index]]
                elsewhere = [index for index in lacks[group.index] if number_of[index]]
                if elsewhere and not self._has_warned:
                    self._has_warned = True
                    logger.warning(
                        "%s got no gradient on this rank and one on %d others: zeros count for it here, as for all such parameters",
                        group.name_of(elsewhere[0]),
                        int(number_of[elsewhere[0]]),
                    )
        return found

    def _make_ballots(self) -> list[_Ballot]:
        by_ranks: dict[tuple[tuple[int, ...], ...], list[FsdpParameterGroup]] = {}
        for group in self._registry.groups:
            axes = [axis for axis in group.group_mesh.axes if axis.size > 1]
            if axes:
                by_ranks.setdefault(tuple(tuple(axis.ranks) for axis in axes), []).append(group)
        ballots = []
        for members in by_ranks.values():
            first, count = {}, 0
            for group in members:
                if group.trainable:
                    first[group.index] = count
                    count += len(group.sharded)
            if not first:
                continue
            ones = torch.ones(count + NUM_BITS, dtype=torch.float32, device=self.device)
            axes = [axis for axis in members[0].group_mesh.axes if axis.size > 1]
            indices = frozenset(group.index for group in members)
            mesh = members[0].group_mesh.mesh
            is_fake = any(dist.get_backend(mesh.get_group(axis)) == "fake" for axis in range(mesh.ndim))
            ballots.append(
                _Ballot(
                    tuple(axes),
                    first,
                    indices,
                    mesh.mesh.flatten().tolist(),
                    ones,
                    torch.empty_like(ones),
                    is_fake,
                )
            )
        return ballots
