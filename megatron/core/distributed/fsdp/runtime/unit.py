"""A unit: the parameters that one module unshards, uses and reshards together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any

from torch import nn

from megatron.core.distributed.fsdp.buffers.materialize import Unfilled
from megatron.core.distributed.fsdp.buffers.module_tree import ModuleTree
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.config.surface import Surface
from megatron.core.distributed.fsdp.runtime.nvtx import UnitRange

_IS_SHARED = attrgetter("is_shared")


def check_prefetch_depth(name: str, depth: object) -> None:
    """Check that a prefetch depth is a number of units.

    Raises:
        TypeError: it is no integer.
        ValueError: it is negative.
    """
    if not isinstance(depth, int) or isinstance(depth, bool):
        raise TypeError(f"{name} must be a whole number of units, got {depth!r}; try 1")
    if depth < 0:
        raise ValueError(f"{name} must be 0 or more units, got {depth}; 0 gathers each unit when it is needed")


class Phase(Enum):
    """What a unit is doing."""

    RESTING = "resting"
    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(eq=False)
class FsdpUnit:
    """A module's parameter groups and where it is in a step.

    Attributes:
        name: name of the module within its root, or the root's class; for messages.
        prefix: what the names of its parameters begin with, seen from the root.
        own_groups: groups of the parameters that this unit manages.
        tree: its modules, which keep it; dead once they are.
        trained_groups: those of its own groups that get gradients.
        borrowed_groups: groups of other units that hold weights tied to this unit's; gathered for it too.
        is_deferred: its gradients are reduced at backward's end: units lie inside this one, or it runs several times
            in one graph.
        by_reset: it was built on the meta device and got the values of ``reset_parameters``.
        unfilled: its tensors that must get values before the next forward.
        surface: the classes that it, and a context of its own, are built with.
        phase: what it is doing.
        forward_range, backward_range: names of its phases on the time line.
        is_open: a backward owes gradients of its own groups, or has not reduced them yet.
        order: place, among all forwards of its context, of its latest forward, or of the one whose backward is under way;
            backward comes back in reverse.
        last_inside: place of the last forward that began within that one.
        prefetch_depth: how many further units are prefetched when its (forward, backward) begins.
        own_prefetch_depth: what the user asked of this unit; None: the root's.
        keeps_weights: the user asked that its weights stay from forward to backward.
        syncs_gradients, all_reduces: the user wants its gradients reduced by each backward, over the outer axis too.
        call: number of the call of ``fully_shard`` that made it, in this process.
        members: the modules that are the unit.
    """

    name: str
    own_groups: list[FsdpParameterGroup]
    tree: weakref.ref[ModuleTree]
    borrowed_groups: list[FsdpParameterGroup] = field(default_factory=list)
    is_deferred: bool = False
    has_nested: bool = False
    by_reset: bool = False
    unfilled: list[Unfilled] = field(default_factory=list)
    prefix: str = ""
    phase: Phase = Phase.RESTING
    forward_range: UnitRange = UnitRange("", "forward", "")  # noqa: RUF009 (a str)
    backward_range: UnitRange = UnitRange("", "backward", "")  # noqa: RUF009
    index: int = -1
    forward_depth: int = 0
    is_open: bool = False
    order: int = 0
    last_inside: int = 0
    _context: weakref.ref[Any] | None = None
    prefetch_depth: tuple[int, int] = (1, 1)
    own_prefetch_depth: tuple[int | None, int | None] = (None, None)
    call: int = -1
    keeps_weights: bool = False
    syncs_gradients: bool = True
    all_reduces: bool = True
    members: tuple[weakref.ref[nn.Module], ...] = ()
    surface: Surface = field(default_factory=Surface)

    def __post_init__(self) -> None:
        self.borrowed_groups, borrowed = [], self.borrowed_groups
        self.groups = list(self.own_groups)
        self.find_trained_groups()
        self.is_deferred = self.has_nested
        self.take_prefetch_depth(self)
        for group in borrowed:
            self.borrow(group)

    @property
    def context(self) -> Any:
        """The ``FsdpContext`` that it runs in, which imports this file; None until the root has run. Its modules own it."""
        return None if self._context is None else self._context()

    def join(self, context: object) -> None:
        """Run in this context from now on."""
        self._context = weakref.ref(context)

    def take_prefetch_depth(self, root: FsdpUnit) -> None:
        """Set the prefetch depth to what the user asked of this unit, else of the root, else to 1."""
        forward, backward = (
            next((depth for depth in (own, of_root) if depth is not None), 1)
            for own, of_root in zip(self.own_prefetch_depth, root.own_prefetch_depth, strict=True)
        )
        self.prefetch_depth = (forward, backward)

    def wait_for_values(self, unfilled: Iterable[Unfilled]) -> None:
        """Ask for the values of these tensors of the unit too when the next forward begins."""
        known = {name for name, *_ in self.unfilled}
        self.unfilled += [entry for entry in unfilled if entry[0] not in known]
        if self.context is not None:
            self.context.registry.waits_for_values = True

    def find_trained_groups(self) -> None:
        """List the groups that get gradients, after parameters were frozen or unfrozen."""
        self.trained_groups = [group for group in self.own_groups if group.trains]

    def show_sharded(self) -> None:
        """Reshard the unit if the user unsharded it: its state is saved or loaded."""
        if self.context is not None and any(group.weights.held_by_user for group in self.groups):
            self.context.reshard(self)

    def borrow(self, group: FsdpParameterGroup) -> None:
        """Unshard the group, which another unit owns, for this unit too."""
        group.share()
        self.borrowed_groups.append(group)
        self.groups.append(group)

    @property
    def write_count(self) -> int:
        """Grows with each write to the unit's weights that is noticed."""
        return sum(group.weights.write_count + group.weights.num_updates for group in self.groups)

    @property
    def waits_for_end(self) -> bool:
        """True if its gradients are whole only at backward's end."""
        return self.is_deferred or True in map(_IS_SHARED, self.own_groups)

    @property
    def delays_reshard(self) -> bool:
        """True if its backward holds weights that get no gradient from it."""
        return not self.has_nested and len(self.trained_groups) < len(self.groups)
