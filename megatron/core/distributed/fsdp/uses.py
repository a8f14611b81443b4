"""A unit's weights from the moment that it needs them, and the next unit's from the moment that the plan says."""

from __future__ import annotations

import torch

from megatron.core.distributed.fsdp.gatherer import Gatherer
from megatron.core.distributed.fsdp.members import Members
from megatron.core.distributed.fsdp.plan import Use
from megatron.core.distributed.fsdp.planner import Planner
from megatron.core.distributed.fsdp.unit import FsdpUnit


class Uses:
    """Forwards and backwards of units, one after the other, as users of weights.

    Attributes:
        gathers_ahead: the next unit's weights are gathered ahead of its use.

    Ranks: all, in the same order of units.
    """

    def __init__(self, members: Members, gatherer: Gatherer, planner: Planner) -> None:
        self.members, self.gatherer, self.planner = members, gatherer, planner
        self.gathers_ahead = True

    def begin(self, unit: FsdpUnit, *, backward: bool) -> None:
        """Afterwards compute may read the unit's weights, and, where the plan holds, the next unit's are on their way."""
        following = self.planner.use(unit, backward=backward)
        for group in unit.groups:
            self.gatherer.acquire(group, forward=not backward)
        for use in following if self.gathers_ahead else ():
            # Without gradients neither a backward follows, nor another forward on these weights.
            if backward or torch.is_grad_enabled() or not (use.backward or self.planner.is_forward_again(use)):
                self._prefetch(use, forward=not use.backward)

    def prepare_first(self) -> None:
        """Afterwards, if there is a plan, the weights with which it begins are on their way. No forward is under way."""
        plan = self.planner.plan
        if plan is None:
            return
        self.gatherer.release_idle()
        for use in (plan.uses[0], *plan.ahead[0]):  # the root, which may have no weights, and the first in it
            self._prefetch(use, forward=True)

    def _prefetch(self, use: Use, *, forward: bool) -> None:
        unit = self.members.refs[use.unit]()
        if unit is not None:
            for group in unit.groups:
                self.gatherer.prefetch(group, forward=forward)
