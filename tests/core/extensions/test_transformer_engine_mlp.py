"""The MLP whose activation is written in FP8 computes as the modules do, and keeps no more than they.

The package is a stand-in here (``tests/support/fake_transformer_engine.py``); test_transformer_engine_mlp_gpu.py has the real one.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.core.fp8_utils import get_fp8_context, recomputation_in_fp8
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support import fake_float8_tensors
from tests.support import fake_transformer_engine as fake_package
from tests.support.fake_transformer_engine import fake_transformer_engine  # noqa: F401

pytestmark = pytest.mark.usefixtures("fake_transformer_engine")

BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "params_dtype": torch.bfloat16,
    "bf16": True,
    "fp8": "hybrid",
    "fp8_recipe": "tensorwise",
    "init_method_std": 0.2,
}
RECIPES: dict[str, dict[str, Any]] = {
    "delayed": {"fp8_recipe": "delayed", "fp8_amax_history_len": 4, "fp8_amax_compute_algo": "max"},
    "tensorwise": {"fp8_recipe": "tensorwise"},
    "blockwise": {"fp8_recipe": "blockwise"},
}
BF16: dict[str, Any] = {"fp8": None, "fp8_recipe": "delayed", "fp8_amax_history_len": 1}
BF16 |= {"fp8_amax_compute_algo": "most_recent"}
SWIGLU: dict[str, Any] = {"gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "swiglu": SWIGLU,
    "swiglu with bias": SWIGLU | {"add_bias_linear": True, "bias_activation_fusion": True},
    "geglu": {"gated_linear_unit": True, "add_bias_linear": False, "bias_activation_fusion": True},
    "gelu with bias": {"bias_activation_fusion": True},
    "squared relu": {"activation_func": "squared_relu", "add_bias_linear": False},
    "gated squared relu": {"activation_func": "squared_relu", "add_bias_linear": False, "gated_linear_unit": True},
    "relu": {"activation_func": "relu", "add_bias_linear": False},
    "gated relu": {"activation_func": "relu", "add_bias_linear": False, "gated_linear_unit": True},
    "silu": {"activation_func": "silu", "add_bias_linear": False},
}
KEPT: dict[str, Any] = {"activation_func_fp8_input_store": True}
RECOMPUTED: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["mlp_act"]}


def _config(*, fuses: bool, **fields: Any) -> TransformerConfig:
    return TransformerConfig(**(BASE | fields | {"use_transformer_engine_op_fuser": fuses}))


def _mlp(config: TransformerConfig) -> Any:
    (spec, *_) = get_gpt_decoder_block_spec(config, use_transformer_engine=True).layer_specs or []
    mlp = build_module(spec.submodules.mlp, config=config)
    mlp.linear_fc1.name, mlp.linear_fc2.name = "1", "2"
    return mlp


def _input(seed: int) -> torch.Tensor:
    x = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(seed))
    return x.bfloat16().requires_grad_()


def _seen_by_fc2(mlp: Any) -> list[Any]:
    seen: list[Any] = []
    mlp.linear_fc2.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    return seen


def _steps(mlp: Any, num_steps: int = 3) -> dict[str, torch.Tensor]:
    """The last step's output and gradients; scales of delayed scaling have moved by then."""
    found: dict[str, torch.Tensor] = {}
    for step in range(num_steps):
        mlp.zero_grad()
        x = _input(step)
        with get_fp8_context(mlp.config):
            output, bias = mlp(x)
        (output.float() ** 2).sum().backward()
        assert (bias is not None) == mlp.config.add_bias_linear and x.grad is not None
        found = {"output": output.detach(), "input": x.grad}
        found |= {name: p.grad for name, p in mlp.named_parameters() if p.grad is not None}
    return found


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-20))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_it_computes_as_the_modules(name: str, recipe: str) -> None:
    """Both are as far from bf16, since one of them rounds the activation to bf16 first; the same weights under the same names."""
    fields = ACTIVATIONS[name] | RECIPES[recipe]
    modules, fused = _mlp(_config(fuses=False, **fields)), _mlp(_config(fuses=True, **fields))
    assert type(modules) is MLP and type(fused).__name__ == "TEFusedMLP"
    assert {key: list(p.shape) for key, p in fused.named_parameters()} == {
        key: list(p.shape) for key, p in modules.named_parameters()
    }
    expected, exact = _steps(modules), _steps(_mlp(_config(fuses=False, **(fields | BF16))))
    seen = _seen_by_fc2(fused)
    fake_float8_tensors.COUNTS["transposes"] = 0
    found = _steps(fused)
    assert found.keys() == expected.keys() == exact.keys()
    for key, tensor in exact.items():
        theirs, ours = _difference(expected[key], tensor), _difference(found[key], tensor)
        assert 0.01 < ours < 1.5 * theirs + 0.02, (key, ours, theirs)
    assert all(isinstance(x, fake_float8_tensors.QuantizedTensor) for x in seen) and len(seen) == 3
    assert fake_float8_tensors.COUNTS["transposes"] == 0, "transposed bytes were made twice"


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_the_transposed_bytes_are_kept(recipe: str) -> None:
    """And with recomputation nothing of the activation; what is recomputed has the bits and the scales of forward."""
    results, histories = [], []
    for fields in ({}, RECOMPUTED):
        mlp = _mlp(_config(fuses=True, **SWIGLU, **RECIPES[recipe], **fields))
        seen = _seen_by_fc2(mlp)
        results.append(_steps(mlp))
        state = mlp.linear_fc2.get_optional_state()
        histories.append(state and {key: value.clone() for key, value in state.items() if key != "num_gemms"})
        with get_fp8_context(mlp.config):
            output, _ = mlp(_input(7))
        names = ("_rowwise_data", "_columnwise_data") if recipe == "blockwise" else ("_data", "_transpose")
        rows, columns = (getattr(seen[-1], name) for name in names)
        assert rows is None and (columns is None) == bool(fields)
        if state:
            assert mlp.linear_fc2.fp8_meta["scaling_fwd"].amax_history[0].eq(0).all()
        output.float().sum().backward()
        if state:
            assert mlp.linear_fc2.fp8_meta["scaling_fwd"].amax_history[0].eq(0).all(), "recorded again in backward"
    for key, tensor in results[0].items():
        assert torch.equal(results[1][key], tensor), key
    for key in histories[0] or {}:
        assert torch.equal(histories[0][key], histories[1][key]), key


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["swiglu", "swiglu with bias", "relu"])
def test_the_input_of_the_activation_may_be_kept_in_fp8(name: str, recipe: str) -> None:
    """Then nothing holds it in bf16 after forward, and gradients are a little further from bf16's."""
    fields = ACTIVATIONS[name] | RECIPES[recipe]
    exact = _steps(_mlp(_config(fuses=False, **(fields | BF16))))
    plain = _steps(_mlp(_config(fuses=True, **fields)))
    mlp = _mlp(_config(fuses=True, **fields, **KEPT))
    found = _steps(mlp)
    outputs: list[Any] = []
    mlp.linear_fc1.register_forward_hook(lambda _, __, output: outputs.append(weakref.ref(output[0])))
    with get_fp8_context(mlp.config):
        output, _ = mlp(_input(7))
    assert output.requires_grad and outputs[0]() is None
    for key, tensor in exact.items():
        theirs, ours = _difference(plain[key], tensor), _difference(found[key], tensor)
        assert ours < 1.5 * theirs + 0.03, (key, ours, theirs)
    assert torch.equal(found["output"], plain["output"])
    assert not torch.equal(found["input"], plain["input"]) or name == "relu"


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_may_be_part_of_what_is_recomputed_in_full(recipe: str) -> None:
    """Saved-tensor hooks see the tensors before and after their bytes change."""
    config = _config(fuses=True, **SWIGLU, **RECIPES[recipe])
    results = []
    for recomputed in (False, True):
        mlp = _mlp(config)
        for step in range(3):
            mlp.zero_grad()
            x = _input(step)
            settings: Any = {"use_reentrant": False, "context_fn": partial(recomputation_in_fp8, [mlp])}
            with get_fp8_context(config):
                output, _ = checkpoint(mlp, x, **settings) if recomputed else mlp(x)
            (output.float() ** 2).sum().backward()
        results.append([x.grad, *(p.grad for p in mlp.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("direct", [True, False])
def test_the_gradient_is_written_in_fp8_where_nothing_needs_it_in_bf16(direct: bool) -> None:
    """A bias of the first layer is the sum of it."""
    mlp = _mlp(_config(fuses=True, **ACTIVATIONS["swiglu" if direct else "swiglu with bias"]))
    kinds: list[Any] = []

    def watch(_: Any, __: Any, output: Any) -> None:
        output[0].register_hook(lambda grad: kinds.append(type(grad)))

    mlp.linear_fc1.register_forward_hook(watch)
    _steps(mlp, 1)
    (kind,) = kinds
    assert issubclass(kind, fake_float8_tensors.Float8Tensor) == direct


def test_it_is_the_plain_mlp_outside_of_fp8() -> None:
    """In layers that stay in bf16, say; recomputation releases what is activated there, too."""
    fields = SWIGLU | BF16
    expected = _steps(_mlp(_config(fuses=False, **fields)))
    for more in ({}, RECOMPUTED):
        mlp = _mlp(_config(fuses=True, **fields, **more))
        seen = _seen_by_fc2(mlp)
        for key, tensor in _steps(mlp).items():
            assert torch.equal(tensor, expected[key]), key
        mlp(_input(7))
        assert (seen[-1].untyped_storage().nbytes() == 0) == bool(more)
        with torch.no_grad():
            mlp(_input(7))
        assert seen[-1].untyped_storage().nbytes() > 0


def test_evaluation_and_frozen_layers_keep_nothing() -> None:
    mlp = _mlp(_config(fuses=True, **SWIGLU, **RECOMPUTED))
    seen = _seen_by_fc2(mlp)
    with torch.no_grad(), get_fp8_context(mlp.config):
        mlp(_input(0))
    assert seen[-1]._data is not None and seen[-1]._transpose is None
    mlp.requires_grad_(False)
    x = _input(1)
    with get_fp8_context(mlp.config):
        mlp(x)[0].float().sum().backward()
    assert x.grad is not None and seen[-1]._transpose is None


def check_interpreted() -> None:
    """Our kernels in the MLP, interpreted, which cut off instead of rounding."""
    with fake_package.installed(), pytest.MonkeyPatch.context() as patch:
        from megatron.core.extensions import transformer_engine_activation

        patch.setattr(transformer_engine_activation, "is_compiled", lambda *_: True)
        for name in ("swiglu", "swiglu with bias", "geglu"):
            exact = _steps(_mlp(_config(fuses=False, **ACTIVATIONS[name], **BF16)), 1)
            results = []
            for fields in ({}, RECOMPUTED, KEPT):
                mlp = _mlp(_config(fuses=True, **ACTIVATIONS[name], **RECIPES["delayed"], **fields))
                seen = _seen_by_fc2(mlp)
                fake_float8_tensors.COUNTS["transposes"] = 0
                # Scales are 1 in the first step, which E4M3 can hold here.
                results.append(_steps(mlp, 1))
                assert seen[0]._data is None and seen[0]._transpose.shape == (64, 8, 2)
                assert fake_float8_tensors.COUNTS["transposes"] == 0
                for linear, direction in ((mlp.linear_fc2, "scaling_fwd"), (mlp.linear_fc1, "scaling_bwd")):
                    noted = linear.fp8_meta[direction].amax_history[:, 0].amax()
                    assert noted > 0.5, (direction, "the largest value was not noted")
            for key, tensor in exact.items():
                assert _difference(results[0][key], tensor) < 0.3, (name, key, _difference(results[0][key], tensor))
                assert torch.equal(results[0][key], results[1][key]), (name, key)
                assert _difference(results[2][key], tensor) < 0.35, (name, key, _difference(results[2][key], tensor))


def test_a_spec_that_the_configuration_does_not_ask_for_is_refused() -> None:
    config = _config(fuses=False)
    spec = get_gpt_layer_with_transformer_engine_spec(use_te_op_fuser=True)
    with pytest.raises(ValueError, match="use_transformer_engine_op_fuser must be on"):
        build_module(spec.submodules.mlp, config=config)
    with pytest.raises(NotImplementedError, match="use_te_op_fuser"):
        get_gpt_layer_with_transformer_engine_spec(num_experts=2, use_te_op_fuser=True)
