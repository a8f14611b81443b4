"""The units of a context: modules whose parameters are unsharded, used and resharded together. And their groups, by number."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, starmap
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.buffers.materialize import Unfilled, is_unfilled
from megatron.core.distributed.fsdp.buffers.param_slots import ModuleParameters
from megatron.core.distributed.fsdp.buffers.parameter_group import (
    REQUIRES_GRAD,
    FsdpParameterGroup,
    group_of,
    is_ignored,
)
from megatron.core.distributed.fsdp.comm.transport import Transport
from megatron.core.distributed.fsdp.config.engine_options import EngineOptions
from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.dtensor.placements import memory_of
from megatron.core.distributed.fsdp.layout.plan import Use
from megatron.core.distributed.fsdp.runtime.nvtx import UnitRange

Children = dict[str, nn.Module | None]

_IS_SHARED, _UNFILLED = attrgetter("is_shared"), attrgetter("unfilled")


@dataclass(frozen=True)
class UnitOrigin:
    """How ``fully_shard`` made a unit.

    Attributes:
        call: number of the call, in this process.
        members: the modules that are the unit.
        has_nested: other units lie inside it.
        by_reset: it was built on the meta device and got the values of ``reset_parameters``.
        policy: the dtypes that it was asked to have.
    """

    call: int = -1
    members: tuple[weakref.ref[nn.Module], ...] = ()
    has_nested: bool = False
    by_reset: bool = False
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()  # noqa: RUF009 (frozen)


@dataclass(frozen=True)
class UnitSettings:
    """What the user asked of a unit after ``fully_shard``.

    Attributes:
        syncs_gradients, all_reduces: its gradients are reduced by each backward, over the outer axis too.
    """

    syncs_gradients: bool = True
    all_reduces: bool = True


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
        unfilled: its tensors that must get values before the next forward.
        forward_range, backward_range: names of its phases on the time line.
        order: place, among all forwards of its context, of its latest forward, or of the one whose backward is under way;
            backward comes back in reverse.
        last_inside: place of the last forward that began within that one.
        entered: place of its latest forward, also if a backward of another graph runs within that.
        options: its settings from ``fully_shard``, as changed by ``change_options`` since.
    """

    name: str
    own_groups: list[FsdpParameterGroup]
    tree: weakref.ref[ModuleTree]
    borrowed_groups: list[FsdpParameterGroup] = field(default_factory=list)
    origin: UnitOrigin = UnitOrigin()
    options: EngineOptions = EngineOptions()  # noqa: RUF009 (frozen)
    settings: UnitSettings = UnitSettings()
    unfilled: list[Unfilled] = field(default_factory=list)
    prefix: str = ""
    index: int = -1
    forward_depth: int = 0
    order: int = 0
    last_inside: int = 0
    entered: int = 0
    _context: weakref.ref[Any] | None = None

    def __post_init__(self) -> None:
        self.groups = [*self.own_groups, *self.borrowed_groups]
        for group in self.borrowed_groups:
            group.share()
        self.is_deferred = self.origin.has_nested
        self.find_trained_groups()
        self.show_name()

    # ---- where it belongs ---------------------------------------------------------------------------------------

    @property
    def context(self) -> Any:
        """The ``FsdpContext`` that it runs in, which imports this file; None until the root has run. Its modules own it."""
        return None if self._context is None else self._context()

    def join(self, context: object, index: int) -> None:
        """Run in this context from now on, under this number."""
        # Weak, as all that points back: deleting the model must free its memory without the garbage collector.
        self._context, self.index = weakref.ref(context), index
        self.find_trained_groups()
        self.show_name()

    def rename(self, name: str, prefix: str) -> None:
        """Take the name of the unit's module in another root. ``show_name`` shows it."""
        self.name, self.prefix = name, prefix

    def show_name(self) -> None:
        """Use the unit's name in messages and NVTX ranges."""
        for group in self.own_groups:
            group.set_prefix(self.prefix)
        own = self.prefix.rstrip(".")
        # In a shared context the first part of a prefix names the root.
        name = own.partition(".")[2] if self.context is not None and self.context.is_shared else own
        self.forward_range, self.backward_range = (
            UnitRange(name, phase, own or "root") for phase in ("forward", "backward")
        )

    # ---- settings -----------------------------------------------------------------------------------------------

    def prefetch_depth(self, root: FsdpUnit | None) -> tuple[int, int]:
        """Return how many further units to prefetch when its (forward, backward) begins: what it has, else the root, else 1."""
        asked = [self.options] if root is None else [self.options, root.options]
        forward = next((o.forward_prefetch_depth for o in asked if o.forward_prefetch_depth is not None), 1)
        backward = next((o.backward_prefetch_depth for o in asked if o.backward_prefetch_depth is not None), 1)
        return forward, backward

    def change_options(self, **changes: Any) -> None:
        """Change settings of the unit (prefetch depths, whether it keeps weights) from the next step on."""
        self.options = replace(self.options, **changes)
        if self.context is not None:
            self.context.planner.outdate()

    def sync_gradients(self, reduces: bool, *, all_reduces: bool) -> None:
        """Let each backward reduce the unit's gradients, and do so over the outer axis too."""
        self.settings = replace(self.settings, syncs_gradients=reduces, all_reduces=all_reduces)

    # ---- parameters ---------------------------------------------------------------------------------------------

    def wait_for_values(self, unfilled: Iterable[Unfilled]) -> None:
        """Ask for the values of these tensors of the unit too when the next forward begins."""
        known = {name for name, *_ in self.unfilled}
        self.unfilled += [entry for entry in unfilled if entry[0] not in known]

    def find_trained_groups(self) -> None:
        """List the groups that get gradients, after parameters were frozen or unfrozen."""
        self.trained_groups = [group for group in self.own_groups if group.trains]

    def show_sharded(self) -> None:
        """Reshard the unit if the user unsharded it: its state is saved or loaded."""
        if self.context is not None and any(group.weights.holders.by_user for group in self.groups):
            self.context.reshard(self.groups)

    def borrow(self, group: FsdpParameterGroup) -> None:
        """Unshard the group, which another unit owns, for this unit too."""
        group.share()
        self.borrowed_groups.append(group)
        self.groups.append(group)

    @property
    def write_count(self) -> int:
        """Grows with each write to the unit's weights that is noticed."""
        return sum(group.weights.freshness.write_count + group.weights.freshness.num_updates for group in self.groups)

    # ---- a step -------------------------------------------------------------------------------------------------

    def enter_forward(self, order: int) -> None:
        """Begin a forward, which is number ``order`` of the context."""
        self.order = self.entered = order
        self.forward_depth += 1

    def leave_forward(self, latest: int, graph: Any) -> None:
        """End a forward.

        Args:
            latest: number of the latest forward of the context.
            graph: the ``Graph`` to which the outputs belong; None: no backward comes through them.
        """
        if graph is not None:
            # Used again in one graph, and other units in between: its gradients are whole only at the end.
            comes_back = self in graph.units and (self.is_deferred or self.entered != self.last_inside + 1)
            self.is_deferred = self.origin.has_nested or comes_back
            graph.units[self] = None
        self.last_inside, self.forward_depth = latest, self.forward_depth - 1

    def come_back(self, order: int, last_inside: int) -> None:
        """Begin the backward of an earlier forward: forwards of other graphs may have come since."""
        self.order, self.last_inside = order, last_inside

    def abandon(self) -> None:
        """Forget a pass that failed."""
        self.forward_depth = 0

    @property
    def waits_for_end(self) -> bool:
        """True if its gradients are whole only at backward's end."""
        return self.is_deferred or True in map(_IS_SHARED, self.own_groups)

    @property
    def delays_reshard(self) -> bool:
        """True if its backward holds weights that get no gradient from it."""
        return not self.origin.has_nested and len(self.trained_groups) < len(self.groups)


