"""The units that run in one context, and their groups, by number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.buffers.parameter_group import REQUIRES_GRAD, FsdpParameterGroup
from megatron.core.distributed.fsdp.buffers.unfilled import is_unfilled
from megatron.core.distributed.fsdp.codec.hooked_tensor import memory_of
from megatron.core.distributed.fsdp.comm.transport import Transport
from megatron.core.distributed.fsdp.layout.plan import Use
from megatron.core.distributed.fsdp.runtime.nvtx import UnitRange
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit


class UnitRegistry:
    """Units and groups in the order of their registration.

    A module that its user deleted may live on in one process: somebody keeps it, or the garbage collector has not come yet. So
    units and groups stay registered, the same on all ranks, until all ranks remove them together (``Planner``). They do not
    refer to modules or to their context: deleting the whole model frees all of it at once.

    Attributes:
        by_number: the units; None where one was removed.
        numbers_on_ranks: of the groups, by number: ``FsdpParameterGroup.number_on_ranks``.
        read_peers: transports whose gathers read shards without asking, one for each set of ranks.
        waits_for_values: units may hold tensors without values, of the meta device or of ``to_empty``.
    """

    def __init__(self) -> None:
        self.numbers_on_ranks: list[int] = []
        self.read_peers: list[Transport] = []
        self.waits_for_values = False
        self._sharded: list[nn.Parameter] | None = None  # parameters of all groups
        self._asked: list[bool] = []  # their requires_grad flags when the groups last followed them
        self.by_number: list[FsdpUnit | None] = []
        self._groups: list[FsdpParameterGroup | None] = []
        self._owners: list[FsdpUnit | None] = []  # of the groups

    def add(self, unit: FsdpUnit) -> None:
        """Give the unit and its own groups numbers, and names for messages and NVTX ranges."""
        self._sharded = None
        unit.index = len(self.by_number)
        self.by_number.append(unit)
        self.waits_for_values |= bool(unit.unfilled)
        for group in unit.own_groups:
            group.take_index(len(self._groups))
            self._groups.append(group)
            self.numbers_on_ranks.append(group.number_on_ranks)
            self._owners.append(unit)
            self.read_peers += [
                axis for axis in group.group_mesh.axes if axis.reads_peers and group.weights.needs_gather
            ][:1]
            if group.requires_grad_changed:  # unfrozen before its first forward, which may register it
                group.follow_requires_grad()
        unit.find_trained_groups()
        self.read_peers = list({tuple(axis.ranks): axis for axis in self.read_peers}.values())
        self.rename(unit)

    def rename(self, unit: FsdpUnit) -> None:
        """Use the unit's name in messages and NVTX ranges."""
        for group in unit.own_groups:
            group.set_prefix(unit.prefix)
        own = unit.prefix.rstrip(".")
        # In a shared context the first part of a prefix names the root.
        name = own.partition(".")[2] if unit.context is not None and unit.context.is_shared else own
        unit.forward_range, unit.backward_range = (
            UnitRange(name, phase, own or "root") for phase in ("forward", "backward")
        )

    def remove(self, units: Sequence[FsdpUnit]) -> None:
        """Remove units whose modules no rank has any more; numbers of the others stay. Ranks: all, the same units."""
        self._sharded = None
        for unit in units:
            self.by_number[unit.index] = None
            for group in unit.own_groups:
                self._groups[group.index] = self._owners[group.index] = None

    def clear(self) -> None:
        """Remove all."""
        self._sharded = None
        self.by_number, self._groups, self._owners, self.read_peers, self.numbers_on_ranks = [], [], [], [], []

    @property
    def units(self) -> list[FsdpUnit]:
        """The units, without those that were removed."""
        return [unit for unit in self.by_number if unit is not None]

    @property
    def groups(self) -> list[FsdpParameterGroup]:
        """The groups of these units."""
        return [group for group in self._groups if group is not None]

    def group(self, index: int) -> FsdpParameterGroup:
        """Return the group of this number, which must be registered."""
        group = self._groups[index]
        assert group is not None, "a number is of a group that is registered"
        return group

    def groups_of(self, uses: Sequence[Use]) -> set[FsdpParameterGroup]:
        """Return the groups that these uses need."""
        units = (self.by_number[use.unit] for use in uses)
        return {group for unit in units if unit is not None for group in unit.groups}

    def holds(self, group: FsdpParameterGroup) -> bool:
        """Return whether the group is registered."""
        return 0 <= group.index < len(self._groups) and self._groups[group.index] is group

    def describe(self, index: int) -> str:
        """Name the group of this number for people; there need not be one."""
        return str(self._groups[index]) if 0 <= index < len(self._groups) else "no group"

    def owner(self, group: FsdpParameterGroup) -> FsdpUnit:
        """Return the unit that manages the group, which must be registered."""
        owner = self._owners[group.index]
        assert owner is not None, "a group is registered as long as its unit"
        return owner

    def is_true_on_any_rank(self, value: bool | torch.Tensor) -> bool:
        """Return whether ``value``, which only this rank knows, is true on any rank: the same answer on all.

        While a step is captured into a CUDA graph nothing can be asked, and the answer is True.

        Ranks: all that share a group; blocks the host.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return True
        groups = self.groups
        axes = dict.fromkeys(axis for group in groups for axis in group.group_mesh.axes if axis.size > 1)
        if not axes:
            return bool(value)
        if isinstance(value, torch.Tensor):
            answer = value.to(groups[0].device, torch.float32).reshape(1)
        else:
            answer = torch.tensor([float(value)], device=groups[0].device)
        for _ in axes:  # what one mesh knows reaches the ranks of all others
            for axis in axes:
                axis.maximum(answer)
        return bool(answer.item())

    def check(self) -> None:
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
        """Start to train parameters that were unfrozen, and stop for those that were frozen, since the last call.

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
        if list(map(REQUIRES_GRAD, self._sharded)) == self._asked:
            return False
        changed = [group for group in self.groups if group.requires_grad_changed]
        is_new = any(not group.trainable for group in changed)
        for group in changed:
            self._follow_requires_grad(group)
        return is_new

    def _follow_requires_grad(self, group: FsdpParameterGroup) -> None:
        self._sharded = None
        group.follow_requires_grad()
        self.owner(group).find_trained_groups()

    def check_filled(self) -> None:
        """Check that tensors that had no values have got them. Ranks: all of the mesh; blocks the host, once."""
        names: list[str] = []
        buffers: list[str] = []
        for unit in self.units:
            waiting = [(name, held[key]) for name, held, key in unit.unfilled if held.get(key) is not None]
            found = [unit.prefix + name for name, tensor in waiting if is_unfilled(_local(tensor))]
            for axis in unit.own_groups[0].group_mesh.axes if unit.own_groups and unit.unfilled else ():
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
        for unit in self.units:
            unit.unfilled.clear()
        self.waits_for_values = False


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return memory_of(tensor._local_tensor, writes=False) if isinstance(tensor, DTensor) else tensor
