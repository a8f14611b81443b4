"""Recomputation changes memory, not numbers: they are bitwise the same, with dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from tests.support.tiny_gpt import build_gpt, random_tokens

METHODS: list[dict[str, Any]] = [
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp_act"]},
    {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    {"recompute_granularity": "selective", "recompute_modules": ["mlp", "mlp_act"]},
]
ARGUMENTS = {"position_embedding_type": "rope"}
FIELDS: dict[str, Any] = {
    "num_layers": 3,
    "num_query_groups": 2,
    "hidden_dropout": 0.2,
    "attention_dropout": 0.3,
    "gated_linear_unit": True,
    "activation_func": "silu",
}


def _train_step(masked: bool, **fields: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[int]]:
    """Return losses [b, s], gradients, and how often each layer ran."""
    model = build_gpt(ARGUMENTS, **FIELDS, **fields)
    calls = [0] * len(model.decoder.layers)
    for number, layer in enumerate(model.decoder.layers):
        layer.register_forward_pre_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    inputs, positions, labels = random_tokens()
    mask = torch.ones(9, 9).tril() < 0.5 if masked else None
    torch.manual_seed(11)
    losses = model(inputs, positions, mask, labels=labels)
    losses.mean().backward()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, calls


@pytest.mark.parametrize("fields", METHODS, ids=lambda fields: "-".join(str(value) for value in fields.values()))
@pytest.mark.parametrize("masked", [False, True])
def test_losses_and_gradients_are_bitwise_equal(fields: dict[str, Any], masked: bool) -> None:
    losses, gradients, calls = _train_step(masked)
    again, again_gradients, again_calls = _train_step(masked, **fields)
    assert torch.equal(losses, again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, again_gradients[name]), name
    assert calls == [1, 1, 1]
    recomputed = {"uniform": [2, 2, 2], "block": [2, 2, 1]}.get(fields.get("recompute_method", ""), [1, 1, 1])
    assert again_calls == recomputed


def test_dropout_is_on() -> None:
    """Otherwise the equality above would not show that the generator's state is restored."""
    losses, _, _ = _train_step(False)
    model = build_gpt(ARGUMENTS, **FIELDS).eval()
    inputs, positions, labels = random_tokens()
    assert not torch.equal(losses, model(inputs, positions, None, labels=labels))


def test_selective_recomputation_repeats_the_core_of_attention_only() -> None:
    model = build_gpt(ARGUMENTS, **FIELDS, recompute_granularity="selective")
    calls: list[str] = []
    attention = model.decoder.layers[0].self_attention
    for name in ("core_attention", "linear_qkv", "linear_proj"):
        getattr(attention, name).register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    inputs, positions, labels = random_tokens()
    model(inputs, positions, None, labels=labels).mean().backward()
    assert sorted(calls) == ["core_attention", "core_attention", "linear_proj", "linear_qkv"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"bias_activation_fusion": True},
        {"activation_func": "relu", "gated_linear_unit": False},
        {"activation_func": "gelu", "gated_linear_unit": False},
    ],
    ids=str,
)
def test_what_is_activated_is_released_until_backward(fields: dict[str, Any]) -> None:
    """Also where the activation itself keeps it, as ReLU does; the attention is not recomputed then."""
    selective: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["mlp_act"]}
    results = []
    for recomputed in ({}, selective):
        model = build_gpt(ARGUMENTS, **(FIELDS | fields), **recomputed)
        seen: list[torch.Tensor] = []
        attended: list[int] = []
        model.decoder.layers[1].mlp.linear_fc2.register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args[0])
        )
        attention = model.decoder.layers[1].self_attention.core_attention
        attention.register_forward_pre_hook(lambda *_, attended=attended: attended.append(1))
        inputs, positions, labels = random_tokens()
        torch.manual_seed(11)
        loss = model(inputs, positions, None, labels=labels).mean()
        assert (seen[0].untyped_storage().nbytes() == 0) == bool(recomputed)
        loss.backward()
        assert seen[0].untyped_storage().nbytes() > 0 and attended == [1]
        results.append([p.grad for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_nothing_is_released_where_the_whole_mlp_is_being_recomputed() -> None:
    """That forward has no backward which would compute it again; recomputations that stop early hide this."""
    fields: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["mlp", "mlp_act"]}
    losses, gradients, _ = _train_step(False)
    with set_checkpoint_early_stop(False):
        again, again_gradients, _ = _train_step(False, **fields)
    assert torch.equal(losses, again)
    assert all(torch.equal(gradient, again_gradients[name]) for name, gradient in gradients.items())


def test_evaluation_recomputes_nothing() -> None:
    model = build_gpt(ARGUMENTS, **FIELDS, **METHODS[0]).eval()
    calls: list[int] = []
    model.decoder.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    inputs, positions, labels = random_tokens()
    model(inputs, positions, None, labels=labels).mean().backward()
    assert calls == [1]


@pytest.mark.parametrize("forced", [False, True])
def test_mixtures_of_experts_are_recomputed_alone_with_the_same_numbers(forced: bool) -> None:
    """Also where the router draws random logits, which must be the same again."""
    experts: dict[str, Any] = {
        "num_moe_experts": 4,
        "moe_layer_freq": [0, 1, 1],
        "moe_aux_loss_coeff": 0.1,
        "moe_router_force_load_balancing": forced,
    }
    losses, gradients, _ = _train_step(False, **experts)
    again, again_gradients, _ = _train_step(
        False, **experts, recompute_granularity="selective", recompute_modules=["moe"]
    )
    assert torch.equal(losses, again)
    assert all(torch.equal(gradient, again_gradients[name]) for name, gradient in gradients.items())


@pytest.mark.parametrize(
    ("modules", "expected"), [(["mlp"], {0: 2, 1: 1}), (["moe"], {0: 1, 1: 2}), (["core_attn"], {0: 1, 1: 1})]
)
def test_only_the_named_kind_of_mlp_runs_again(modules: list[str], expected: dict[int, int]) -> None:
    model = build_gpt(
        ARGUMENTS,
        **FIELDS,
        num_moe_experts=2,
        moe_layer_freq=[0, 1, 0],
        recompute_granularity="selective",
        recompute_modules=modules,
    )
    calls = {0: 0, 1: 0}
    for number in calls:
        mlp = model.decoder.layers[number].mlp
        mlp.register_forward_pre_hook(lambda *_, number=number: calls.__setitem__(number, calls[number] + 1))
    inputs, positions, labels = random_tokens()
    model(inputs, positions, None, labels=labels).mean().backward()
    assert calls == expected
