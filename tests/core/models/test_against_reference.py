"""Options that no Megatron-LM fixture covers, against an independent reference GPT."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.reference_gpt import reference_logits
from tests.support.tiny_gpt import build_gpt, random_tokens

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no positions, tied": ({}, {"position_embedding_type": "none", "share_embeddings_and_output_weights": True}),
    "learned positions, untied": ({}, {}),
    "rope on half of a wide head": ({"kv_channels": 8}, {"position_embedding_type": "rope", "rotary_percent": 0.5}),
    "rope in pairs": ({"rotary_interleaved": True}, {"position_embedding_type": "rope"}),
    "rope in pairs on half": (
        {"rotary_interleaved": True, "kv_channels": 8},
        {"position_embedding_type": "rope", "rotary_percent": 0.5, "rotary_base": 500},
    ),
    "rope, positions divided": ({}, {"position_embedding_type": "rope", "seq_len_interpolation_factor": 2.0}),
    "one group": ({"num_query_groups": 1}, {"position_embedding_type": "rope"}),
    "two groups, no rope": ({"num_query_groups": 2}, {"position_embedding_type": "none"}),
    "norms of queries and keys": ({"qk_layernorm": True}, {}),
    "zero-centred norms": ({"layernorm_zero_centered_gamma": True, "normalization": "RMSNorm"}, {}),
    "zero-centred LayerNorm": ({"layernorm_zero_centered_gamma": True}, {}),
    "gated exact gelu": ({"gated_linear_unit": True}, {}),
    "gated fused gelu": ({"gated_linear_unit": True, "bias_activation_fusion": True}, {}),
    "fused gelu": ({"bias_activation_fusion": True}, {}),
    "gated fused silu": ({"gated_linear_unit": True, "activation_func": "silu", "bias_activation_fusion": True}, {}),
    "silu without gate": ({"activation_func": F.silu}, {}),
    "squared relu": ({"activation_func": "squared_relu"}, {}),
    "relu, no bias but qkv": ({"activation_func": "relu", "add_bias_linear": False, "add_qkv_bias": True}, {}),
    "no bias": ({"add_bias_linear": False}, {}),
    "layer scaling changes nothing in fp32": ({"apply_query_key_layer_scaling": True, "num_query_groups": 2}, {}),
    "another softmax scale": ({"softmax_scale": 0.7}, {}),
    "a large epsilon": ({"layernorm_epsilon": 0.1}, {}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_logits_loss_and_gradients_equal_the_reference(option: str) -> None:
    config_fields, gpt_arguments = OPTIONS[option]
    model = build_gpt(gpt_arguments, **config_fields)
    _perturb(model)
    inputs, positions, labels = random_tokens()
    state = {name: value.detach().clone().requires_grad_() for name, value in model.state_dict().items()}

    logits = model(inputs, positions, None)
    losses = model(inputs, positions, None, labels=labels)
    losses.sum().backward()

    expected = reference_logits(model, state, inputs, _angles(model, inputs.shape[1]), _causal(inputs.shape[1]))
    expected_losses = -expected.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    expected_losses.sum().backward()
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, state[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_given_mask_stands_in_the_causal_masks_place() -> None:
    """As in Megatron-Core: a mask that hides one key and no future shows the future."""
    model = build_gpt()
    _perturb(model)
    inputs, positions, _ = random_tokens()
    hidden = torch.zeros(9, 9, dtype=torch.bool)
    hidden[:, 3] = True
    expected = reference_logits(model, dict(model.state_dict()), inputs, None, hidden)
    torch.testing.assert_close(model(inputs, positions, hidden[None, None]), expected, rtol=1e-5, atol=1e-5)


def test_llama3_scaling_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    """Expected values follow Llama 3.1's rule, wave by wave."""
    arguments = {
        "position_embedding_type": "rope",
        "rope_scaling": True,
        "rotary_base": 500000,
        "rope_scaling_factor": 8.0,
    }
    rope = build_gpt(arguments, kv_channels=128).rotary_pos_emb
    assert rope is not None
    plain = [500000 ** (-2 * i / 128) for i in range(64)]
    expected = []
    for frequency in plain:
        wave = 2 * math.pi / frequency
        if wave < 8192 / 4:
            expected.append(frequency)
        elif wave > 8192:
            expected.append(frequency / 8)
        else:
            smooth = (8192 / wave - 1) / 3
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    angles = rope(2, torch.device("cpu"))[1, 0, 0]
    torch.testing.assert_close(angles, torch.tensor(expected + expected), rtol=1e-5, atol=0)
    assert 0 < sum(a not in (b, b / 8) for a, b in zip(expected, plain, strict=True)) < 64


def _perturb(model: torch.nn.Module) -> None:
    """Move norms away from one and biases away from zero, and make weights large enough to matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)


def _causal(length: int) -> torch.Tensor:
    return torch.arange(length)[None, :] > torch.arange(length)[:, None]


def _angles(model: Any, length: int) -> torch.Tensor | None:
    """Compute the angles [s, r/2] from the model's arguments."""
    rope = model.rotary_pos_emb
    if rope is None:
        return None
    width = rope.rotated_width
    factor = rope.seq_len_interpolation_factor or 1.0
    return torch.tensor(
        [[s / factor * rope.rotary_base ** (-2 * i / width) for i in range(width // 2)] for s in range(length)]
    )
