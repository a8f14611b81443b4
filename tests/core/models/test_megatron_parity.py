"""Losses and gradients equal those of Megatron-LM's GPTModel in the fixtures, with the same weights."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny_gpt import FIXTURE_NAMES, MOE_FIXTURE_NAMES, load_fixture

TOLERANCE = 1e-5  # fp32: fused attention and another order of sums; seen: 5e-7 on losses, 1e-7 on gradients


@pytest.mark.parametrize("name", FIXTURE_NAMES + MOE_FIXTURE_NAMES)
@pytest.mark.parametrize("explicit_mask", [False, True])
def test_losses_and_gradients_equal_megatron_lm(name: str, explicit_mask: bool) -> None:
    """With the mask written out, the unfused attention must agree as well; the routers' auxiliary losses are included."""
    model, tensors, settings = load_fixture(name)
    inputs, labels = tensors["tokens"][:, :-1], tensors["tokens"][:, 1:]
    positions = torch.arange(16).expand(2, 16)
    mask = torch.ones(1, 1, 16, 16).tril() < 0.5 if explicit_mask else None

    losses = model(inputs, positions, mask, labels=labels)
    losses.mean().backward()

    torch.testing.assert_close(losses, tensors["loss"], rtol=0, atol=TOLERANCE)
    assert losses.mean().item() == pytest.approx(settings["mean_loss"], abs=TOLERANCE)
    gradients = {key[len("grad.") :] for key in tensors if key.startswith("grad.")}
    assert gradients == {key for key, _ in model.named_parameters()}
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, tensors[f"grad.{key}"], rtol=0, atol=TOLERANCE, msg=key)


@pytest.mark.parametrize("name", FIXTURE_NAMES + MOE_FIXTURE_NAMES)
def test_state_dict_holds_megatron_lms_names_and_nothing_else(name: str) -> None:
    model, tensors, _ = load_fixture(name)
    expected = {key[len("weight.") :]: value.shape for key, value in tensors.items() if key.startswith("weight.")}
    assert {key: value.shape for key, value in model.state_dict().items()} == expected
