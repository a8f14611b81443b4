"""A unit's weights from the moment that it needs them, and the next unit's from the moment that the plan says."""

from __future__ import annotations

import torch

from megatron.core.distributed.fsdp.layout.plan import Use
from megatron.core.distributed.fsdp.runtime.planner import Planner
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit
from megatron.core.distributed.fsdp.runtime.unit_registry import UnitRegistry
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder


class PrefetchScheduler:
    """Forwards and backwards of units, one after the other, as users of weights.

    Attributes:
        gathers_ahead: the next unit's weights are gathered ahead of its use.

    Ranks: all, in the same order of units.
    """

    def __init__(self, registry: UnitRegistry, unsharder: Unsharder, planner: Planner) -> None:
        self.registry, self.unsharder, self.planner = registry, unsharder, planner
        self.gathers_ahead = True

    def begin(self, unit: FsdpUnit, *, backward: bool) -> None:
        """Afterwards compute may read the unit's weights, and, where the plan holds, the next unit's are on their way."""
        following = self.planner.use(unit, backward=backward)
        for group in unit.groups:
            self.unsharder.unshard(group, forward=not backward)
        for use in following if self.gathers_ahead else ():
            # Without gradients neither a backward follows, nor another forward on these weights.
            if backward or torch.is_grad_enabled() or not (use.backward or self.planner.is_forward_again(use)):
                self._prefetch(use, forward=not use.backward)

    def prepare_first(self) -> None:
        """Afterwards, if there is a plan, the weights with which it begins are on their way. No forward is under way."""
        plan = self.planner.plan
        if plan is None:
            return
        self.unsharder.reshard_idle()
        for use in (plan.uses[0], *plan.ahead[0]):  # the root, which may have no weights, and the first in it
            self._prefetch(use, forward=True)

    def _prefetch(self, use: Use, *, forward: bool) -> None:
        unit = self.registry.refs[use.unit]()
        if unit is not None:
            for group in unit.groups:
                self.unsharder.prefetch(group, forward=forward)
