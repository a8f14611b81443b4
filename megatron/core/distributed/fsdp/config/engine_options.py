"""The settings of units and contexts, as one value."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Settings of a unit, and of the context that the unit makes if it is a root.

    Those up to ``least_memory`` are read from each unit's (``FsdpUnit.options``). The others are read from the context's, which are the
    root's, or those of the ``fully_shard_context`` around it; in a unit inside they change nothing. They change only through
    ``change_options`` of the unit or the context.

    Args:
        grad_divisor: divides gradients, in addition to the mean over the data-parallel ranks; ``TrainingSettings.sum_divisor`` is both.
        transport: how bytes move along the (inner) axis, by name.
        gather_group: a process group of that axis's ranks for all-gathers only; None: the mesh's.
        forward_prefetch_depth, backward_prefetch_depth: units to prefetch when a unit's phase begins; None: the root's, or 1.
        keeps_weights: the unit's weights stay from forward to backward; otherwise they are gathered again for backward.
        least_memory: no model weight rests next to the main weight, and a reduce-scatter input is allocated for each reduction.
        use_symmetric_memory: units of the context that name no transport use symmetric memory.
        unify_communication_stream: gathers and reductions share a stream.
        debug: run the debug mode, which ``fully_shard_context`` describes.
        poisons: fill released memory with NaN, so that a read after release shows in the loss.
        overlaps_reductions: reductions overlap backward; otherwise compute waits for each of them.
        ahead_numel: prefetch beyond the prefetch depth until so many elements of weights are on their way; 0: never beyond.
        memory_budget_nbytes: bytes to spend on weights that stay gathered throughout a step.
        spans_step: the plan contains a whole step, from its first microbatch to its last. [Note: several graphs in flight]

    Raises:
        TypeError: a prefetch depth is no integer.
        ValueError: a prefetch depth is negative, or ``grad_divisor`` is not positive.
    """

    grad_divisor: float | Fraction = 1
    transport: str = "nccl"
    gather_group: Any = field(default=None, repr=False)  # a ProcessGroup
    forward_prefetch_depth: int | None = None
    backward_prefetch_depth: int | None = None
    keeps_weights: bool = False
    least_memory: bool = False
    use_symmetric_memory: bool = False
    unify_communication_stream: bool = False
    debug: bool = False
    poisons: bool = False
    overlaps_reductions: bool = True
    ahead_numel: int = 0
    memory_budget_nbytes: int = 0
    spans_step: bool = False

    def __post_init__(self) -> None:
        if not self.grad_divisor > 0:
            raise ValueError(f"grad_divisor must be positive, got {self.grad_divisor}")
        for name in ("forward_prefetch_depth", "backward_prefetch_depth"):
            depth = getattr(self, name)
            if depth is None:
                continue
            if not isinstance(depth, int) or isinstance(depth, bool):
                raise TypeError(f"{name} must be a whole number of units, got {depth!r}; try 1")
            if depth < 0:
                raise ValueError(f"{name} must be 0 or more units, got {depth}; 0 gathers each unit when it is needed")

    def compared(self) -> dict[str, Any]:
        """Return what must be the same on all ranks, by name. A process group is another object on each rank."""
        compared = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "gather_group"}
        named = "whether there is a process group for all-gathers alone (fsdp_group_ag)"
        return compared | {"grad_divisor": Fraction(self.grad_divisor), named: self.gather_group is not None}
