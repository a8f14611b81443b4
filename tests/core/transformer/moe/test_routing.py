"""The router's arithmetic on numbers that can be checked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.core.transformer.moe.auxiliary_losses import AuxiliaryLosses
from megatron.core.transformer.moe.routing import Routing, capacity, route, sinkhorn
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support import plain_router
from tests.support.tiny_moe import FIELDS

LOGITS = torch.tensor([[0.0, math.log(2.0), math.log(5.0), math.log(4.0)]])  # softmax: 1, 2, 5 and 4 twelfths


def _config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**{**FIELDS, **fields})


def _route(logits: torch.Tensor, config: TransformerConfig) -> Routing:
    """Route hidden states that equal the logits."""
    return route(logits, torch.eye(logits.shape[-1], dtype=logits.dtype), config).routing


def test_softmax_after_the_choice_is_over_the_taken_alone() -> None:
    routing = _route(LOGITS, _config())
    assert routing.experts.tolist() == [[2, 3]]
    torch.testing.assert_close(routing.probs, torch.tensor([[5 / 9, 4 / 9]]))


def test_softmax_before_the_choice_is_over_all() -> None:
    routing = _route(LOGITS, _config(moe_router_pre_softmax=True))
    torch.testing.assert_close(routing.probs, torch.tensor([[5 / 12, 4 / 12]]))


def test_sigmoid_scores_are_normalised_over_the_taken_unless_there_is_one() -> None:
    two = _route(LOGITS, _config(moe_router_score_function="sigmoid"))
    first, second = 5 / 6, 4 / 5  # sigmoid(log x) = x / (1 + x)
    torch.testing.assert_close(two.probs, torch.tensor([[first, second]]) / (first + second))
    one = _route(LOGITS, _config(moe_router_score_function="sigmoid", moe_router_topk=1))
    torch.testing.assert_close(one.probs, torch.tensor([[first]]))


def test_the_scaling_factor_multiplies_probabilities() -> None:
    routing = _route(LOGITS, _config(moe_router_topk_scaling_factor=2.5))
    torch.testing.assert_close(routing.probs, torch.tensor([[5 / 9, 4 / 9]]) * 2.5)


def test_bf16_logits_are_scored_in_fp32_and_rounded_once() -> None:
    logits = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    routing = _route(logits, _config())
    wide = _route(logits.float(), _config())
    assert routing.probs.dtype is torch.bfloat16
    assert torch.equal(routing.probs, wide.probs.bfloat16())


_GROUPS = {"num_moe_experts": 8, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
KINDS: dict[str, dict[str, Any]] = {
    "softmax_of_chosen": {},
    "softmax_of_all": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "softmax_of_all_top1": {"moe_router_pre_softmax": True, "moe_router_topk": 1},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk": 3},
    "sigmoid_top1": {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
    "square_roots": {"moe_router_score_function": "sqrtsoftplus", "moe_router_topk": 3},
    "groups": {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "groups_of_two": {**_GROUPS, "moe_router_topk": 4, "moe_router_score_function": "sigmoid"},
    "bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "bias_and_groups": {
        **_GROUPS,
        "moe_router_score_function": "sqrtsoftplus",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
    },
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 2, "moe_aux_loss_coeff": 0.0},
    "sinkhorn_top1": {"moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1, "moe_aux_loss_coeff": 0.0},
}
BALANCED: dict[str, AuxiliaryLosses | None] = {
    "not_at_all": None,
    "all_tokens": AuxiliaryLosses(balancing={"aux_loss": 0.3}, z=None, scale=2.0),
    "sequences": AuxiliaryLosses(balancing={"seq_aux_loss": 0.3}, z=0.2, scale=0.5, num_sequences=3),
    "both": AuxiliaryLosses(balancing={"seq_aux_loss": 0.3, "aux_loss": 0.4}, z=0.2, scale=0.5, num_sequences=3),
    "z_alone": AuxiliaryLosses(balancing={}, z=0.2, scale=3.0),
}


@pytest.mark.parametrize("balanced", BALANCED)
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_those_that_autograd_finds(kind: str, balanced: str) -> None:
    """For hidden states and weight, with all losses, in fp64."""
    config, losses = _config(**KINDS[kind], moe_router_dtype="fp64"), BALANCED[balanced]
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(4, 3, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    num_experts = config.num_moe_experts or 0
    weight = torch.randn(num_experts, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    bias = torch.randn(num_experts, generator=generator) if config.moe_router_enable_expert_bias else None
    routing, balancing, z = route(hidden, weight, config, losses, expert_bias=bias, training=True)
    logits = hidden.view(-1, 16) @ weight.t()
    probs, experts = plain_router.routed(logits, config, bias)
    torch.testing.assert_close(routing.probs, probs)
    assert torch.equal(routing.experts, experts)
    total = (probs.sin() * torch.arange(1.0, probs.numel() + 1).view_as(probs)).sum()
    grads = torch.autograd.grad(
        (routing.probs.sin() * torch.arange(1.0, probs.numel() + 1).view_as(probs)).sum(), (hidden, weight)
    )
    expected: list[torch.Tensor] = []
    expected_z: torch.Tensor | None = None
    for loss, coefficient in (losses.balancing if losses is not None else {}).items():
        assert losses is not None
        function = "sigmoid" if kind == "sinkhorn_top1" else config.moe_router_score_function
        scores = plain_router.scores_of_all(logits, function)
        # The loss counts the best by score alone, wherever tokens go.
        counted = experts if "sinkhorn" in kind else torch.topk(scores, config.moe_router_topk)[1]
        num_sequences = 3 if loss == "seq_aux_loss" else 1
        expected.append(plain_router.load_balancing_loss(scores, counted, num_sequences))
        total = total + losses.scale * coefficient * expected[-1]
    if losses is not None and losses.z:
        expected_z = plain_router.z_loss(logits)
        total = total + losses.scale * losses.z * expected_z
    for mine, other in zip((*balancing, z), (*expected, expected_z), strict=True):
        assert (mine is None) == (other is None)
        assert mine is None or not mine.requires_grad
        torch.testing.assert_close(mine, None if other is None else other.detach())
    for mine, other in zip(grads, torch.autograd.grad(total, (hidden, weight)), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_routers_bias_is_added_to_its_logits() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((5, 2, 16), (4, 16), (4,))
    )
    config = _config(moe_router_dtype="fp64", moe_router_score_function="sigmoid")
    probs, experts = plain_router.routed(hidden.view(-1, 16) @ weight.t() + bias, config)
    routing = route(hidden, weight, config, bias=bias).routing
    assert torch.equal(routing.experts, experts)
    ours = torch.autograd.grad(routing.probs.sin().sum(), (hidden, weight, bias))
    torch.testing.assert_close(ours, torch.autograd.grad(probs.sin().sum(), (hidden, weight, bias)))


def test_sinkhorn_balances_what_it_is_given_and_is_off_in_evaluation() -> None:
    """All tokens prefer one expert, but in training each expert gets its share."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(64, 4, generator=generator) * 0.1 + torch.tensor([3.0, 0.0, 0.0, 0.0])
    config = _config(moe_router_load_balancing_type="sinkhorn", moe_router_topk=1, moe_aux_loss_coeff=0.0)
    trained = route(logits, torch.eye(4), config, training=True).routing
    assert torch.bincount(trained.experts.flatten(), minlength=4).max() <= 24
    torch.testing.assert_close(trained.probs, torch.sigmoid(logits).gather(1, trained.experts))
    evaluated = route(logits, torch.eye(4), config).routing
    assert (evaluated.experts == 0).all()


