"""The observer that compares ranks: what ``fully_shard`` of this package gives its contexts."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.checks.debug_mode import DebugMode
from megatron.core.distributed.fsdp.checks.order_errors import LOAD_ON_ALL_RANKS
from megatron.core.distributed.fsdp.checks.same_units import check_same_unit
from megatron.core.distributed.fsdp.checks.step_order import NUM_BITS, OrderComparison, StepOrder
from megatron.core.distributed.fsdp.comm.process_group import compare_on_ranks
from megatron.core.distributed.fsdp.comm.transport import Transport, unfinished
from megatron.core.distributed.fsdp.runtime.context import FsdpContext
from megatron.core.distributed.fsdp.runtime.observer import Ballot, Observer
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit


class RankObserver(Observer):
    """Compares what the ranks of a context do: their units, loads, collectives and, in the debug mode, values.

    Attributes:
        order: of this rank's collectives.
        is_debugging: as in ``Observer``.
    """

    num_extra = NUM_BITS
    compare_unit = staticmethod(check_same_unit)

    def __init__(self, context: FsdpContext) -> None:
        super().__init__(context)
        self._context = weakref.ref(context)
        self._device = context.device
        self.order = StepOrder(context.registry)
        self.issued = self.order.issued.append
        self._comparison = OrderComparison(self.order, context.device)
        self._debug: DebugMode | None = None
        self._has_new_units = False

    # ---- units and forwards -------------------------------------------------------------------------------------

    def registered(self, unit: FsdpUnit) -> None:
        """Start over with the order of collectives, since groups have other numbers; watch the unit's weights."""
        self._has_new_units = True
        self.order.forget()
        if self._debug is not None:
            self._debug.watch(unit.own_groups)

    def forward_begins(self) -> None:
        """Check that weights were loaded on all ranks, or on none, before the first forward. Blocks the host, once."""
        if not self._has_new_units:
            return
        self._has_new_units = False
        for mesh, groups in self._by_mesh().items():
            loads = {f"the number of loads of {group}": group.weights.freshness.num_loads for group in groups}
            axes = [mesh.get_group(axis) for axis in range(mesh.ndim)]
            compare_on_ranks(loads, axes, groups[0].device, remedy=LOAD_ON_ALL_RANKS)

    def pass_begins(self) -> None:
        """Count the pass, by which ranks name the place where they left the plan."""
        self.order.begin_pass()

    def pass_failed(self) -> None:
        """Drop the order of the collectives of a step that will not end."""
        self.order.forget()

    def departed(self, ran: str, planned: str) -> None:
        """Post where this step left its plan."""
        self.order.depart(ran, planned, self._running.planner.num_uses)

    # ---- collectives --------------------------------------------------------------------------------------------

    def failed(self, what: str, axes: Sequence[Transport], error: RuntimeError) -> RuntimeError:
        """Return the error for a collective that failed; it names what ranks ran in different orders, if they did."""
        context = self._context()
        if context is None:
            return unfinished(what, axes, error)
        return self.order.failure(what, axes, error, context.planner.num_uses)

    def recorded(self) -> None:
        """Check that all ranks have issued the same collectives, before they plan with what they recorded."""
        # A step that has ended left its list there. Forwards without a backward end no step.
        self.order.compare(self.order.issued or self.order.latest.entries, self._running.groups, self._device)

    # ---- the end of a step --------------------------------------------------------------------------------------

    def step_ended(self, ballots: Sequence[Ballot]) -> None:
        """Send the bits of the step's order with the count of missing gradients."""
        self.order.end_step()
        self._comparison.fill(ballots)

    def backward_ended(self, *, is_last: bool) -> None:
        """Compare the order of the step that has ended, and, in the debug mode, check the gradients."""
        if is_last:
            self._comparison.compare(self._running.streams)
        if self._debug is not None:
            self._debug.end_backward(is_last=is_last)

    def check(self) -> None:
        """Compare the answers of earlier steps that have arrived."""
        self._comparison.check()

    # ---- for people ---------------------------------------------------------------------------------------------

    def debug(self, value: bool) -> None:
        """Turn the debug mode on. Ranks: all, with the same value, which they compare where there are units; blocks the host."""
        for mesh in self._by_mesh():
            axes = [mesh.get_group(axis) for axis in range(mesh.ndim)]
            compare_on_ranks({"debug of the context": value}, axes, self._device)
        if not value and self.is_debugging:
            raise ValueError("the debug mode must stay on once it is, got debug=False; make the model again")
        if value and not self.is_debugging:
            self.is_debugging = True
            self._debug = DebugMode(self._running, self.order)
            self.issued = self._debug.issued

    @property
    def progress(self) -> tuple[int, str]:
        """How many collectives this rank has begun, and the last ones in words; from any thread."""
        return self.order.progress

    @property
    def _running(self) -> FsdpContext:
        context = self._context()
        assert context is not None, "a context reports only while it exists"
        return context

    def _by_mesh(self) -> dict[DeviceMesh, list[FsdpParameterGroup]]:
        by_mesh: dict[DeviceMesh, list[FsdpParameterGroup]] = {}
        for group in self._running.groups:
            by_mesh.setdefault(group.group_mesh.mesh, []).append(group)
        return by_mesh
