"""A fusion's setting changes what runs, from the command line to the function; the numbers stay Megatron-LM's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron.core import jit
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.arguments import build_parser, settings_from_args
from tests.support.tiny_gpt import FIXTURE_NAMES, build_gpt, load_fixture, random_tokens

FUSIONS: dict[str, tuple[str, set[str]]] = {
    "bias_activation_fusion": ("--no-bias-swiglu-fusion", {"_swiglu", "_swiglu_backward"}),
    "bias_dropout_fusion": ("--no-bias-dropout-fusion", {"_drop_and_add", "_drop_backward"}),
    "apply_rope_fusion": ("--no-rope-fusion", {"_split_and_rotate", "_join_and_rotate_back"}),
    "persist_layer_norm": ("--no-persist-layer-norm", {"_norm", "_norm_backward"}),
    "masked_softmax_fusion": ("--no-masked-softmax-fusion", {"_softmax", "_softmax_backward"}),
    "cross_entropy_loss_fusion": ("--cross-entropy-loss-fusion", {"_losses", "_gradient_in_place"}),
}
"""Field: (the flag that leaves its default, the functions that run where it is on)."""

LLAMA: dict[str, Any] = {
    "num_query_groups": 2,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
COMMAND_LINE = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8"
    " --micro-batch-size 1 --train-iters 1 --lr 1e-3 --swiglu --normalization RMSNorm --disable-bias-linear"
    " --tokenizer-type NullTokenizer --vocab-size 32 --mock-data"
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """(name, whether it may be compiled) of each fused function that runs."""
    seen: list[tuple[str, bool]] = []

    def call(self: jit.Fusible, compiled: bool, *args: Any) -> Any:
        seen.append((self.eager.__name__, compiled))
        return self.eager(*args)

    monkeypatch.setattr(jit.Fusible, "__call__", call)
    return seen


def _train(**fields: Any) -> None:
    model = build_gpt({"position_embedding_type": "rope"}, **LLAMA, hidden_dropout=0.1, **fields)
    inputs, positions, labels = random_tokens()
    model(inputs, positions, None, labels=labels).mean().backward()


@pytest.mark.parametrize("field", FUSIONS)
def test_a_setting_is_what_makes_its_functions_run(field: str, calls: list[tuple[str, bool]]) -> None:
    functions = FUSIONS[field][1]
    others = {name: True for name in FUSIONS if name != field}
    _train(attention_backend="unfused", **others)
    assert not functions & {name for name, _ in calls}
    calls.clear()
    _train(attention_backend="unfused", **{field: True})
    assert {name for name, _ in calls} == functions


def test_disable_jit_fuser_leaves_every_function_uncompiled(calls: list[tuple[str, bool]]) -> None:
    everything: dict[str, Any] = dict.fromkeys(FUSIONS, True)
    for disabled in (False, True):
        calls.clear()
        _train(attention_backend="unfused", disable_jit_fuser=disabled, **everything)
        assert {name for name, _ in calls} == set().union(*(names for _, names in FUSIONS.values()))
        assert {compiled for _, compiled in calls} == {not disabled}


@pytest.mark.parametrize("field", FUSIONS)
def test_a_flag_sets_its_field(field: str) -> None:
    flag = FUSIONS[field][0]
    assert _config(COMMAND_LINE)[field] is flag.startswith("--no-")
    assert _config(f"{COMMAND_LINE} {flag}")[field] is not flag.startswith("--no-")


def test_the_other_flags_of_fusions_set_their_fields() -> None:
    assert _config(COMMAND_LINE)["disable_jit_fuser"] is False
    assert _config(f"{COMMAND_LINE} --disable-jit-fuser")["disable_jit_fuser"] is True
    fused = _config(f"{COMMAND_LINE} --cross-entropy-loss-fusion --cross-entropy-fusion-impl te")
    assert fused["cross_entropy_loss_fusion"] and fused["cross_entropy_fusion_impl"] == "native", "there is one loss"


def _config(line: str) -> dict[str, Any]:
    settings = settings_from_args(build_parser().parse_flags(line.split()), world_size=1)
    config = settings.model.transformer
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


@pytest.mark.parametrize("name", FIXTURE_NAMES)
@pytest.mark.parametrize("backend", ["auto", "unfused"])
def test_fused_losses_and_gradients_equal_megatron_lms(name: str, backend: str) -> None:
    """Its fixtures hold what Megatron-LM's own model computed; 1e-5 as for the functions apart."""
    plain, tensors, settings = load_fixture(name)
    fused: dict[str, Any] = dict.fromkeys(FUSIONS, True)
    fused["bias_activation_fusion"] = plain.config.bias_activation_fusion or plain.config.gated_linear_unit
    config = dataclasses.replace(plain.config, attention_backend=backend, **fused)
    model = GPTModel(config, get_gpt_layer_local_spec(**settings["layer_spec"]), **settings["gpt_model"])
    model.load_state_dict(plain.state_dict())
    inputs, labels = tensors["tokens"][:, :-1], tensors["tokens"][:, 1:]
    losses = model(inputs, torch.arange(16).expand(2, 16), None, labels=labels)
    losses.mean().backward()
    torch.testing.assert_close(losses, tensors["loss"], rtol=0, atol=1e-5)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, tensors[f"grad.{key}"], rtol=0, atol=1e-5, msg=key)


@pytest.mark.parametrize(
    "granularity",
    [
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ],
)
def test_fused_functions_are_recomputed_with_the_same_random_numbers(granularity: dict[str, Any]) -> None:
    gradients = []
    for fields in ({}, granularity):
        torch.manual_seed(3)
        model = build_gpt(
            {"position_embedding_type": "rope"},
            **LLAMA,
            hidden_dropout=0.3,
            attention_dropout=0.3,
            **dict.fromkeys(FUSIONS, True),
            **fields,
        )
        inputs, positions, labels = random_tokens()
        model(inputs, positions, None, labels=labels).mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "fields", [{"bias_dropout_fusion": False}, {"persist_layer_norm": False}, {"hidden_dropout": 0.1}, {}]
)
def test_the_norm_after_attention_does_the_sum_before_it(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only if both fusions are on and the sum has no bias or dropout."""
    sums: list[bool] = []

    def call(self: jit.Fusible, compiled: bool, *args: Any) -> Any:
        if self.eager.__name__ == "_norm":
            sums.append(args[1] is not None)
        return self.eager(*args)

    monkeypatch.setattr(jit.Fusible, "__call__", call)
    model = build_gpt(None, **{**LLAMA, "persist_layer_norm": True, "bias_dropout_fusion": True, **fields})
    hidden_states = torch.randn(4, 1, 16)
    model.decoder(hidden_states, None)
    layer = [False, not fields]
    assert sums == ([*layer, *layer, False] if fields.get("persist_layer_norm", True) else [])