def test_sinkhorn_ends_where_logits_are_not_finite() -> None:
    assert not torch.isfinite(sinkhorn(torch.full((4, 2), math.nan))).any()


def test_forced_balance_routes_by_random_numbers_and_backward_goes_on() -> None:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(256, 4, generator=generator) + torch.tensor([9.0, 0.0, 0.0, 0.0])
    weight = torch.eye(4, requires_grad=True)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        forced = route(
            hidden,
            weight,
            _config(moe_router_force_load_balancing=True, moe_router_topk=1, moe_router_pre_softmax=True),
        )
    assert torch.bincount(forced.routing.experts.flatten(), minlength=4).min() > 40
    forced.routing.probs.sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0


@pytest.mark.gpu(1)
@pytest.mark.parametrize("balanced", BALANCED)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_compiled_computes_the_same_on_a_device(kind: str, balanced: str) -> None:
    """For two numbers of tokens; the second uses code for any number."""
    generator = torch.Generator(device="cuda").manual_seed(2)
    num_experts = KINDS[kind].get("num_moe_experts", 4)
    weight = torch.randn(num_experts, 16, device="cuda", generator=generator, requires_grad=True)
    for length in (64, 128):
        hidden = torch.randn(length, 3, 16, device="cuda", generator=generator, requires_grad=True)
        results = []
        for compiled in (True, False):
            config = _config(**KINDS[kind], disable_jit_fuser=not compiled)
            routing, losses, z = route(hidden, weight, config, BALANCED[balanced], training=True)
            grads = torch.autograd.grad(routing.probs.sin().sum(), (hidden, weight))
            results.append((*routing, *losses, z, *grads))
        # Sums over tokens are in another order.
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("num_tokens", "factor", "expected"), [(8, None, None), (8, 1.0, 4), (9, 1.0, 5), (8, 1.5, 6), (8, 100.0, 8)]
)
def test_capacity_is_a_multiple_of_the_fair_share(num_tokens: int, factor: float | None, expected: int | None) -> None:
    """Of 2 choices of each token and 4 experts; no expert gets a token twice, so none takes more than there are."""
    assert capacity(num_tokens, _config(moe_expert_capacity_factor=factor)) == expected
