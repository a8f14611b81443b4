"""Layers of transformer-engine start as the local ones, compute the same, and write gradients where they are reduced.

The package is a stand-in here (``tests/support/fake_transformer_engine.py``); test_transformer_engine_gpu.py has the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from tests.support.fake_transformer_engine import fake_transformer_engine  # noqa: F401
from tests.support.tiny_gpt import random_tokens
from tests.support.tiny_moe import FIELDS as MOE_FIELDS

pytestmark = pytest.mark.usefixtures("fake_transformer_engine")

DENSE: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False}
LATENT = LLAMA | {
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 5,
    "qk_layernorm": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA | {"num_query_groups": 2, "layernorm_zero_centered_gamma": True, "qk_layernorm": True},
    "windows and sinks": LLAMA
    | {"num_query_groups": 2, "window_size": (2, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"},
    "gates and norms": LLAMA | {"softmax_type": "off-by-one", "attention_output_gate": True, "qk_l2_norm": True},
    "bias fused": {"bias_activation_fusion": True, "bias_dropout_fusion": True},
    "fp32 residual": {"fp32_residual_connection": True, "params_dtype": torch.bfloat16, "bf16": True} | LLAMA,
    "experts": MOE_FIELDS | {"moe_grouped_gemm": True, "moe_layer_freq": [0, 1]},
    "experts with bias": MOE_FIELDS
    | {"moe_grouped_gemm": True, "add_bias_linear": True, "moe_shared_expert_intermediate_size": None},
    "tokens further on": LLAMA | {"mtp_num_layers": 2},
    "latent attention": LATENT,
    "latent attention without norms": LATENT | {"qk_layernorm": False, "q_lora_rank": None, "apply_rope_fusion": True},
    "latent attention, again": LATENT | {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
    "gated delta net": LLAMA
    | {
        "experimental_attention_variant": "gdn",
        "linear_attention_freq": 2,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layernorm_zero_centered_gamma": True,
    },
    "experts one by one": MOE_FIELDS | {"moe_shared_expert_gate": True},
}


def _gpt(name: str, *, te: bool, device: str = "cpu", **fields: Any) -> GPTModel:
    settings = DENSE | NO_DROPOUT | CONFIGS[name] | fields
    config = (MLATransformerConfig if "multi_latent_attention" in settings else TransformerConfig)(**settings)
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=te)
    mtp = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=te)
    with torch.device(device):
        return GPTModel(config, layers, 40, 16, pg_collection=None, mtp_block_spec=mtp)


def _stored(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters by their names in checkpoints."""
    from megatron.core.distributed.fsdp.checkpoint.state import model_tensors

    return {entry.name: entry.tensor for entry in model_tensors(model)}


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_start_and_compute_as_the_local_ones(name: str) -> None:
    """Bitwise the same weights under the same names in checkpoints, the same losses and gradients up to rounding."""
    local, ours = _gpt(name, te=False), _gpt(name, te=True)
    expected, got = _stored(local), _stored(ours)
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(got[key], tensor) and got[key].dtype == tensor.dtype, key
        marks = {mark: value for mark, value in vars(tensor).items() if not callable(value)}
        assert marks == {mark: value for mark, value in vars(got[key]).items() if not callable(value)}, key
    inputs, positions, labels = random_tokens()
    losses = [model(inputs, positions, None, labels=labels) for model in (local, ours)]
    # fp32: sums in another order. bf16: the norm's input is rounded to bf16 first.
    exact = local.config.params_dtype is torch.float32
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6} if exact else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(losses[1], losses[0], **close)
    for loss in losses:
        loss.mean().backward()
    for key, tensor in expected.items():
        if exact:
            torch.testing.assert_close(got[key].grad, tensor.grad, rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_heads_of_latent_vectors_are_computed_again_with_the_scales_of_forward(recipe: str) -> None:
    """Bit for bit, though the scales of delayed scaling have moved; and histories are those without recomputation."""
    fields: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": recipe, "params_dtype": torch.bfloat16, "bf16": True}
    # Of heads of one width PyTorch's kernel keeps what it is given, not copies.
    fields |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 16, "qk_pos_emb_head_dim": 16, "v_head_dim": 32}
    again: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
    found: list[dict[str, Any]] = []
    for more in ({}, again):
        model = _gpt("latent attention", te=True, **fields, **more)
        inputs, positions, labels = random_tokens(length=8)
        for step in range(3):
            model.zero_grad()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5 if step else 1.0)
            model(inputs, positions, None, labels=labels).mean().backward()
        found.append({key: p.grad for key, p in model.named_parameters()})
        for key, module in model.named_modules():
            state = getattr(module, "fp8_meta", {}).get("scaling_fwd")
            if hasattr(state, "amax_history"):
                found[-1] |= {f"{key} scale": state.scale.clone(), f"{key} history": state.amax_history.clone()}
    expected, ours = found
    assert ours.keys() == expected.keys() and any(key.endswith("scale") for key in ours) == (recipe == "delayed")
    for key, tensor in expected.items():
        assert torch.equal(ours[key], tensor), key


