"""Sampling follows the model's probabilities, and all ranks run the same passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.inference.sampling import generate
from tests.support.tiny_gpt import VOCAB_SIZE, build_gpt, random_tokens


class Counter(torch.nn.Module):
    """A model that always predicts the next number; it records input lengths and its training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, bool]] = []

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: None) -> torch.Tensor:
        self.seen.append((tokens.shape[1], self.training))
        assert torch.equal(positions, torch.arange(tokens.shape[1]).expand_as(tokens)) and mask is None
        return torch.nn.functional.one_hot((tokens + 1) % 10, 10) * 100.0


@pytest.mark.parametrize("arguments", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 2.0}, {"top_k": 4}])
def test_a_sure_model_is_followed(arguments: dict[str, Any]) -> None:
    tokens = torch.tensor([[1, 2], [6, 7]])
    assert generate(Counter(), tokens, 4, **arguments).tolist() == [[1, 2, 3, 4, 5, 6], [6, 7, 8, 9, 0, 1]]


def test_the_model_runs_in_eval_mode_and_is_put_back() -> None:
    model = Counter().train()
    generate(model, torch.tensor([[1]]), 3)
    assert model.seen == [(1, False), (2, False), (3, False)] and model.training


def test_the_mode_is_put_back_after_an_error() -> None:
    model = Counter().train()
    with pytest.raises(RuntimeError):
        generate(model, torch.tensor([[20]]), 1, generator=torch.Generator(device="meta"))
    assert model.training


def test_the_context_is_cut_to_its_last_tokens() -> None:
    model = Counter()
    assert generate(model, torch.tensor([[1, 2, 3]]), 3, max_context=2).tolist() == [[1, 2, 3, 4, 5, 6]]
    assert [length for length, _ in model.seen] == [2, 2, 2]


def test_equal_generators_draw_equal_tokens() -> None:
    """So that ranks stay in lockstep."""
    model, tokens = build_gpt(init_method_std=0.5), random_tokens(length=4)[0]
    draws = [generate(model, tokens, 6, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert draws[0].shape == (2, 10) and torch.equal(draws[0][:, :4], tokens)


def test_top_k_draws_among_the_likeliest_in_their_proportion() -> None:
    class Fixed(torch.nn.Module):
        def forward(self, tokens: torch.Tensor, *_: Any) -> torch.Tensor:
            return torch.tensor([0.1, 0.6, 0.3, 0.0001]).log().expand(*tokens.shape, 4)

    draws = generate(Fixed(), torch.zeros(4000, 1, dtype=torch.long), 1, top_k=2, generator=torch.Generator())[:, 1]
    shares = torch.bincount(draws, minlength=4) / 4000
    assert shares[0] == 0 and shares[3] == 0
    assert shares[1].item() == pytest.approx(2 / 3, abs=0.04)  # five standard errors


@pytest.mark.parametrize("arguments", [{"num_tokens": -1}, {"temperature": -1.0}, {"top_k": -1}, {"max_context": 0}])
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        generate(Counter(), torch.zeros(1, 1, dtype=torch.long), **{"num_tokens": 1, **arguments})


def test_a_gpt_continues() -> None:
    out = generate(build_gpt(), torch.zeros(1, 1, dtype=torch.long), 3, temperature=0.0)
    assert out.shape == (1, 4) and int(out.max()) < VOCAB_SIZE
