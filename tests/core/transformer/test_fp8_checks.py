"""FP8 settings that contradict others: each row is a test."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.transformer.fp8_checks import FP8_CONTRADICTIONS
from megatron.core.transformer.transformer_config import TransformerConfig

BASE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
    "bf16": True,
    "params_dtype": torch.bfloat16,
}
FP8: dict[str, Any] = {"fp8": "hybrid"}
FUSED: dict[str, Any] = {**FP8, "use_transformer_engine_op_fuser": True, "activation_func": "silu"}
EXPERTS: dict[str, Any] = {**FP8, "num_moe_experts": 4, "moe_grouped_gemm": True, "add_bias_linear": False}
TENSORWISE: dict[str, Any] = {**FP8, "fp8_recipe": "tensorwise"}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fp8": "e5m2"}, "fp8 must be 'e4m3', 'hybrid' or None, got 'e5m2'"),
    (
        {**FP8, "bf16": False, "fp16": True},
        "fp8 must go with bf16=True and params_dtype=torch.bfloat16, got False",
    ),
    ({"layer_kernels": "local"}, "layer_kernels must be 'fastest' or 'transformer_engine', got 'local'"),
    ({**FP8, "transformer_impl": "local"}, "fp8 must go with transformer_impl='transformer_engine', got 'local'"),
    ({**FP8, "fp8_amax_history_len": 0}, "fp8_amax_history_len must be at least 1, got 0"),
    ({**FP8, "fp8_margin": -1}, "fp8_margin must not be negative, got -1"),
    ({**FP8, "fp8_amax_compute_algo": "mean"}, "fp8_amax_compute_algo must be 'most_recent' or 'max', got 'mean'"),
    (
        {**FP8, "fp8_recipe": "blockwise", "fp8_dot_product_attention": True},
        "fp8_dot_product_attention must be off with fp8_recipe='blockwise'",
    ),
    ({**FP8, "fp8_multi_head_attention": True}, "must go with fp8_dot_product_attention, got it off"),
    (
        {**FP8, "fp8_dot_product_attention": True, "attention_dropout": 0.1},
        "attention_dropout must be 0 with fp8_dot_product_attention, got 0.1",
    ),
    (
        {**FP8, "recompute_granularity": "selective", "recompute_modules": ["mlp_act"]},
        "recompute_modules with 'mlp_act' must go with use_transformer_engine_op_fuser in FP8, got it off",
    ),
    (
        {**FP8, "activation_func_fp8_input_store": True},
        "activation_func_fp8_input_store must go with use_transformer_engine_op_fuser, got it off",
    ),
    (
        FUSED
        | {
            "activation_func_fp8_input_store": True,
            "recompute_granularity": "selective",
            "recompute_modules": ["mlp_act"],
        },
        "recompute_modules must not have 'mlp_act' with activation_func_fp8_input_store",
    ),
    (
        {**FP8, "use_transformer_engine_op_fuser": True},
        "use_transformer_engine_op_fuser must go with bias_activation_fusion where the activation is GELU",
    ),
    (
        {**FP8, "use_transformer_engine_op_fuser": True, "activation_func": torch.tanh},
        "use_transformer_engine_op_fuser must go with GELU, SiLU, ReLU or squared ReLU, without .*tanh",
    ),
    (
        {**FP8, "first_last_layers_bf16": True},
        "first_last_layers_bf16 must go with fp8_recipe='tensorwise' or 'blockwise'",
    ),
    (
        {**TENSORWISE, "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": -1},
        "num_layers_at_start_in_bf16 and num_layers_at_end_in_bf16 must not be negative, got 1 and -1",
    ),
    (
        {**TENSORWISE, "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 4},
        r"must be num_layers \(4\) together at most, got 1 and 4",
    ),
    ({**FP8, "num_moe_experts": 4}, "fp8 must go with moe_grouped_gemm where there are experts, got it off"),
    (
        {**FP8, "hidden_size": 24},
        "fp8 must go with a width of hidden states of a multiple of 16, got hidden_size 24; its GEMMs",
    ),
    (
        {**FP8, "hidden_size": 64, "tensor_model_parallel_size": 2, "kv_channels": 4, "ffn_hidden_size": 64},
        "fp8 must go with widths of a rank's heads of a multiple of 16, got num_attention_heads 4, num_query_groups 4 and"
        " kv_channels 4 on tensor_model_parallel_size 2",
    ),
    (
        {**FP8, "ffn_hidden_size": 40},
        "a width of a rank's part of the MLP of a multiple of 16, got ffn_hidden_size 40 on",
    ),
    ({**EXPERTS, "moe_ffn_hidden_size": 24}, "part of an expert of a multiple of 16, got moe_ffn_hidden_size 24 on"),
    (
        {**EXPERTS, "moe_shared_expert_intermediate_size": 8},
        "part of the shared expert of a multiple of 16, got moe_shared_expert_intermediate_size 8 on",
    ),
    ({**EXPERTS, "moe_latent_size": 8}, "a width of experts' inputs of a multiple of 16, got moe_latent_size 8"),
]


@pytest.mark.parametrize("row", range(len(REFUSED)))
def test_each_contradiction_is_refused(row: int) -> None:
    settings, message = REFUSED[row]
    with pytest.raises(ValueError, match=r"TransformerConfig\..*" + message):
        TransformerConfig(**{**BASE, **settings})
    probe: Any = SimpleNamespace(**{**vars(TransformerConfig(**BASE)), **settings})
    assert FP8_CONTRADICTIONS[row][0](probe)


def test_each_row_has_a_test() -> None:
    assert len(REFUSED) == len(FP8_CONTRADICTIONS)


def test_widths_that_no_layer_has_may_be_odd() -> None:
    config = TransformerConfig(**{**BASE, **EXPERTS, "moe_ffn_hidden_size": 32, "ffn_hidden_size": 40})
    assert config.ffn_hidden_size == 40, "all layers have experts"
    with pytest.raises(ValueError, match="got ffn_hidden_size 40 on"):
        TransformerConfig(**{**BASE, **EXPERTS, "moe_ffn_hidden_size": 32, "ffn_hidden_size": 40, "moe_layer_freq": 2})


@pytest.mark.parametrize("recipe", ["mxfp8", "custom"])
def test_recipes_that_hopper_does_not_have_are_refused_by_name(recipe: str) -> None:
    with pytest.raises(NotImplementedError, match=f"fp8_recipe must be .* got '{recipe}': mxfp8 needs Blackwell"):
        TransformerConfig(**BASE, fp8="hybrid", fp8_recipe=recipe)  # type: ignore[arg-type]


def test_first_and_last_layers_are_told_by_their_place_in_the_whole_model() -> None:
    from megatron.core.fp8_utils import is_first_last_bf16_layer

    config = TransformerConfig(**BASE, **TENSORWISE, first_last_layers_bf16=True, num_layers_at_end_in_bf16=2)
    assert [is_first_last_bf16_layer(config, index) for index in (-1, 0, 1, 2, 3)] == [False, True, False, True, True]
