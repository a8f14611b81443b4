"""Placements of the weights, gradients and optimizer state of a unit: one per data-parallel axis and kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Placements:
    """The sharding strategy of a unit: where each kind of tensor rests between its uses.

    Args:
        dp_axes: [A] data-parallel axes of the mesh, by index or name, outermost first.
        parameter: [A] where model weights rest: ``Replicate()`` or ``Shard(0)``.
        gradient: [A] where gradients rest between microbatches: ``Partial("avg")`` (each rank keeps its own
            contribution until the last microbatch), ``Partial("sum")`` (the same, summed instead of averaged)
            or ``Shard(0)`` (averaged and scattered after each microbatch).
        optimizer: [A] where main weights and optimizer state rest: ``Replicate()`` or ``Shard(0)``.

    Raises:
        ValueError: the lists differ in length, or an axis is sharded for one kind and not for a later one:
            a sharded parameter needs a sharded gradient, a sharded gradient a sharded optimizer state.
        TypeError: a placement of a kind that is not listed above.

    ``Shard(0)`` here means a segment of the unit's flat buffer, in which ranks may own unequal numbers of a tensor's rows.
    The DTensors of parameters carry the numbers (``RowShard``).
    Source: ZeRO (arXiv:1910.02054) stages 1 to 3 and hybrid sharding, as tables.
    """

    dp_axes: Sequence[int | str]
    parameter: Sequence[Placement]
    gradient: Sequence[Placement]
    optimizer: Sequence[Placement]

    def __post_init__(self) -> None:
        for name in ("dp_axes", "parameter", "gradient", "optimizer"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        lengths = {name: len(getattr(self, name)) for name in ("dp_axes", "parameter", "gradient", "optimizer")}
        if len(set(lengths.values())) != 1 or not self.dp_axes:
            raise ValueError(f"Placements needs one placement per data-parallel axis for each kind, got {lengths}")
        for axis, kinds in enumerate(zip(self.parameter, self.gradient, self.optimizer, strict=True)):
            self._check_axis(axis, *kinds)

    def _check_axis(self, axis: int, parameter: Placement, gradient: Placement, optimizer: Placement) -> None:
        for kind, placement in (("parameter", parameter), ("optimizer", optimizer)):
            if not (isinstance(placement, Replicate) or _is_row_shard(placement)):
                raise TypeError(f"{kind} placement of axis {axis} must be Replicate() or Shard(0), got {placement}")
        is_partial = isinstance(gradient, Partial) and gradient.reduce_op in ("avg", "sum")
        if not (is_partial or _is_row_shard(gradient)):
            raise TypeError(
                f'gradient placement of axis {axis} must be Partial("avg"), Partial("sum") or Shard(0), got {gradient}; '
                'for gradients that every rank holds in full, use Partial("avg") with optimizer Replicate()'
            )
        if _is_row_shard(parameter) and not _is_row_shard(gradient):
            raise ValueError(f"axis {axis}: a sharded parameter needs a sharded gradient, got gradient {gradient}")
        if _is_row_shard(gradient) and not _is_row_shard(optimizer):
            raise ValueError(f"axis {axis}: a sharded gradient needs sharded optimizer state, got {optimizer}")

    def replicated(self) -> Placements:
        """Return the same axes with nothing sharded, for parameters without rows (0 dimensions)."""
        gradient = tuple(p if isinstance(p, Partial) else Partial("avg") for p in self.gradient)
        replicate = tuple(Replicate() for _ in self.dp_axes)
        return Placements(self.dp_axes, replicate, gradient, replicate)

    def frozen(self) -> Placements:
        """Return the placements of frozen parameters: all kinds rest where the parameter does."""
        gradient = tuple(p if isinstance(p, Shard) else Partial("avg") for p in self.parameter)
        return Placements(self.dp_axes, self.parameter, gradient, self.parameter)


def _is_row_shard(placement: Placement) -> bool:
    return isinstance(placement, Shard) and placement.dim == 0


# Names as in Megatron's --data-parallel-sharding-strategy: parameter, gradient, optimizer on the sharding axis.
STRATEGIES: dict[str, tuple[Placement, Placement, Placement]] = {
    "no_shard": (Replicate(), Partial("avg"), Replicate()),
    "optim": (Replicate(), Partial("avg"), Shard(0)),
    "optim_grads": (Replicate(), Shard(0), Shard(0)),
    "optim_grads_params": (Shard(0), Shard(0), Shard(0)),
}


def strategy_placements(strategy: str, axis: int | str = 0) -> Placements:
    """Return the placements of a strategy, by Megatron's name for it, on one data-parallel axis.

    Raises:
        ValueError: an unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"sharding strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    parameter, gradient, optimizer = STRATEGIES[strategy]
    return Placements((axis,), (parameter,), (gradient,), (optimizer,))


# Names as in Megatron's --outer-dp-sharding-strategy: optimizer state on the outer axis of hybrid sharding.
OUTER_STRATEGIES: dict[str, Placement] = {"no_shard": Replicate(), "optim": Shard(0)}


def hybrid_placements(
    strategy: str, outer_strategy: str = "no_shard", axes: Sequence[int | str] = (0, 1)
) -> Placements:
    """Return the placements of hybrid sharding on two axes, outer first.

    Args:
        strategy: what is sharded over the inner axis.
        outer_strategy: "no_shard": the outer axis replicates all that the inner axis shards (HSDP); "optim": it shards
            the optimizer state and the main weights further (HFSDP).

    Raises:
        ValueError: an unknown strategy.
    """
    if outer_strategy not in OUTER_STRATEGIES:
        raise ValueError(f"outer strategy must be one of {', '.join(OUTER_STRATEGIES)}, got {outer_strategy!r}")
    inner = strategy_placements(strategy)
    return Placements(
        axes,
        (Replicate(), *inner.parameter),
        (Partial("avg"), *inner.gradient),
        (OUTER_STRATEGIES[outer_strategy], *inner.optimizer),
    )
