"""Which modules offload, and settings that contradict each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.offload.offload_checks import OFFLOAD_CONTRADICTIONS
from megatron.core.transformer.offload.offloaded_modules import OFFLOAD_MODULES
from megatron.core.transformer.transformer_config import TransformerConfig

BASE: dict[str, Any] = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 2}
_FINE: dict[str, Any] = {"fine_grained_activation_offloading": True}
_LAYERS: dict[str, Any] = {"cpu_offloading": True, "cpu_offloading_num_layers": 1}
CONTRADICTORY: list[tuple[dict[str, Any], str]] = [
    ({"cpu_offloading": True, "cpu_offloading_num_layers": 3}, r"must be at least 1 and below num_layers \(3\)"),
    (
        {**_LAYERS, "num_layers": 4, "pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32},
        "without pipeline",
    ),
    ({**_LAYERS, "recompute_granularity": "selective"}, "cpu_offloading must go without recompute_granularity"),
    ({**_LAYERS, **_FINE, "offload_modules": ["core_attn"]}, "exclude each other, got both"),
    ({**_FINE, "offload_modules": ["qkv"]}, r"offload_modules must name some of attn_norm, .* got \['qkv'\]"),
    ({**_FINE, "offload_modules": ["attn_proj"]}, "must have core_attn beside attn_proj"),
    (
        {
            **_FINE,
            "offload_modules": ["core_attn"],
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        "must go without recompute_granularity='full'",
    ),
    (
        {**_FINE, "offload_modules": ["core_attn"], "activation_offload_fraction": 2.0},
        "activation_offload_fraction must be from 0 to 1, got 2",
    ),
    (
        {**_FINE, "offload_modules": ["core_attn"], "min_offloaded_tensor_size": -1},
        "must not be negative, got -1 and None",
    ),
]


@pytest.mark.parametrize("row", range(len(OFFLOAD_CONTRADICTIONS)))
def test_each_contradiction_is_refused(row: int) -> None:
    fields, message = CONTRADICTORY[row]
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{**BASE, **fields})


def test_weights_are_not_offloaded() -> None:
    with pytest.raises(NotImplementedError, match="cpu_offloading_weights must be False"):
        TransformerConfig(**{**BASE, "cpu_offloading_weights": True})


def _losses(**fields: Any) -> tuple[torch.Tensor, list[torch.Tensor], GPTModel]:
    config = TransformerConfig(**BASE, hidden_dropout=0.0, attention_dropout=0.0, **fields)
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8)
    tokens = torch.arange(16).view(2, 8)
    loss = model(tokens, torch.arange(8).expand(2, -1), None, labels=tokens.flip(1)).mean()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None], model


@pytest.mark.parametrize(
    "fields",
    [
        _LAYERS,
        {**_FINE, "offload_modules": tuple(OFFLOAD_MODULES), "min_offloaded_tensor_size": 0},
        {
            **_FINE,
            "offload_modules": ["core_attn"],
            "min_offloaded_tensor_size": 8,
            "activation_offload_fraction": 0.34,
        },
        {
            **_FINE,
            "offload_modules": ["mlp_norm", "core_attn", "attn_proj"],
            "min_offloaded_tensor_size": 0,
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn"],
            "fine_grained_offloading_max_inflight_offloads": 0,
        },
    ],
)
def test_a_model_trains_to_the_last_bit_as_without(fields: dict[str, Any]) -> None:
    wanted, gradients, plain = _losses()
    loss, own, model = _losses(**fields)
    assert plain.decoder.offload is None
    assert model.decoder.offload is not None and model.decoder.offload.pool.nbytes > 0
    assert torch.equal(loss, wanted)
    assert all(torch.equal(a, b) for a, b in zip(own, gradients, strict=True))


def test_switched_off_activations_stay() -> None:
    assert _losses(**_LAYERS, cpu_offloading_activations=False)[2].decoder.offload is None
