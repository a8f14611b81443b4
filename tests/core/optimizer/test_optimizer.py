"""Parameter groups and the step of the optimizer on plain modules; sharded ones are tested with the engine."""

from __future__ import annotations

import pytest
import torch

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer


class _Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(5, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.output = torch.nn.Linear(4, 5)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.norm(self.embedding(tokens))).logsumexp(-1).sum()


def test_vectors_are_not_decayed_and_tied_weights_are_updated_once() -> None:
    model = _Tied()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, weight_decay=0.3), [model])
    undecayed, decayed = optimizer.param_groups
    assert (undecayed["weight_decay"], decayed["weight_decay"]) == (0.0, 0.3)
    assert [id(p) for p in decayed["params"]] == [id(model.embedding.weight)]
    assert {id(p) for p in undecayed["params"]} == {id(model.norm.weight), id(model.norm.bias), id(model.output.bias)}


def test_embedding_and_output_layer_may_have_their_own_rate() -> None:
    model = _Tied()
    model.embedding.weight.is_embedding_or_output_parameter = True  # type: ignore[attr-defined]
    config = OptimizerConfig(lr=0.1, min_lr=0.01, decoupled_lr=0.5, decoupled_min_lr=0.05)
    groups = get_megatron_optimizer(config, [model]).param_groups
    assert [(g["is_decoupled_lr"], g["max_lr"], g["min_lr"]) for g in groups] == [(False, 0.1, 0.01), (True, 0.5, 0.05)]


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("clip", [0.0, 0.1])
def test_a_step_equals_torch(kind: str, clip: float) -> None:
    ours, theirs = _Tied(), _Tied()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer=kind, lr=0.1, weight_decay=0.0, clip_grad=clip), [ours]
    )
    params = [p for p in theirs.parameters() if p.requires_grad]
    if kind == "adam":
        reference: torch.optim.Optimizer = torch.optim.AdamW(params, lr=0.1, betas=(0.9, 0.999), weight_decay=0.0)
    else:
        reference = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    tokens = torch.tensor([0, 1, 1, 3])
    for _ in range(3):
        ours(tokens).backward()
        theirs(tokens).backward()
        result = optimizer.step()
        norm = torch.nn.utils.clip_grad_norm_(params, clip or 1e9)
        reference.step()
        assert result.update_successful
        torch.testing.assert_close(result.grad_norm, norm)
        optimizer.zero_grad()
        reference.zero_grad()
        assert all(p.grad is None for p in ours.parameters())
    for got, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(got, wanted)


def test_state_survives_a_round_trip() -> None:
    model = _Tied()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=0.1, log_num_zeros_in_grad=True), [model])
    model(torch.tensor([0])).backward()
    model.norm.bias.grad = torch.zeros(4)
    zeros = optimizer.step().num_zeros_in_grad
    assert zeros is not None and zeros.item() >= 4
    other = get_megatron_optimizer(OptimizerConfig(lr=0.1), [_Tied()])
    other.load_state_dict(optimizer.state_dict())
    assert other.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "muon"},
        {"lr": 0.1, "min_lr": 0.2},
        {"clip_grad": -1.0},
        {"adam_beta1": 1.0},
        {"sgd_momentum": -0.1},
    ],
)
def test_settings_out_of_range_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="must"):
        OptimizerConfig(**settings)


def test_a_rate_and_a_trainable_parameter_are_needed() -> None:
    with pytest.raises(ValueError, match="lr must be set"):
        get_megatron_optimizer(OptimizerConfig(), [_Tied()])
    with pytest.raises(ValueError, match="trainable"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1), [_Tied().requires_grad_(False)])
