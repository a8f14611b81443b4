"""A tensor-parallel GPT equals the unsplit one: weights bitwise, losses and gradients in fp32."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.partition import assemble, partition
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.launch import run_ranks
from tests.support.tiny_gpt import FIXTURE_NAMES, build_gpt, load_fixture, random_tokens

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
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
"""fp32 sums in another order; seen: 3e-7."""


def build(name: str, group: dist.ProcessGroup | None, sequence_parallel: bool, **gpt_arguments: Any) -> GPTModel:
    arguments, fields = MODELS[name]
    if group is not None:
        fields = {**fields, "tensor_model_parallel_size": group.size(), "sequence_parallel": sequence_parallel}
    groups = ProcessGroupCollection(tp=group)
    return build_gpt({**arguments, **gpt_arguments, "pg_collection": groups}, **fields)


def whole(parameter: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Assemble the full tensor of the ranks' values of a parameter, by its attributes."""
    if group_size(group) == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return value.detach().clone()
    parts = [torch.empty_like(value) for _ in range(group_size(group))]
    dist.all_gather(parts, value.detach().contiguous(), group=group)
    return assemble(parts, parameter.partition_dim, parameter.partition_stride)  # type: ignore[attr-defined]


def whole_gradient(parameter: torch.nn.Parameter, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Assemble the whole gradient as the engine does: summed over tensor ranks where the parameter is marked."""
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


_FEW = ("llama", "gpt2")


def _models(names: tuple[str, ...], is_split: bool) -> dict[tuple[str, bool], tuple[np.ndarray, Values, Values]]:
    kinds = (False, True) if is_split else (False,)
    return {(name, sp): values_of(name, sp, is_split) for name in names for sp in kinds}


@cache
def _split(num_ranks: int) -> list[dict[tuple[str, bool], tuple[np.ndarray, Values, Values]]]:
    return run_ranks(num_ranks, _models, _FEW if num_ranks > 2 else tuple(MODELS), True)


@cache
def _unsplit() -> dict[tuple[str, bool], tuple[np.ndarray, Values, Values]]:
    return _models(tuple(MODELS), False)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
@pytest.mark.parametrize(("name", "num_ranks"), [*((name, 2) for name in MODELS), *((name, 4) for name in _FEW)])
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


def _logits(parallel_output: bool, runtime_gather_output: bool | None = None) -> torch.Tensor:
    model = build("llama", dist.group.WORLD, True, parallel_output=parallel_output)
    inputs, positions, _ = random_tokens(length=8)
    return model(inputs, positions, None, runtime_gather_output=runtime_gather_output).detach()


def _outputs() -> dict[str, np.ndarray]:
    """Return a split model's other outputs, and losses and gradients on less usual paths."""
    group = dist.group.WORLD
    inputs, positions, labels = random_tokens(length=8)
    found = {
        "gathered logits": _logits(parallel_output=False),
        "own logits": _logits(parallel_output=True),
        "logits gathered on request": _logits(parallel_output=True, runtime_gather_output=True),
    }
    for name, arguments, forward in (
        ("loss of gathered logits", {}, {"runtime_gather_output": True}),
        ("loss without gathered logits", {"parallel_output": False}, {}),
        ("whole embeddings", {"scatter_embedding_sequence_parallel": False}, {}),
    ):
        model = build("gpt2", group, True, **arguments)
        losses = model(inputs, positions, None, labels=labels, **forward)
        losses.mean().backward()
        found[name] = losses.detach()
        for key in ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight"):
            found[f"{name}, {key}"] = whole_gradient(model.get_parameter(key), group)
    return {key: value.numpy() for key, value in found.items()}


def _surface() -> tuple[Any, ...]:
    return _outputs(), _attributes(), _refusals(), _fixtures()


@cache
def _surfaces() -> list[tuple[Any, ...]]:
    return run_ranks(2, _surface)


def test_logits_are_gathered_where_asked_and_losses_are_the_same_either_way() -> None:
    inputs, positions, _ = random_tokens(length=8)
    arguments, fields = MODELS["llama"]
    logits = build_gpt(arguments, **fields)(inputs, positions, None).detach().numpy()
    losses, _, gradients = _unsplit()["gpt2", False]
    for rank, (found, *_) in enumerate(_surfaces()):
        own = logits.shape[-1] // 2
        np.testing.assert_allclose(found["gathered logits"], logits, **TOLERANCE)
        np.testing.assert_allclose(found["logits gathered on request"], logits, **TOLERANCE)
        np.testing.assert_allclose(found["own logits"], logits[..., rank * own : (rank + 1) * own], **TOLERANCE)
        for name in ("loss of gathered logits", "loss without gathered logits", "whole embeddings"):
            np.testing.assert_allclose(found[name], losses, err_msg=name, **TOLERANCE)
            for key in ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight"):
                np.testing.assert_allclose(found[f"{name}, {key}"], gradients[key], err_msg=name, **TOLERANCE)


def _attributes() -> dict[str, dict[str, Any]]:
    """Return the attributes of parameters by name; the same after construction on the meta device."""
    arguments, fields = MODELS["qwen"]
    fields = {**fields, "add_bias_linear": True, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    arguments = {**arguments, "position_embedding_type": "learned_absolute"}
    arguments["pg_collection"] = ProcessGroupCollection(tp=dist.group.WORLD)
    direct = build_gpt(arguments, **fields)
    with torch.device("meta"):
        late = build_gpt(arguments, **fields)
    for module in late.modules():
        module.to_empty(device="cpu", recurse=False)
        getattr(module, "reset_parameters", lambda: None)()
    for (name, one), other in zip(direct.named_parameters(), late.parameters(), strict=True):
        assert torch.equal(one, other) and vars(one) == vars(other), name
    return {name: {"shape": list(p.shape), **vars(p)} for name, p in late.named_parameters()}


def test_parameters_say_how_they_are_split() -> None:
    found = _surfaces()[0][1]
    split = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
    replicated = {"sequence_parallel": True}
    layer = "decoder.layers.1"
    expected = {
        "embedding.word_embeddings.weight": {"shape": [20, 16], **split, "is_embedding_or_output_parameter": True},
        "embedding.position_embeddings.weight": {"shape": [16, 16], **replicated},
        "output_layer.weight": {"shape": [20, 16], **split, "is_embedding_or_output_parameter": True},
        "decoder.final_layernorm.weight": {"shape": [16], **replicated},
        f"{layer}.input_layernorm.weight": {"shape": [16], **replicated},
        f"{layer}.pre_mlp_layernorm.weight": {"shape": [16], **replicated},
        f"{layer}.self_attention.q_layernorm.weight": {"shape": [2], **replicated},
        f"{layer}.self_attention.k_layernorm.weight": {"shape": [2], **replicated},
        f"{layer}.self_attention.linear_qkv.weight": {"shape": [16, 16], **split},
        f"{layer}.self_attention.linear_qkv.bias": {"shape": [16], **split},
        f"{layer}.self_attention.linear_proj.weight": {"shape": [16, 8], **split, "partition_dim": 1},
        f"{layer}.self_attention.linear_proj.bias": {"shape": [16], **replicated},
        f"{layer}.mlp.linear_fc1.weight": {"shape": [24, 16], **split, "partition_stride": 2},
        f"{layer}.mlp.linear_fc1.bias": {"shape": [24], **split, "partition_stride": 2},
        f"{layer}.mlp.linear_fc2.weight": {"shape": [16, 12], **split, "partition_dim": 1},
        f"{layer}.mlp.linear_fc2.bias": {"shape": [16], **replicated},
    }
    assert {name: marks for name, marks in found.items() if "layers.0" not in name} == expected


def _refusals() -> list[str]:
    """Return what is refused before anything is allocated, or in the first forward."""
    groups = ProcessGroupCollection(tp=dist.group.WORLD)
    inputs, positions, labels = random_tokens(length=7)
    messages = []

    def refused(act: Any) -> None:
        try:
            act()
        except ValueError as error:
            messages.append(str(error))

    refused(lambda: build_gpt({"pg_collection": groups, "vocab_size": 41}, tensor_model_parallel_size=2))
    refused(lambda: build_gpt({"pg_collection": groups}))
    refused(lambda: build_gpt({}, tensor_model_parallel_size=2))
    model = build("gpt2", dist.group.WORLD, True)
    refused(lambda: model(inputs, positions, None, labels=labels))
    return messages


def test_what_cannot_be_split_is_refused_with_the_arithmetic() -> None:
    vocabulary, groups, no_groups, sequence = _surfaces()[0][2]
    assert "multiple of 2 (2 ranks), got 41" in vocabulary
    assert "tensor_model_parallel_size" in groups and "got 2" in groups
    assert "tensor_model_parallel_size" in no_groups and "got 1" in no_groups
    assert "sequence length must be a multiple" in sequence and "got 7 and 2 ranks" in sequence


def _fixture(name: str, sequence_parallel: bool) -> dict[str, np.ndarray]:
    """Losses and gradients of a split model with the weights of a Megatron-LM fixture."""
    _, tensors, settings = load_fixture(name)
    group = dist.group.WORLD
    assert group is not None
    config = TransformerConfig(
        **settings["config"],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=group.size(),
        sequence_parallel=sequence_parallel,
    )
    groups = ProcessGroupCollection(tp=group)
    spec = get_gpt_layer_local_spec(**settings["layer_spec"])
    model = GPTModel(config, spec, **settings["gpt_model"], pg_collection=groups)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            full = tensors[f"weight.{key}"]
            if getattr(parameter, "tensor_model_parallel", False):
                full = partition(
                    full,
                    parameter.partition_dim,  # type: ignore[attr-defined]
                    parameter.partition_stride,  # type: ignore[attr-defined]
                    group.rank(),
                    group.size(),
                )
            parameter.copy_(full)
    losses = model(tensors["tokens"][:, :-1], torch.arange(16).expand(2, 16), None, labels=tensors["tokens"][:, 1:])
    losses.mean().backward()
    gradients = {f"grad.{key}": whole_gradient(parameter, group) for key, parameter in model.named_parameters()}
    return {key: value.detach().numpy() for key, value in {"loss": losses, **gradients}.items()}


def _fixtures() -> dict[tuple[str, bool], dict[str, np.ndarray]]:
    return {(name, sp): _fixture(name, sp) for name in FIXTURE_NAMES for sp in (False, True)}


def test_split_models_agree_with_megatron_lm() -> None:
    """Its weights, cut by our attributes, give its losses and gradients."""
    for *_, by_kind in _surfaces():
        for (name, sequence_parallel), found in by_kind.items():
            _, tensors, _ = load_fixture(name)
            assert {key for key in tensors if key.startswith("grad.")} | {"loss"} == found.keys()
            for key, value in found.items():
                where = f"{name} {key} sequence_parallel={sequence_parallel}"
                np.testing.assert_allclose(value, tensors[key].numpy(), rtol=0, atol=1e-5, err_msg=where)
