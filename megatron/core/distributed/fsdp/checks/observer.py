"""The observer that compares ranks: what ``fully_shard`` of this package gives its contexts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp.api.module import fsdp_modules
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.checks.aliases import refuse_aliases, remember, stretches_of
from megatron.core.distributed.fsdp.checks.debug_mode import DebugMode
from megatron.core.distributed.fsdp.checks.kept_weights import KeptWeights
from megatron.core.distributed.fsdp.checks.order_errors import LOAD_ON_ALL_RANKS
from megatron.core.distributed.fsdp.checks.same_units import check_experts, check_same_unit
from megatron.core.distributed.fsdp.checks.step_order import NUM_BITS, Order, StepOrder, by_mesh, is_capturing
from megatron.core.distributed.fsdp.comm.process_group import compare_on_ranks
from megatron.core.distributed.fsdp.comm.streams import Role, Streams
from megatron.core.distributed.fsdp.runtime.context import FsdpContext
from megatron.core.distributed.fsdp.runtime.observer import Ballot
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit


class RankObserver(StepOrder):
    """Compares what the ranks of a context do: their units, loads, collectives and, in the debug mode, values.

    Hashes of steps are compared in the all-reduce that counts missing gradients. On CUDA only a rank that left its plan waits for
    the answer, which blocks the host; others read it at a later step or forward (``raise_found``).

    Attributes:
        is_debugging: as in ``Observer``.
    """

    num_extra = NUM_BITS
    compare_experts = staticmethod(check_experts)

    def __init__(self, context: FsdpContext) -> None:
        super().__init__(context)
        self._debug: DebugMode | None = None
        self._kept_weights = KeptWeights()
        self._has_new_units = False
        self._ballots: Sequence[Ballot] = ()
        self._tails: list[_Tail] = []
        self._sent: list[int] | None = None  # entries of the step whose bits are in the ballots
        self._awaited: list[_Answer] = []
        self._spent: list[_Answer] = []  # whose pinned memory serves again

    # ---- units and forwards -------------------------------------------------------------------------------------

    @staticmethod
    def check_unit(
        module: nn.Module, own_modules: Sequence[tuple[str, nn.Module]], mesh: Any, placements: Any, **given: Any
    ) -> Callable[[FsdpUnit], object]:
        """Refuse parameters that share memory, and units that differ between ranks."""
        stretches = stretches_of(own_modules)
        refuse_aliases(stretches, {child._fsdp_unit for child in fsdp_modules(module)})
        check_same_unit(module, own_modules, mesh, placements, **given)
        return partial(remember, stretches)

    def registered(self, unit: FsdpUnit) -> None:
        """Start over with the order of collectives, since groups have other numbers; watch the unit's weights."""
        self._has_new_units = True
        self.pass_failed()
        if self._debug is not None:
            self._debug.watch(unit.own_groups)

    def forward_begins(self) -> None:
        """Check that weights were loaded on all ranks, or on none, before the first forward. Blocks the host, once."""
        if not self._has_new_units:
            return
        self._has_new_units = False
        for mesh, groups in by_mesh(self._registry.groups).items():
            loads = {f"the number of loads of {group}": group.weights.freshness.num_loads for group in groups}
            compare_on_ranks(loads, mesh.get_all_groups(), groups[0].device, remedy=LOAD_ON_ALL_RANKS)

    def recorded(self) -> None:
        """Check that all ranks have issued the same collectives, before they plan with what they recorded."""
        # A step that has ended left its list there. Forwards without a backward end no step.
        self.compare(self.entries or self.latest.entries, self._registry.groups)

    # ---- gradients ----------------------------------------------------------------------------------------------

    def watched(self, group: FsdpParameterGroup) -> None:
        """Count the references to the group's weights while the user has none."""
        self._kept_weights.add(group)

    def came_late(self, group: FsdpParameterGroup) -> None:
        """Check that nobody kept the group's weights, which may hold other values by now.

        Raises:
            RuntimeError: somebody did; the message names a weight.
        """
        self._kept_weights.check(group, self._running.planner.arenas)

    # ---- the end of a step --------------------------------------------------------------------------------------

    def step_ended(self, ballots: Sequence[Ballot]) -> None:
        """Write the bits of the step's order into the ballots, unless they are there from the step before."""
        super().step_ended(ballots)
        if ballots is not self._ballots:
            self._ballots, self._tails = ballots, list(map(_Tail, ballots))
            self._sent, self._spent = None, []
        entries = self.latest.entries
        # Not in a captured step: the bits come from the host, and a replay would send those of the capture.
        if self._sent is entries or is_capturing(self._device):
            return
        self._sent = entries
        for tail in self._tails:
            tail.send(self.bits(tail.members))

    def backward_ended(self, *, is_last: bool) -> None:
        """Compare the order of the step that has ended, and, in the debug mode, check the gradients.

        Raises:
            OrderDiffersError: on all ranks, with the first collective that differs.
        """
        if is_last and self._tails and not is_capturing(self._device):
            if self._waits:
                for tail in self._tails:
                    self._compare(tail, tail.expected, tail.counts, self.latest)
            else:
                self.raise_found()
                answer = self._spent.pop() if self._spent else _Answer(self._tails)
                answer.take(self.latest, self._running.streams)
                self._awaited.append(answer)
        if self._debug is not None:
            self._debug.end_backward(is_last=is_last)

    @property
    def _waits(self) -> bool:
        """True if the host waits for the answer: where collectives are done when they return, and out of plan."""
        return self._device.type != "cuda" or self.latest.departure is not None

    def raise_found(self) -> None:
        """Compare the answers that have arrived since ``backward_ended`` did not wait for them."""
        while self._awaited and not is_capturing(self._device) and self._awaited[0].arrived.query():
            # Answers arrive in order, since one stream copies them.
            answer = self._awaited.pop(0)
            for tail, expected, counts in zip(answer.tails, answer.expected, answer.counts, strict=True):
                self._compare(tail, expected, counts, answer.order)
            # Of other tails, ballots were made again: other groups, or other counts.
            if answer.tails is self._tails:
                self._spent.append(answer)

    def _compare(self, tail: _Tail, expected: list[float], counts: torch.Tensor, order: Order) -> None:
        # A process group that is fake communicates nothing, so its counts say nothing.
        if counts.tolist() != expected and not tail.is_fake:
            raise self.difference(order, tail.members, tail.ranks)

    # ---- for people ---------------------------------------------------------------------------------------------

    def debug(self, value: bool) -> None:
        """Turn the debug mode on. Ranks: all, with the same value, which they compare where there are units; blocks the host."""
        for mesh in by_mesh(self._registry.groups):
            compare_on_ranks({"debug of the context": value}, mesh.get_all_groups(), self._device)
        if not value and self.is_debugging:
            raise ValueError("the debug mode must stay on once it is, got debug=False; make the model again")
        if value and not self.is_debugging:
            self.is_debugging = True
            # ``issued`` is asked for before each collective, so the debug mode sees all from the next one on.
            self._debug = DebugMode(self._running, self)
            self.issued = self._debug.issued


class _Tail:
    """The end of a ballot, in which the ranks over its axes add up the bits of their steps.

    Attributes:
        sent, counts: [NUM_BITS] of this rank, and of all ranks, in the ballot.
        members: numbers of the groups whose collectives are compared.
        ranks: all that count.
        is_fake: a process group communicates nothing, so there is nothing to compare.
        expected: [NUM_BITS] the counts if all ranks have issued the same.
    """

    def __init__(self, ballot: Ballot) -> None:
        mesh = ballot.mesh
        self.sent, self.counts = ballot.everything[-NUM_BITS:], ballot.counts[-NUM_BITS:]
        self.members, self.ranks = ballot.members, mesh.mesh.flatten().tolist()
        self._num_ranks = prod(axis.size for axis in ballot.axes)
        self.is_fake = any(dist.get_backend(group) == "fake" for group in mesh.get_all_groups())
        self.expected: list[float] = []

    def send(self, bits: list[float]) -> None:
        """Write this rank's bits into the ballot, where they stay for steps with the same order."""
        self.sent.copy_(torch.tensor(bits, device=self.sent.device))
        self.expected = [self._num_ranks * bit for bit in bits]


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
