"""Unshards a unit when it runs, and prefetches the units that the plan says come next."""

from __future__ import annotations

import torch

from megatron.core.distributed.fsdp.layout.plan import Use
from megatron.core.distributed.fsdp.runtime.planner import Planner
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit
from megatron.core.distributed.fsdp.runtime.unit_registry import UnitRegistry
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder


class PrefetchScheduler:
    """Begins forwards and backwards of units, one after the other.

    Ranks: all, in the same order of units.
    """

    def __init__(self, registry: UnitRegistry, unsharder: Unsharder, planner: Planner) -> None:
        self.registry, self.unsharder, self.planner = registry, unsharder, planner

    def begin(self, unit: FsdpUnit, *, backward: bool) -> None:
        """Unshard the unit and, where the plan holds, prefetch the units after it."""
        following = self.planner.use(unit, backward=backward)
        for group in unit.groups:
            self.unsharder.unshard(group, forward=not backward)
        for use in following:
            # Without gradients neither a backward follows, nor another forward on these weights.
            if backward or torch.is_grad_enabled() or not (use.backward or self.planner.is_forward_again(use)):
                self._prefetch(use)

    def prefetch_first(self) -> None:
        """Prefetch the units with which the plan begins, if there is one. No forward is under way."""
        plan = self.planner.plan
        if plan is None:
            return
        self.unsharder.reshard_idle()
        for use in (plan.uses[0], *plan.ahead[0]):  # the root, which may have no weights, and the first in it
            self._prefetch(use)

    def _prefetch(self, use: Use) -> None:
        unit = self.registry.by_number[use.unit]
        for group in () if unit is None else unit.groups:
            self.unsharder.prefetch(group, forward=not use.backward)
