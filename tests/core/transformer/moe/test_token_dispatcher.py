"""Dispatch and combine on one rank and over several give the sums over each token's experts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.rank_grid import RankGrid
from megatron.core.transformer.moe.permutation import expert_order_up_to
from megatron.core.transformer.moe.routing import Routing, capacity
from megatron.core.transformer.moe.token_dispatcher import (
    AllToAllDispatcher,
    LocalDispatcher,
    MoEAlltoAllTokenDispatcher,
    build_dispatcher,
)
from megatron.core.transformer.moe.token_exchange import ExpertRows
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.launch import run_ranks
from tests.support.tiny_moe import FIELDS

NUM_TOKENS, WIDTH, NUM_EXPERTS, TOPK = 10, 3, 4, 2

DROPS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "probs": {"moe_expert_capacity_factor": 0.8},
    "position": {"moe_expert_capacity_factor": 0.8, "moe_token_drop_policy": "position"},
    "padded": {"moe_expert_capacity_factor": 0.9, "moe_pad_expert_input_to_capacity": True},
}


BOUNDED: dict[str, dict[str, Any]] = {
    "bounded": {"moe_expert_rank_capacity_factor": 8.0},
    "bounded_drops": {"moe_expert_rank_capacity_factor": 0.8},
}


def _config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**{**FIELDS, **fields})


def _tokens(rank: int, idle: int | None = None) -> tuple[torch.Tensor, Routing]:
    """Draw tokens of a rank and their routing; an ``idle`` expert gets none."""
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(NUM_TOKENS, WIDTH, dtype=torch.float64, generator=generator, requires_grad=True)
    scores = torch.rand(NUM_TOKENS, NUM_EXPERTS, dtype=torch.float64, generator=generator)
    if idle is not None:
        scores[:, idle] = -1.0
    probs, experts = torch.topk(scores, TOPK)
    return hidden, Routing(probs.detach().requires_grad_(), experts)


def _kept(routing: Routing, config: TransformerConfig, num_owners: int = 1) -> torch.Tensor:
    """Return which assignments are kept, [t, k]."""
    if config.moe_expert_rank_capacity_factor is not None:
        room = [
            math.ceil(0.8 * NUM_TOKENS * TOPK / num_owners) if config.moe_expert_rank_capacity_factor < 1 else 99
        ] * num_owners
        kept = torch.zeros(NUM_TOKENS, TOPK, dtype=torch.bool)
        for expert in range(NUM_EXPERTS):
            owner = expert // (NUM_EXPERTS // num_owners)
            for place in (routing.experts == expert).nonzero().tolist():
                kept[tuple(place)] = room[owner] > 0
                room[owner] -= 1
        return kept
    limit = capacity(NUM_TOKENS, config)
    if limit is None:
        return torch.ones_like(routing.experts, dtype=torch.bool)
    by_probs = config.moe_token_drop_policy == "probs"
    probs = routing.probs.detach() if by_probs else None
    order = expert_order_up_to(limit, routing.experts, NUM_EXPERTS, probs=probs, pads=False)
    kept = torch.zeros(NUM_TOKENS * TOPK, dtype=torch.bool)
    kept[order.assignments.sources] = True
    return kept.view(NUM_TOKENS, TOPK)


def _directly(hidden: torch.Tensor, routing: Routing, kept: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Sum prob * factors[e] * token ** 2 over kept experts e, without dispatch."""
    scale = (routing.probs * factors[routing.experts] * kept).sum(dim=1, keepdim=True)
    return scale * hidden**2


def _compute(rows: ExpertRows, factors: torch.Tensor, share: float = 1.0) -> torch.Tensor:
    """Compute the rows of experts with these factors; ``share`` is a tensor-parallel rank's part of the sum."""
    counts = torch.tensor(rows.counts_on_host())
    assert counts.tolist() == rows.counts.tolist()
    num_padded = rows.hidden_states.shape[0] - int(counts.sum())
    assert num_padded >= 0 and (rows.has_padding or num_padded == 0)
    assert rows.ends().tolist() == counts.cumsum(0).tolist()
    # What experts compute of padding is never used.
    of_padding = factors.new_full((num_padded,), torch.nan)
    scale = torch.cat((factors.repeat_interleave(counts), of_padding))
    return (rows.probs * share * scale).unsqueeze(1) * rows.hidden_states**2