class ModuleTree:
    """The modules of a unit without those of nested units, through dicts that do not point back to them.

    Args:
        tops: (prefix of names, children, parameters) of the unit's topmost modules.

    Attributes:
        known: what ``look`` returned when the tree was walked last; [] if that found unknown, which are told each time.
    """

    def __init__(self, tops: list[tuple[str, Children, ModuleParameters]]) -> None:
        self._tops = tops
        self._children: list[Children] = []
        self._parameters: list[ModuleParameters] = []
        self.walk()

    def walk(self) -> list[str]:
        """Take the tree as it is now; return the names of parameters in it that are in no group."""
        self._children, self._parameters = [], []
        unknown: list[str] = []
        for prefix, children, parameters in self._tops:
            self._add(prefix, children, parameters, unknown)
        # A parameter that is None (a bias that is off) may be set later, which changes no length.
        self._absent = [(held, key) for held in self._parameters for key, value in held.items() if value is None]
        self.known = [] if unknown else self.look()
        return unknown

    def _add(self, prefix: str, children: Children, parameters: ModuleParameters, unknown: list[str]) -> None:
        # By identity: a module may be in the tree twice, and comparing dicts would compare modules and tensors.
        if any(children is known for known in self._children):
            return
        self._children.append(children)
        self._parameters.append(parameters)
        for key, parameter in parameters.items():
            if parameter is not None and group_of(parameter) is None and not is_ignored(parameter):
                unknown.append(prefix + key)
        for name, child in children.items():
            if child is not None and "_fsdp_unit" not in vars(child):  # another unit
                self._add(f"{prefix}{name}.", child._modules, child._parameters, unknown)

    def look(self) -> list[int]:
        """Return what is not ``known`` once a module or a parameter was added, at little cost: each forward looks."""
        children = chain.from_iterable(map(dict.values, self._children))
        absent = starmap(dict.get, self._absent)
        return [*map(id, chain(children, absent)), *map(len, self._parameters)]


