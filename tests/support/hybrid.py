"""What the tests of hybrid sharding share: 2 x 2 ranks, a net that is sharded over them, and the sums that must come out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.core.distributed.fsdp import fully_shard, hybrid_placements, microbatch
from megatron.core.distributed.fsdp.config.placement import OUTER_STRATEGIES
from megatron.core.distributed.fsdp.dtensor.placements import local_rows
from tests.support.models import (
    STRATEGY_NAMES,
    Net,
    context_of,
    global_batch,
    local_of,
    loss_of,
    make_net,
)

NUM_OUTER = NUM_INNER = 2
WORLD = NUM_OUTER * NUM_INNER
HYBRIDS = [(strategy, outer) for strategy in STRATEGY_NAMES for outer in OUTER_STRATEGIES]
# One of each kind: gradients that rest partial inside, sums that wait for the outer axis, weights that come over both.
KINDS = [("optim", "optim"), ("optim_grads", "no_shard"), ("optim_grads_params", "optim")]

LEARNING_RATE = 0.1

Piece = tuple[torch.Tensor, torch.Tensor]


@functools.lru_cache(maxsize=1)
def hybrid_mesh() -> DeviceMesh:
    """Ranks [[0, 1], [2, 3]]. Ranks: all."""
    return init_device_mesh("cpu", (NUM_OUTER, NUM_INNER), mesh_dim_names=("outer", "inner"))


def shard_hybrid(net: Net, strategy: str, outer: str, *, overlaps: bool = True, **settings: Any) -> Net:
    """The net with each block and the root a unit; released memory is poisoned. Ranks: all."""
    settings = {"placements": hybrid_placements(strategy, outer, ("outer", "inner")), **settings}
    if not overlaps:
        settings |= {"forward_prefetch_depth": 0, "backward_prefetch_depth": 0}
    for module in (*net.blocks, net):
        fully_shard(module, hybrid_mesh(), **settings)
    context = context_of(net)
    context.change_options(poisons=True)
    context.change_options(overlaps_reductions=overlaps)
    return net


def pieces_of(step: int, num_microbatches: int) -> list[list[Piece]]:
    """[microbatches][ranks] of the step's global batch."""
    flat = global_batch(step, num_microbatches * WORLD)
    return [flat[at : at + WORLD] for at in range(0, len(flat), WORLD)]


def backward_sharded(net: Net, step: int, num_microbatches: int) -> list[torch.Tensor]:
    """Compute the step's gradients; return the losses of this rank's pieces. Ranks: all."""
    losses = []
    pieces = pieces_of(step, num_microbatches)
    for at, of_ranks in enumerate(pieces):
        with microbatch(net, is_first=at == 0, is_last=at == len(pieces) - 1):
            loss = loss_of(net, of_ranks[dist.get_rank()])
            (loss / len(pieces)).backward()
        losses.append(loss.detach())
    return losses


def backward_in_order(net: nn.Module, step: int, num_microbatches: int, strategy: str) -> list[torch.Tensor]:
    """As ``backward_sharded`` for a net without the engine, which sums all ranks' pieces as the engine says it does.

    Over microbatches first, in each rank, where gradients rest partial over the inner axis; then over the inner ranks, in
    their order; over microbatches here, where they rest reduced over the inner axis; over the outer ranks last.
    """
    parameters = list(net.parameters())
    pieces = pieces_of(step, num_microbatches)
    losses = [[loss_of(net, piece) for piece in of_ranks] for of_ranks in pieces]
    grads = [[torch.autograd.grad(loss / len(pieces), parameters) for loss in of_ranks] for of_ranks in losses]
    for index, parameter in enumerate(parameters):
        terms = [[of_piece[index] for of_piece in of_ranks] for of_ranks in grads]
        if strategy in ("no_shard", "optim"):
            terms = [[_sum(of_rank) for of_rank in zip(*terms, strict=True)]]
        inner = [
            [_sum(of_ranks[outer * NUM_INNER : (outer + 1) * NUM_INNER]) for outer in range(NUM_OUTER)]
            for of_ranks in terms
        ]
        parameter.grad = _sum([_sum(of_outer) for of_outer in zip(*inner, strict=True)]) / WORLD
    return [of_ranks[dist.get_rank()].detach() for of_ranks in losses]


def _sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, terms)


@dataclass(frozen=True)
class Step:
    """What a step of a net without the engine computes: losses of this rank's pieces, gradients, and the weights after it."""

    losses: list[torch.Tensor]
    gradients: list[torch.Tensor]
    weights: list[torch.Tensor]


def steps_in_order(strategy: str, num_microbatches: int, num_steps: int) -> list[Step]:
    """The steps of a net without the engine, which sums as ``backward_in_order``; made once for strategies that sum alike."""
    return _steps_in_order("optim" if strategy in ("no_shard", "optim") else "optim_grads", num_microbatches, num_steps)


@functools.cache
def _steps_in_order(strategy: str, num_microbatches: int, num_steps: int) -> list[Step]:
    net, steps = make_net(2), []
    for step in range(num_steps):
        losses = backward_in_order(net, step, num_microbatches, strategy)
        gradients = [local_of(parameter.grad) for parameter in net.parameters()]
        descend(net)
        steps.append(Step(losses, gradients, [parameter.detach().clone() for parameter in net.parameters()]))
    return steps


@torch.no_grad()
def descend(net: nn.Module) -> None:
    """Step each weight against its gradient, and clear that. Communicates nothing."""
    for parameter in net.parameters():
        local_of(parameter).add_(local_of(parameter.grad), alpha=-LEARNING_RATE)
        parameter.grad = None


def assert_rows(sharded: nn.Module, expected: Sequence[torch.Tensor], *, of_gradients: bool = False) -> None:
    """Check that this rank's rows of all weights, or gradients, are equal to the last bit; communicates nothing."""
    for (name, parameter), whole in zip(sharded.named_parameters(), expected, strict=True):
        own = parameter.grad if of_gradients else parameter
        assert torch.equal(local_of(own), local_rows(parameter, whole)), name  # type: ignore[arg-type]


def assert_equal_rows(sharded: nn.Module, plain: nn.Module, *, gradients: bool) -> None:
    """Check that this rank's rows of weights, and of gradients, are equal to the last bit; communicates nothing."""
    ours: dict[str, Any] = dict(sharded.named_parameters())
    for name, theirs in plain.named_parameters():
        own = ours[name]
        assert torch.equal(local_of(own), local_rows(own, theirs.detach())), f"weight {name}"
        if gradients:
            assert theirs.grad is not None
            assert torch.equal(local_of(own.grad), local_rows(own, theirs.grad)), f"gradient of {name}"


def make_hybrid_net(strategy: str, outer: str, *, dtype: torch.dtype = torch.float32, **settings: Any) -> Net:
    """A sharded net of two blocks and the usual weights. Ranks: all."""
    return shard_hybrid(make_net(2, dtype=dtype), strategy, outer, **settings)
