"""The expert bias: what it chooses, how it follows the load, and that all ranks and splits agree on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.expert_bias import routers_with_bias, update_expert_biases
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.routing import of_best_groups, route
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support import plain_router
from tests.support.launch import run_ranks
from tests.support.tiny_moe import FIELDS, build_moe_gpt

RATE = 0.25
BIASED: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": RATE,
}


def _config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**{**FIELDS, **BIASED, **fields})


def _hidden(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 2, 16, generator=torch.Generator().manual_seed(seed))


def _layer(**fields: Any) -> Any:
    return build_moe_gpt(**{**BIASED, **fields}).decoder.layers[0].mlp


def test_the_bias_chooses_and_the_score_weighs() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([-1.0, 0.0, 0.0, 1.0])
    routing = route(logits, torch.eye(4), _config(), expert_bias=bias).routing
    assert routing.experts.tolist() == [[3, 1]]  # sigmoid(-1) + 1 and sigmoid(1) are the largest sums
    scores = torch.sigmoid(torch.tensor([-1.0, 1.0]))
    torch.testing.assert_close(routing.probs, (scores / scores.sum()).unsqueeze(0))


def test_a_group_is_judged_by_its_best_and_the_others_are_out() -> None:
    """Of two choices from one of two groups both count: 5 + 1 is more than 4 + 1.5, and less than 4 + 3."""
    scores = torch.tensor([[5.0, 1.0, 0.0, 4.0, 1.5, 0.0], [5.0, 1.0, 0.0, 4.0, 3.0, 0.0]])
    kept = of_best_groups(scores, num_groups=2, group_topk=1, topk=2)
    out = [-torch.inf] * 3
    assert kept.tolist() == [[5.0, 1.0, 0.0, *out], [*out, 4.0, 3.0, 0.0]]
    # With one choice of each of two groups the best alone counts.
    assert of_best_groups(scores, num_groups=3, group_topk=2, topk=2)[0].tolist() == [
        5.0,
        1.0,
        0.0,
        4.0,
        -torch.inf,
        -torch.inf,
    ]


def test_the_bias_follows_the_load_of_a_step() -> None:
    """Over two microbatches, as a plain reference computes it; a second step starts to count anew."""
    layer = _layer()
    router, expected = layer.router, torch.zeros(4)
    for step in range(2):
        chosen = []
        for seed in (2 * step, 2 * step + 1):
            logits = _hidden(seed).view(-1, 16) @ router.weight.detach().t()
            chosen.append(plain_router.routed(logits, router.config, expected)[1])
            layer(_hidden(seed))
        update_expert_biases([router], RATE, None)
        expected = plain_router.updated_bias(expected, torch.cat(chosen), RATE)
        assert torch.equal(router.expert_bias, expected) and expected.abs().sum() > 0
    assert not router.local_tokens_per_expert.any()


def test_equal_counts_move_nothing() -> None:
    router: Any = TopKRouter(_config())
    router.local_tokens_per_expert += 5
    update_expert_biases([router], RATE, None)
    assert torch.equal(router.expert_bias, torch.zeros(4))


@pytest.mark.parametrize("reentrant", [False, True])
def test_evaluation_and_recomputation_count_nothing(reentrant: bool) -> None:
    """Reentrant checkpoints run without gradients first: what they compute in backward is counted."""
    layer = _layer()
    x = _hidden().requires_grad_()
    checkpoint(lambda x: layer(x)[0], x, use_reentrant=reentrant).sum().backward()
    once = layer.router.local_tokens_per_expert.clone()
    assert int(once.sum()) == 12 * 2
    with torch.no_grad():
        layer(x)
    layer.eval()(x)
    assert torch.equal(layer.router.local_tokens_per_expert, once)


@pytest.mark.parametrize("pads", [False, True])
def test_dropped_assignments_and_padding_do_not_count(pads: bool) -> None:
    layer = _layer(moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=pads)
    whole = _layer()
    layer(_hidden()), whole(_hidden())
    assert torch.equal(layer.router.local_tokens_per_expert, whole.router.local_tokens_per_expert.clamp(max=6))
    assert int(whole.router.local_tokens_per_expert.max()) > 6


def test_the_bias_stays_in_fp32_whatever_the_model_is_converted_to() -> None:
    router: Any = TopKRouter(_config())
    router.expert_bias += 1 + 2**-20
    assert router.bfloat16().expert_bias is not None and router.weight.dtype is torch.bfloat16
    assert torch.equal(router.expert_bias, torch.full((4,), 1 + 2**-20))
    assert set(router.state_dict()) == {"weight", "expert_bias"}
    assert router.to("meta").expert_bias.is_meta


def test_frozen_biases_and_those_of_evaluated_models_stay() -> None:
    router: Any = TopKRouter(_config())
    router.local_tokens_per_expert[0] = 8
    router.frozen_expert_bias = True
    update_expert_biases([router], RATE, None)
    router.frozen_expert_bias = False
    update_expert_biases([router.eval()], RATE, None)
    assert torch.equal(router.expert_bias, torch.zeros(4))


def _biases_of_step(layers: int) -> tuple[list[list[float]], list[int], int]:
    """Biases after a step whose counts the ranks know a part of each, and the collectives of the update."""
    rank = dist.get_rank()
    model: Any = torch.nn.Module()
    model.config, model.finish_grad_sync = _config(), lambda **_: None
    model.routers = torch.nn.ModuleList(TopKRouter(model.config) for _ in range(layers))
    for number, router in enumerate(routers_with_bias(model)):
        router.local_tokens_per_expert += torch.tensor([[3, 0, 1, 0], [0, 4, 1, 3]])[rank] * (number + 1)
    calls: list[int] = []
    all_reduce = dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *args, **kw: (calls.append(1), all_reduce(*args, **kw)))
        finalize_model_grads([model], pg_collection=ProcessGroupCollection(dp_cp=dist.group.WORLD))
    routers: list[Any] = list(routers_with_bias(model))
    left = [int(router.local_tokens_per_expert.sum()) for router in routers]
    return [router.expert_bias.tolist() for router in routers], left, len(calls)


def test_counts_of_all_ranks_and_layers_are_summed_by_one_collective() -> None:
    """[3, 4, 2, 3] of twelve: the mean is 3, though no rank by itself would say so."""
    for biases, left, collectives in run_ranks(2, _biases_of_step, 3):
        assert biases == [[0.0, -RATE, RATE, 0.0]] * 3
        assert left == [0] * 3 and collectives == 1