@pytest.mark.parametrize("first", [0, 1], ids=["evaluated first", "trained first"])
def test_an_evaluation_changes_no_later_step_in_fp8(first: int) -> None:
    """With delayed scaling its largest values are not the next training step's."""
    fields: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": "delayed", "params_dtype": torch.bfloat16, "bf16": True}
    found: list[list[torch.Tensor]] = []
    for evaluates in (False, True):
        model = _gpt("tokens further on", te=True, **fields)
        inputs, positions, labels = random_tokens(length=8)
        found.append([])
        for step in range(3):
            if evaluates and step >= first:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(8.0)
                    model.eval()(inputs, positions, None, labels=labels)
                    for parameter in model.parameters():
                        parameter.mul_(0.125)
                model.train()
            model.zero_grad()
            model(inputs, positions, None, labels=labels).mean().backward()
            found[-1] += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    expected, ours = found
    assert len(ours) == len(expected) > 0
    assert all(map(torch.equal, ours, expected))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_multi_token_prediction_in_fp8_is_computed_again_with_the_scales_of_forward(recipe: str) -> None:
    fields: dict[str, Any] = {"fp8": "hybrid", "fp8_recipe": recipe, "params_dtype": torch.bfloat16, "bf16": True}
    again: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    found: list[dict[str, torch.Tensor | None]] = []
    for more in ({}, again):
        model = _gpt("tokens further on", te=True, **fields, **more)
        inputs, positions, labels = random_tokens(length=8)
        for _ in range(2):
            model.zero_grad()
            model(inputs, positions, None, labels=labels).mean().backward()
        found.append({key: p.grad for key, p in model.named_parameters()})
    expected, ours = found
    assert expected["mtp.layers.1.eh_proj.weight"] is not None
    for key, gradient in expected.items():
        torch.testing.assert_close(ours[key], gradient, rtol=0.0, atol=0.0, msg=key)


def test_meta_initialisation_gives_the_same_bits() -> None:
    for name in ("llama", "experts with bias"):
        direct, late = _stored(_gpt(name, te=True)), _gpt(name, te=True, device="meta")
        assert all(parameter.is_meta for parameter in late.parameters())
        for module in late.modules():
            module.to_empty(device="cpu", recurse=False)
            getattr(module, "reset_parameters", lambda: None)()
        for key, tensor in _stored(late).items():
            assert torch.equal(tensor, direct[key]), key


def test_norms_are_parts_of_the_linear_layers_behind_them() -> None:
    names = {name for name, _ in _gpt("gpt2", te=True).named_parameters() if ".layers.0." in name and "norm" in name}
    layer = "decoder.layers.0"
    assert names == {
        f"{layer}.{linear}.layer_norm_{kind}"
        for linear in ("self_attention.linear_qkv", "mlp.linear_fc1")
        for kind in ("weight", "bias")
    }


@pytest.mark.parametrize(
    "argument",
    [
        "use_kitchen",
        "use_te_activation_func",
        "use_kitchen_attention",
        "use_grouped_gemm_for_dense_mlp",
    ],
)
def test_a_layer_spec_that_is_not_served_is_refused_by_name(argument: str) -> None:
    with pytest.raises(NotImplementedError, match=argument):
        get_gpt_layer_with_transformer_engine_spec(**{argument: True})  # type: ignore[arg-type]


def _attention(**fields: Any) -> Callable[[], Any]:
    def build() -> Any:
        from megatron.core.extensions.transformer_engine_layers import TEDotProductAttention

        return TEDotProductAttention(TransformerConfig(**DENSE, **fields), 1)

    return build


