"""What a context reports about its steps to those who check them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.comm.transport import Transport, unfinished
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit


@dataclass(eq=False)
class Ballot:
    """The vector in which the ranks over some axes count who has which gradient; an observer's numbers travel behind the counts.

    Attributes:
        axes: of the groups' mesh, with several ranks.
        mesh: of the groups.
        members: numbers of all groups over these axes, frozen ones too.
        first: place of each trained group's first parameter, by group number.
        everything: [P + num_extra] what a rank sends that has all gradients: ones, and the observer's numbers.
        counts: [P + num_extra] the sum over the ranks.
    """

    axes: tuple[Transport, ...]
    mesh: DeviceMesh
    members: frozenset[int]
    first: Mapping[int, int]
    everything: torch.Tensor
    counts: torch.Tensor


class Observer:
    """Do nothing with what a context reports. The core needs no other observer; ``checks`` has one that compares ranks.

    See [Note: checks around the core].

    Attributes:
        issued: called with ``NUM_KINDS * group.index + kind`` before each collective, sync, update and load. It is a value, not a
            method: it runs for each collective of a step, so an observer can hand out a bound ``list.append``.
        num_extra: numbers in fp32 that the observer adds to each ballot.
        is_debugging: the debug mode is on.

    Ranks: all, in the same order, except where a method says otherwise.
    """

    num_extra = 0

    def __init__(self, context: Any) -> None:
        """Observe a context, which is under construction: keep no strong reference to it."""
        self.issued: Callable[[int], object] = bool  # does nothing, in C
        self.is_debugging = False

    @staticmethod
    def check_unit(
        module: Any, own_modules: Any, mesh: Any, placements: Any, *, expert_mesh: Any, arguments: Mapping[str, Any]
    ) -> Callable[[FsdpUnit], object]:
        """Check what ``fully_shard`` was given, before anything is allocated or sent; return what to call with the unit made of it."""
        return _ignore

    @staticmethod
    def compare_experts(shapes: Mapping[str, torch.Size], dense: Any) -> None:
        """Check that the ranks of the dense mesh hold the same ones of the experts that ``fully_shard`` shards over it."""

    # ---- units and forwards -------------------------------------------------------------------------------------

    def registered(self, unit: FsdpUnit) -> None:
        """Note that a unit has joined the context."""

    def forward_begins(self) -> None:
        """Note that an outermost forward begins, and that the parameters of all units have values."""

    def pass_begins(self) -> None:
        """Note that an outermost forward begins while no graph waits for its backward."""

    def pass_failed(self) -> None:
        """Note that the pass under way was given up."""

    def departed(self, ran: str, planned: str) -> None:
        """Note that the step has left its plan. Ranks: each alone."""

    # ---- collectives --------------------------------------------------------------------------------------------

    def failed(self, what: str, axes: Sequence[Transport], error: RuntimeError) -> RuntimeError:
        """Return the error to raise for a collective that failed, as ``unfinished`` does. Ranks: each alone."""
        return unfinished(what, axes, error)

    def recorded(self) -> None:
        """Check the step that has ended, or the forwards since, which are about to become the plan."""

    # ---- gradients ----------------------------------------------------------------------------------------------

    def watched(self, group: FsdpParameterGroup) -> None:
        """Note that the group's unsharded parameters have accumulation nodes, and that nobody else refers to them yet."""

    def came_late(self, group: FsdpParameterGroup) -> None:
        """Check a gradient of the group that no output of its unit announced. Ranks: each alone."""

    # ---- the end of a step --------------------------------------------------------------------------------------

    def step_ended(self, ballots: Sequence[Ballot]) -> None:
        """Note that a step's last backward has issued its collectives; fill the ends of the ballots, on the reduce stream."""

    def backward_ended(self, *, is_last: bool) -> None:
        """Check a backward that has ended. Compute has waited for its reductions and, if it is a step's last, for the ballots."""

    def raise_found(self) -> None:
        """Raise what the comparison of earlier steps has found, as far as it has arrived. Ranks: each alone."""

    # ---- for people ---------------------------------------------------------------------------------------------

    def debug(self, value: bool) -> None:
        """Turn the debug mode on, or check that it stays as it is."""
        if value:
            raise NotImplementedError(
                "the debug mode needs an observer that compares ranks, got debug=True without one"
            )

    @property
    def progress(self) -> tuple[int, str]:
        """How many collectives this rank has begun, and the last ones in words; from any thread."""
        return 0, "collectives are not counted"


def _ignore(_: object) -> None:
    pass