class UnitRegistry:
    """Units and groups in the order of their registration.

    A module that its user deleted may live on in one process: somebody keeps it, or the garbage collector has not come yet. So
    units and groups stay registered, the same on all ranks, until all ranks remove them together (``Planner``). They do not
    refer to modules or to their context: deleting the whole model frees all of it at once.

    Attributes:
        by_number: the units.
        numbers_on_ranks: of the groups, by number: ``FsdpParameterGroup.number_on_ranks``.
        read_peers: transports whose gathers read shards without asking, one for each set of ranks.
    """

    def __init__(self) -> None:
        self.numbers_on_ranks: list[int] = []
        self.read_peers: list[Transport] = []
        self._sharded: list[nn.Parameter] | None = None  # parameters of all groups
        self._asked: list[bool] = []  # their requires_grad flags when the groups last followed them
        self.by_number: dict[int, FsdpUnit] = {}
        self._num_units = 0  # that were ever added: numbers of removed ones are not given again
        self._owners: dict[FsdpParameterGroup, FsdpUnit] = {}

    def add(self, unit: FsdpUnit, context: object) -> None:
        """Give the unit and its own groups numbers and names in the context."""
        self._sharded = None
        for group in unit.own_groups:
            group.join(context, len(self.numbers_on_ranks))
            self.numbers_on_ranks.append(group.number_on_ranks)
            self._owners[group] = unit
            self.read_peers += [
                axis for axis in group.group_mesh.axes if axis.reads_peers and group.weights.needs_gather
            ][:1]
            if group.requires_grad_changed:  # unfrozen before its first forward, which may register it
                group.follow_requires_grad()
        self.read_peers = list({tuple(axis.ranks): axis for axis in self.read_peers}.values())
        unit.join(context, self._num_units)
        self.by_number[unit.index] = unit
        self._num_units += 1

    def remove(self, units: Sequence[FsdpUnit]) -> None:
        """Remove units whose modules no rank has any more; numbers of the others stay. Ranks: all, the same units."""
        self._sharded = None
        # Numbers are not given again: the plan, recorded entries and other ranks refer to groups by them.
        for unit in units:
            del self.by_number[unit.index]
            for group in unit.own_groups:
                del self._owners[group]

    def clear(self) -> None:
        """Remove all."""
        self._sharded = None
        self.by_number, self._owners, self._num_units = {}, {}, 0
        self.read_peers, self.numbers_on_ranks = [], []

    @property
    def units(self) -> list[FsdpUnit]:
        """The units, without those that were removed."""
        return list(self.by_number.values())

    @property
    def groups(self) -> list[FsdpParameterGroup]:
        """The groups of these units."""
        return list(self._owners)

    def group(self, index: int) -> FsdpParameterGroup:
        """Return the group of this number, which must be registered."""
        return next(group for group in self.groups if group.index == index)

    def groups_of(self, uses: Sequence[Use]) -> set[FsdpParameterGroup]:
        """Return the groups that these uses of the plan need, which contains no unit that was removed."""
        return {group for use in uses for group in self.by_number[use.unit].groups}

    def holds(self, group: FsdpParameterGroup) -> bool:
        """Return whether the group is registered."""
        return group in self._owners

    def describe(self, index: int) -> str:
        """Name the group of this number for people; there need not be one."""
        return next((str(group) for group in self.groups if group.index == index), "no group")

    def owner(self, group: FsdpParameterGroup) -> FsdpUnit:
        """Return the unit that manages the group, which must be registered."""
        return self._owners[group]

    def is_true_on_any_rank(self, value: bool | torch.Tensor) -> bool:
        """Return whether ``value``, which only this rank knows, is true on any rank: the same answer on all.

        While a step is captured into a CUDA graph nothing can be asked, and the answer is True.

        Ranks: all that share a group; blocks the host.
        """
        # True is the safe answer: weights stay where they are, and are gathered again.
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return True
        groups = self.groups
        axes = dict.fromkeys(axis for group in groups for axis in group.group_mesh.axes if axis.size > 1)
        if not axes:
            return bool(value)
        answer = torch.as_tensor(value, dtype=torch.float32, device=groups[0].device).reshape(1)
        for _ in axes:  # what one mesh knows reaches the ranks of all others
            for axis in axes:
                axis.maximum(answer)
        return bool(answer.item())

    def check_parameters(self) -> None:
        """Check that parameters are those that were sharded.

        Raises:
            RuntimeError: a parameter was replaced or added; the message names it.
        """
        for unit in self.units:
            tree = unit.tree()
            if tree is not None and tree.look() != tree.known and (added := tree.walk()):
                raise RuntimeError(
                    f"{unit.prefix}{added[0]} was added to {unit.name} after fully_shard, which would not train it on all "
                    "ranks alike; add parameters before fully_shard, or call fully_shard on the module that holds them"
                )
        for group in self.groups:
            replaced = group.param_slots.replaced()
            if replaced is not None:
                raise RuntimeError(
                    f"{group.name_of(replaced)} must stay the parameter that fully_shard made, got another one in its place, which no forward "
                    "would use (also torch.func.functional_call and parametrizations put others there); write to the parameter in "
                    "place, or replace it, or tie it to another, before fully_shard"
                )

    def follow_requires_grad(self) -> bool:
        """Start to train parameters that were unfrozen, and stop for those that were frozen, since the last call. [Note: freezing].

        Each forward with gradients calls it, and each backward: users freeze weights in between, a graph may be older than the latest
        forward (a reference model is the same modules with adapters disabled), and reentrant checkpoints run their forwards without
        gradients. One comparison of all flags covers the usual case, in which nothing has changed.

        Returns:
            Whether a group is trained for the first time. The plan has no memory for its gradients.

        Raises:
            RuntimeError: a flag changed between the microbatches of a step; the message names the parameter.

        Ranks: all, with the same flags.
        """
        if self._sharded is None:
            self._sharded = [parameter for group in self.groups for parameter in group.sharded]
            self._asked = [asks for group in self.groups for asks in group.grads_asked]
        # In C over all parameters: see [Note: the host's budget].
        if list(map(REQUIRES_GRAD, self._sharded)) == self._asked:
            return False
        changed = [group for group in self.groups if group.requires_grad_changed]
        is_new = any(not group.trainable for group in changed)
        for group in changed:
            self._sharded = None  # first: the group may refuse
            group.follow_requires_grad()
            self.owner(group).find_trained_groups()
        return is_new

    def check_filled(self) -> None:
        """Check that tensors that had no values have got them. Ranks: all of the mesh; where there were some, blocks the host."""
        names: list[str] = []
        buffers: list[str] = []
        waiting_units = list(filter(_UNFILLED, self.units))
        for unit in waiting_units:
            waiting = [(name, held[key]) for name, held, key in unit.unfilled if held.get(key) is not None]
            # A rank's part may be empty, and thus never unfilled, so ranks exchange what they found.
            found = [unit.prefix + name for name, tensor in waiting if is_unfilled(_local(tensor))]
            for axis in unit.own_groups[0].group_mesh.axes if unit.own_groups else ():
                found = list(dict.fromkeys(name for theirs in axis.exchange(found) for name in theirs))
            names += found
            buffers += [unit.prefix + name for name, tensor in waiting if not isinstance(tensor, nn.Parameter)]
        if names:
            buffer = next(
                (f", as module.{name.rpartition('.')[2]}.copy_(values)" for name in names if name in buffers), ""
            )
            raise RuntimeError(
                f"{', '.join(names)} must have values before the next forward, got none since the meta device or to_empty(); fill "
                "parameters by init_fn or reset_parameters, by torch.nn.init on the sharded parameters, or by load_state_dict; "
                f"fill buffers that no state_dict holds by writing to them{buffer}"
            )
        for unit in waiting_units:
            unit.unfilled.clear()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return memory_of(tensor._local_tensor, writes=False) if isinstance(tensor, DTensor) else tensor
