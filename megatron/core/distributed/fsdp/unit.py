"""A unit: the parameters that one module gathers, uses and releases together."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup

if TYPE_CHECKING:
    from megatron.core.distributed.fsdp.context import FsdpContext, GraphToken


class Phase(Enum):
    """What a unit is doing."""

    RESTING = "resting"
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(eq=False)
class FsdpUnit:
    """A module's parameter groups and where it is in a step.

    Attributes:
        name: name of the module within its root; for messages.
        own_groups: groups of the parameters that this unit manages.
        borrowed_groups: groups of other units that hold weights tied to this unit's; gathered for it too.
        is_deferred: its gradients are reduced at backward's end: units lie inside this one, or its weights are used
            by others or several times, so that they are whole only then.
        phase: what it is doing.
        is_open: a backward owes gradients of its own groups, or has not reduced them yet.
        num_incomplete: own groups whose gradients the backward still owes.
        lingers: it holds weights in backward that get no gradient from it.
        last_token: the graph that it ran in last.
    """

    name: str
    own_groups: list[FsdpParameterGroup]
    borrowed_groups: list[FsdpParameterGroup] = field(default_factory=list)
    is_deferred: bool = False
    has_nested: bool = False
    phase: Phase = Phase.RESTING
    index: int = -1
    forward_depth: int = 0
    is_open: bool = False
    num_incomplete: int = 0
    context: FsdpContext | None = None
    last_token: weakref.ref[GraphToken] | None = None

    def __post_init__(self) -> None:
        self.groups = self.own_groups + self.borrowed_groups
        self.trainable_groups = [group for group in self.own_groups if group.trainable]
        self.is_deferred = self.has_nested
        self.lingers = not self.has_nested and len(self.trainable_groups) < len(self.groups)
