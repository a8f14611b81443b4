"""Clamped activations with an offset, as in gpt-oss, equal what is written out here; fused or not, in dense MLPs and experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import ExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig

SUBMODULES = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
VARIANTS: list[dict[str, Any]] = [
    {"activation_func": "quick_gelu", "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    {"activation_func": "quick_gelu"},
    {"activation_func": F.silu, "activation_func_clamp_value": 0.5},
    {"activation_func": F.silu, "glu_linear_offset": 1.0, "bias_activation_fusion": False},
    {"activation_func": "gelu", "activation_func_clamp_value": 0.5, "bias_activation_fusion": False},
]
FUNCTIONS: dict[Any, Any] = {"quick_gelu": lambda x: x / (1 + (-1.702 * x).exp()), "gelu": F.gelu, F.silu: F.silu}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("is_expert", [False, True])
@pytest.mark.parametrize("fields", VARIANTS, ids=lambda fields: " ".join(fields))
def test_gated_activations_are_those_written_out(fields: dict[str, Any], is_expert: bool, fused: bool) -> None:
    given = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "ffn_hidden_size": 24,
        "init_method_std": 0.5,
    }
    settings = {"bias_activation_fusion": fused, "gated_linear_unit": True, **given, **fields}
    mlp = (ExpertMLP if is_expert else MLP)(TransformerConfig(**settings), SUBMODULES, ffn_hidden_size=24)
    with torch.no_grad():
        mlp.linear_fc1.bias.normal_()
    x, probs = torch.randn(10, 16).requires_grad_(), torch.rand(10).requires_grad_()
    output = mlp(x, probs)[0] if is_expert else mlp(x)[0]

    gate, up = F.linear(x, mlp.linear_fc1.weight, mlp.linear_fc1.bias).chunk(2, dim=-1)
    limit = fields.get("activation_func_clamp_value", 1e9)
    gate, up = torch.minimum(gate, torch.tensor(limit)), up.clamp(-limit, limit)
    activated = FUNCTIONS[fields["activation_func"]](gate) * (up + fields.get("glu_linear_offset", 0.0))
    expected = F.linear(activated * probs.unsqueeze(1) if is_expert else activated, mlp.linear_fc2.weight)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    wanted = [x, mlp.linear_fc1.weight, mlp.linear_fc1.bias, mlp.linear_fc2.weight, *([probs] if is_expert else [])]
    for got, true in zip(*(torch.autograd.grad(y.square().mean(), wanted) for y in (output, expected)), strict=True):
        torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-5)
