"""A GPT that is split over tensor-parallel ranks is the whole one: weights to the bit, losses and gradients in fp32."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.partition import assemble
from tests.core.models.tiny_gpt import build_gpt, random_tokens
from tests.support.launch import run_ranks

Values = dict[str, np.ndarray]

LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 24,
}
GPT2: dict[str, Any] = {"hidden_size": 16}
# Gradients of normal size: with the usual 0.02 they are so small that the tolerance would not see one missing.
LARGE = {"init_method_std": 0.3}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"position_embedding_type": "rope"}, {**LLAMA, **LARGE}),
    "gpt2": ({"share_embeddings_and_output_weights": True}, {**GPT2, **LARGE}),
    "qwen": ({"position_embedding_type": "rope"}, {**LLAMA, **LARGE, "qk_layernorm": True, "add_qkv_bias": True}),
    "fused": (
        {"position_embedding_type": "rope"},
        {
            **LLAMA,
            **LARGE,
            "bias_activation_fusion": True,
            "bias_dropout_fusion": True,
            "apply_rope_fusion": True,
            "persist_layer_norm": True,
            "cross_entropy_loss_fusion": True,
        },
    ),
    "recomputed": (
        {"position_embedding_type": "rope"},
        {
            **LLAMA,
            **LARGE,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    "attention recomputed": ({}, {**GPT2, **LARGE, "recompute_granularity": "selective"}),
}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}
"""fp32 sums in another order; seen: 3e-7."""


def build(name: str, group: dist.ProcessGroup | None, sequence_parallel: bool, **gpt_arguments: Any) -> GPTModel:
    arguments, fields = MODELS[name]
    if group is not None:
        fields = {**fields, "tensor_model_parallel_size": group.size(), "sequence_parallel": sequence_parallel}
    groups = ProcessGroupCollection(tp=group)
    return build_gpt({**arguments, **gpt_arguments, "pg_collection": groups}, **fields)


def whole(parameter: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The full tensor of the ranks' values of a parameter, by its attributes."""
    if group_size(group) == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return value.detach().clone()
    parts = [torch.empty_like(value) for _ in range(group_size(group))]
    dist.all_gather(parts, value.detach().contiguous(), group=group)
    return assemble(parts, parameter.partition_dim, parameter.partition_stride)  # type: ignore[attr-defined]


def whole_gradient(parameter: torch.nn.Parameter, group: dist.ProcessGroup | None) -> torch.Tensor:
    """As the engine makes it: summed over tensor ranks where the parameter says that each has a summand."""
    assert parameter.grad is not None
    gradient = parameter.grad.clone()
    if getattr(parameter, "sequence_parallel", False):
        dist.all_reduce(gradient, group=group)
    return whole(parameter, gradient, group)


def values_of(name: str, sequence_parallel: bool, is_split: bool = True) -> tuple[np.ndarray, Values, Values]:
    """Losses [b, s], weights and gradients, all of them whole. Ranks: all, each with the whole batch."""
    group = dist.group.WORLD if is_split else None
    model = build(name, group, sequence_parallel)
    weights = {key: whole(parameter, parameter, group).numpy() for key, parameter in model.named_parameters()}
    inputs, positions, labels = random_tokens(length=8)
    losses = model(inputs, positions, None, labels=labels)
    losses.mean().backward()
    gradients = {key: whole_gradient(parameter, group).numpy() for key, parameter in model.named_parameters()}
    return losses.detach().numpy(), weights, gradients


def _all_models(is_split: bool) -> dict[tuple[str, bool], tuple[np.ndarray, Values, Values]]:
    kinds = (False, True) if is_split else (False,)
    return {(name, sp): values_of(name, sp, is_split) for name in MODELS for sp in kinds}


@cache
def _split(num_ranks: int) -> list[dict[tuple[str, bool], tuple[np.ndarray, Values, Values]]]:
    return run_ranks(num_ranks, _all_models, True)


@cache
def _unsplit() -> dict[tuple[str, bool], tuple[np.ndarray, Values, Values]]:
    return _all_models(False)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_split_model_is_the_whole_one(name: str, num_ranks: int, sequence_parallel: bool) -> None:
    losses, weights, gradients = _unsplit()[name, False]
    for by_kind in _split(num_ranks):
        split_losses, split_weights, split_gradients = by_kind[name, sequence_parallel]
        assert split_weights.keys() == weights.keys()
        for key, weight in weights.items():
            assert np.array_equal(split_weights[key], weight), key
        np.testing.assert_allclose(split_losses, losses, **TOLERANCE)
        for key, gradient in gradients.items():
            np.testing.assert_allclose(split_gradients[key], gradient, err_msg=key, **TOLERANCE)
