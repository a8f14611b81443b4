"""The router's arithmetic on numbers that can be checked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron.core.transformer.moe.routing import capacity, route, scores_of_all
from tests.core.transformer.moe.tiny_moe import FIELDS, TransformerConfig

LOGITS = torch.tensor([[0.0, math.log(2.0), math.log(5.0), math.log(4.0)]])  # softmax: 1, 2, 5 and 4 twelfths


def _config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(**{**FIELDS, **fields})


def test_softmax_after_the_choice_is_over_the_taken_alone() -> None:
    routing = route(LOGITS, _config())
    assert routing.experts.tolist() == [[2, 3]]
    torch.testing.assert_close(routing.probs, torch.tensor([[5 / 9, 4 / 9]]))


def test_softmax_before_the_choice_is_over_all() -> None:
    routing = route(LOGITS, _config(moe_router_pre_softmax=True))
    torch.testing.assert_close(routing.probs, torch.tensor([[5 / 12, 4 / 12]]))


def test_sigmoid_scores_are_normalised_over_the_taken_unless_there_is_one() -> None:
    two = route(LOGITS, _config(moe_router_score_function="sigmoid"))
    first, second = 5 / 6, 4 / 5  # sigmoid(log x) = x / (1 + x)
    torch.testing.assert_close(two.probs, torch.tensor([[first, second]]) / (first + second))
    one = route(LOGITS, _config(moe_router_score_function="sigmoid", moe_router_topk=1))
    torch.testing.assert_close(one.probs, torch.tensor([[first]]))


def test_the_scaling_factor_multiplies_probabilities() -> None:
    routing = route(LOGITS, _config(moe_router_topk_scaling_factor=2.5))
    torch.testing.assert_close(routing.probs, torch.tensor([[5 / 9, 4 / 9]]) * 2.5)


def test_bf16_logits_are_scored_in_fp32_and_rounded_once() -> None:
    logits = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    routing = route(logits, _config())
    wide = route(logits.float(), _config())
    assert routing.probs.dtype is torch.bfloat16
    assert torch.equal(routing.probs, wide.probs.bfloat16())


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_scores_for_the_balancing_loss_add_up_to_one(score_function: str) -> None:
    scores = scores_of_all(LOGITS, score_function)
    torch.testing.assert_close(scores.sum(), torch.tensor(1.0))
    if score_function == "softmax":
        torch.testing.assert_close(scores, torch.tensor([[1.0, 2.0, 5.0, 4.0]]) / 12)


@pytest.mark.parametrize(
    ("num_tokens", "factor", "expected"), [(8, None, None), (8, 1.0, 4), (9, 1.0, 5), (8, 1.5, 6), (8, 100.0, 8)]
)
def test_capacity_is_a_multiple_of_the_fair_share(num_tokens: int, factor: float | None, expected: int | None) -> None:
    """Of 2 choices of each token and 4 experts; no expert gets a token twice, so none takes more than there are."""
    assert capacity(num_tokens, _config(moe_expert_capacity_factor=factor)) == expected
