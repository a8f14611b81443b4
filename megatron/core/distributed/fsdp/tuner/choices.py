"""What the engine lets choose without changing a number."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from megatron.core.distributed.fsdp.comm.choose import TRANSPORTS
from megatron.core.distributed.fsdp.tuner.figures import Measured, Settings
from megatron.core.distributed.fsdp.tuner.search import Choice

_DEPTHS = (2, 3)
_BUDGET_MARGIN = 0.06
"""Share of a device's memory that weights which stay unsharded leave free; more than what any choice must leave."""

_MIB = 2**20


def engine_choices(
    *, fixed: Collection[str] = (), shards_weights: bool = True, num_ranks: int = 2, any_transport: bool = True
) -> list[Choice]:
    """Return the choices that leave losses, gradients and weights bitwise as they are, as fields of ``DistributedDataParallelConfig``.

    The transport is the exception: sums of gradients have the order of each transport. So it is chosen only where any will
    do (``any_transport``), as with ``fsdp_transport="auto"``, which may choose another one at each start.

    Args:
        fixed: names of settings that stay as they are.
        shards_weights: units are resharded after forward (``optim_grads_params``).
        num_ranks: over which the model is sharded; on one rank nothing travels, but weights may be cast for each pass (``least_memory``).
    """
    staying = [Choice(name="what stays unsharded", options=_budgets)] if shards_weights else []
    travelling = [
        Choice(name="overlap", options=[{"overlap_param_gather": True, "overlap_grad_reduce": True}]),
        Choice(
            name="prefetch depth",
            options=[
                {"fsdp_forward_prefetch_depth": depth, "fsdp_backward_prefetch_depth": depth} for depth in _DEPTHS
            ],
        ),
        Choice(name="elements in flight", options=_in_flight),
    ]
    if any_transport:
        travelling.insert(1, Choice(name="transport", options=_transports, stands=_transport))
    choices = [*travelling, *staying] if num_ranks > 1 else staying
    return [narrowed for choice in choices if (narrowed := without(choice, fixed)) is not None]


def without(choice: Choice, fixed: Collection[str]) -> Choice | None:
    """Return the choice of what is left of its settings if ``fixed`` ones stay as they are; None if nothing is."""

    def left(options: Collection[Settings]) -> list[Settings]:
        kept = [{name: value for name, value in option.items() if name not in fixed} for option in options]
        return [option for option in kept if option]

    own, own_stands = choice.options, choice.stands
    choice = replace(choice, stands=lambda best: next(iter(left([own_stands(best)])), {}))
    if callable(own):
        return replace(choice, options=lambda best: left(own(best)))
    options = left(own)
    return replace(choice, options=options) if options else None


def _transport(best: Measured) -> Settings:
    """Name the transport that "auto" has chosen, so that later runs take it too."""
    names = {"nccl" if name == "gloo" else name for name in best.last.facts.get("transports", ())} & TRANSPORTS.keys()
    return {"fsdp_transport": names.pop()} if len(names) == 1 else {}


def _transports(best: Measured) -> list[Settings]:
    return [{"fsdp_transport": kind} for kind in TRANSPORTS if kind in best.last.facts.get("serving", TRANSPORTS)]


def _in_flight(best: Measured) -> list[Settings]:
    numel = best.last.facts.get("largest_unit_numel", 0)
    return [{"suggested_communication_unit_size": 2 * numel}] if numel else []


def _budgets(best: Measured) -> list[Settings]:
    """Return all that fits into what is free on the fullest rank, and half of it."""
    facts, last = best.last.facts, best.last
    free = best.spare_nbytes - int(_BUDGET_MARGIN * last.total_nbytes)
    most = min(facts.get("unsharded_nbytes", 0), free)
    sizes = [size // _MIB * _MIB or size for size in (most, most // 2)]
    least = max(1, facts.get("largest_unit_nbytes", 0) // 8)
    return [{"fsdp_memory_budget": size} for size in sizes if size >= least]