def _linear(name: str, **arguments: Any) -> Callable[[], Any]:
    def build() -> Any:
        from megatron.core.extensions import transformer_engine_layers

        config = TransformerConfig(**DENSE)
        sizes = (2, 16, 16) if "Grouped" in name else (16, 16)
        given = {"config": config, "init_method": config.init_method, "bias": True} | arguments
        return getattr(transformer_engine_layers, name)(*sizes, **given)

    return build


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (_attention(apply_query_key_layer_scaling=True), NotImplementedError, "apply_query_key_layer_scaling"),
        (_attention(deterministic_mode=True), RuntimeError, "use_deterministic_algorithms"),
        (_attention(attention_backend="flash"), RuntimeError, "flash-attn"),
        (_linear("TEColumnParallelLinear", gather_output=True), ValueError, "gather_output"),
        (_linear("TELayerNormColumnParallelLinear", gather_output=True), ValueError, "gather_output"),
        (_linear("TEColumnParallelLinear", skip_weight_param_allocation=True), ValueError, "skip_weight_param"),
        (_linear("TERowParallelLinear", input_is_parallel=False), ValueError, "input_is_parallel"),
        (_linear("TELayerNormColumnParallelLinear", is_expert=True), ValueError, "is_expert"),
        (_linear("TEColumnParallelGroupedLinear", is_expert=False), ValueError, "is_expert"),
    ],
)
def test_what_a_layer_does_not_serve_is_refused(build: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_attention_takes_masks_and_is_told_which_kernels_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    names = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
    for name in names:
        monkeypatch.setenv(name, "")
    local, ours = (_gpt("gpt2", te=te, attention_backend="fused") for te in (False, True))
    assert [os.environ[name] for name in names] == ["0", "1", "0"]
    inputs, positions, labels = random_tokens()
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[..., 0] = False
    losses = [model(inputs, positions, mask, labels=labels) for model in (local, ours)]
    torch.testing.assert_close(losses[1], losses[0])
    with pytest.raises(TypeError, match="dtype bool"):
        ours(inputs, positions, mask.float(), labels=labels)


def test_weights_that_are_multiplied_in_fp8_ask_the_engine_for_it() -> None:
    """Matrices of the layers that are not kept in bf16, and nothing else; also on the meta device."""
    fields = {
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "fp8_param": True,
    }
    fields |= {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0}
    sizes: dict[str, Any] = {"moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 16}
    for name, matrices in (("llama", 4), ("experts", 2 + 2 * 4 + 2)):
        model = _gpt(name, te=True, device="meta", **fields, **(sizes if name == "experts" else {}))
        for module in model.modules():
            module.to_empty(device="cpu", recurse=False)
            getattr(module, "reset_parameters", lambda: None)()
        codecs = {key: p.fsdp_codec for key, p in model.named_parameters() if hasattr(p, "fsdp_codec")}
        assert {codec.recipe for codec in codecs.values()} == {"tensorwise"}
        assert all(".layers.1." in key and "weight" in key.rsplit(".", 1)[1] for key in codecs)
        assert not any("norm" in key or "router" in key for key in codecs)
        assert len(codecs) == matrices, sorted(codecs)


def test_transposes_that_the_engine_keeps_are_not_dropped_after_each_backward() -> None:
    """transformer-engine drops them for modules of FSDP2, and keeps what it quantised of others."""
    from dataclasses import replace

    fields = {
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "fp8_param": True,
    }
    layer: Any = _gpt("llama", te=True, **fields).decoder.layers[0].mlp.linear_fc2  # type: ignore[arg-type]
    x = torch.ones(16, 1, layer.in_features, dtype=torch.bfloat16)
    seen = [(layer.is_fsdp2, layer.fuse_wgrad_accumulation)]
    for keeps in (False, True):
        layer.weight.fsdp_codec = replace(layer.weight.fsdp_codec, keeps_derived=keeps)
        layer.weight.get_main_grad = lambda: torch.zeros_like(layer.weight)
        layer(x)
        seen.append((layer.is_fsdp2, layer.fuse_wgrad_accumulation))
    assert seen == [(False, False), (True, True), (False, True)]


class _Ranks:
    """A process group of so many ranks."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def size(self) -> int:
        return self.num_ranks


def test_delayed_scaling_reduces_over_the_ranks_of_a_stage() -> None:
    """Over all of them, as Megatron-Core does: ranks of other stages run other layers at other times."""
    from megatron.core.fp8_utils import Quantization

    pair: Any = _Ranks(2)
    stage: Any = _Ranks(4)
    fields: dict[str, Any] = {"params_dtype": torch.bfloat16, "bf16": True, "fp8": "hybrid"}
    config = TransformerConfig(**DENSE, **NO_DROPOUT, **fields)
    layouts = {
        "tensor": ProcessGroupCollection(pp=pair, tp=pair, dp=pair, dp_cp=pair, tp_dp_cp=stage),
        "data": ProcessGroupCollection(pp=pair, dp=stage, dp_cp=stage),
    }
    for groups in layouts.values():
        quantization = Quantization(config, groups)
        assert quantization._group is stage and quantization._recipe.reduce_amax
    with pytest.raises(
        ValueError, match="must come with a process group of a stage's ranks, got a collection without tp_dp_cp"
    ):
        Quantization(config, ProcessGroupCollection(pp=pair, tp=pair))