@pytest.mark.parametrize("drop", DROPS)
def test_a_round_trip_on_one_rank_is_the_sum_over_kept_experts(drop: str) -> None:
    config, factors = _config(**DROPS[drop]), torch.arange(1.0, 5.0, dtype=torch.float64)
    hidden, routing = _tokens(0)
    kept = _kept(routing, config)
    assert bool(kept.all()) == (drop == "dropless")
    plan = LocalDispatcher(config).plan(routing)
    rows = plan.dispatch(hidden, routing.probs)
    output, expected = plan.combine(_compute(rows, factors)), _directly(hidden, routing, kept, factors)
    torch.testing.assert_close(output, expected)
    weight = torch.randn_like(output)
    inputs = (hidden, routing.probs)
    for ours, theirs in zip(
        torch.autograd.grad((output * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def _round_trips(degrees: dict[str, Any], idle: int | None) -> dict[str, float]:
    """Return, for each kind of drop, the largest difference of results and gradients from those without dispatch."""
    groups = build_process_groups(RankGrid(world_size=dist.get_world_size(), **degrees))
    num_owners, num_parts = group_size(groups.ep), group_size(groups.expt_tp)
    local = NUM_EXPERTS // num_owners
    factors = torch.arange(1.0, NUM_EXPERTS + 1, dtype=torch.float64, requires_grad=True)
    mine = slice(group_rank(groups.ep) * local, (group_rank(groups.ep) + 1) * local)
    differences = {}
    for drop, fields in (DROPS | BOUNDED if num_owners > 1 else DROPS).items():
        config = _config(**fields)
        dispatcher = build_dispatcher(config, groups)
        assert isinstance(dispatcher, AllToAllDispatcher)
        hidden, routing = _tokens(dist.get_rank(), idle)
        plan = dispatcher.plan(routing)
        rows = plan.dispatch(hidden, routing.probs)
        # Tensor-parallel ranks of an expert give summands that differ.
        share = (1 + group_rank(groups.expt_tp)) / sum(range(1, num_parts + 1))
        output = plan.combine(_compute(rows, factors[mine], share))
        kept = _kept(routing, config, num_owners)
        assert drop != "bounded" or kept.all()
        assert drop != "bounded_drops" or plan.assignments_of_experts().sum() == kept.sum()
        expected = _directly(hidden, routing, kept, factors)
        differences[drop] = float((output - expected).detach().abs().max())
        inputs = (hidden, routing.probs, factors)
        ours = list(torch.autograd.grad(output.sin().sum(), inputs))
        theirs = torch.autograd.grad(expected.sin().sum(), inputs)
        # A factor's gradient is with its expert's ranks; here each rank has those of its own tokens.
        dist.all_reduce(ours[2])
        dist.all_reduce(theirs[2])
        differences[f"{drop} gradients"] = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    return differences


@pytest.mark.parametrize(
    ("world_size", "degrees"),
    [
        (2, {"expert_model_parallel_size": 2}),
        (4, {"expert_model_parallel_size": 4}),
        (2, {"tensor_model_parallel_size": 2}),
        (4, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    ],
    ids=["ep2", "ep4", "etp2", "etp2_ep2"],
)
def test_a_round_trip_over_ranks_is_the_sum_over_kept_experts(world_size: int, degrees: dict[str, int]) -> None:
    """With an expert that no token goes to: in the case of 4 ranks a rank that has nothing to compute."""
    for differences in run_ranks(world_size, _round_trips, degrees, 1):
        assert max(differences.values()) < 1e-12, differences


def _stages_by_maps(degrees: dict[str, Any]) -> dict[str, float]:
    """Return the largest differences of Megatron-Core's stages, with and without dropped assignments, from sums without dispatch."""
    groups = build_process_groups(RankGrid(world_size=dist.get_world_size(), **degrees))
    local, first = NUM_EXPERTS // group_size(groups.ep), NUM_EXPERTS // group_size(groups.ep) * group_rank(groups.ep)
    factors = torch.arange(1.0, NUM_EXPERTS + 1, dtype=torch.float64, requires_grad=True)
    share = (1 + group_rank(groups.expt_tp)) / sum(range(1, group_size(groups.expt_tp) + 1))
    differences = {}
    for drop in ("dropless", "probs"):
        config = _config(**DROPS[drop])
        hidden, routing = _tokens(dist.get_rank(), 1)
        kept = _kept(routing, config)
        probs = torch.zeros(NUM_TOKENS, NUM_EXPERTS, dtype=torch.float64).scatter(1, routing.experts, routing.probs)
        routing_map = torch.zeros(NUM_TOKENS, NUM_EXPERTS).scatter(1, routing.experts, kept.float()).bool()
        dispatcher = MoEAlltoAllTokenDispatcher(local, list(range(first, first + local)), config, groups)
        staged = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(hidden, routing_map, probs))
        rows, counts, weights = dispatcher.dispatch_postprocess(*staged)
        assert int(counts.sum()) == rows.shape[0] and dispatcher.num_out_tokens == int(kept.sum())
        scale = factors[first : first + local].repeat_interleave(counts) * weights * share
        results = dispatcher.combine_preprocess(rows**2 * scale.unsqueeze(1))
        output = dispatcher.combine_postprocess(dispatcher.token_combine(results))
        expected = _directly(hidden, routing, kept, factors)
        differences[drop] = float((output - expected).detach().abs().max())
        inputs = (hidden, routing.probs)
        pairs = zip(*(torch.autograd.grad(x.sin().sum(), inputs) for x in (output, expected)), strict=True)
        differences[f"{drop} gradients"] = max(float((a - b).abs().max()) for a, b in pairs)
    return differences


@pytest.mark.parametrize(
    "degrees",
    [
        {"expert_model_parallel_size": 4},
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    ],
    ids=["ep4", "etp2_ep2"],
)
def test_stages_by_routing_maps_are_a_round_trip(degrees: dict[str, int]) -> None:
    """For callers that dispatch by Megatron-Core's names."""
    for differences in run_ranks(4, _stages_by_maps, degrees):
        assert max(differences.values()) < 1e-12, differences


def test_experts_of_a_rank_are_neighbors() -> None:
    with pytest.raises(ValueError, match="local_expert_indices must be 2 neighboring experts"):
        MoEAlltoAllTokenDispatcher(2, [0, 2], _config(), ProcessGroupCollection())


def test_groups_of_another_size_are_refused() -> None:
    class TwoRanks:
        def size(self) -> int:
            return 2

    groups: Any = type("Groups", (), {"ep": TwoRanks(), "expt_tp": TwoRanks(), "tp_ep": TwoRanks()})()
    with pytest.raises(ValueError, match=r"tp_ep must hold the ranks of expt_tp and ep \(2 x 2\), got 2"):
        build_dispatcher(_config(), groups)
