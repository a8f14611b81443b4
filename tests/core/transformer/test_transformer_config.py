"""A setting is in effect or refused by name: each row of the tables is a test."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.activations import squared_relu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.attention_checks import ATTENTION_CONTRADICTIONS
from megatron.core.transformer.config_checks import CONTRADICTIONS
from megatron.core.transformer.fp8_checks import FP8_CONTRADICTIONS
from megatron.core.transformer.hybrid_layers import HYBRID_CONTRADICTIONS
from megatron.core.transformer.linear_attention_checks import LINEAR_ATTENTION_CONTRADICTIONS
from megatron.core.transformer.offload.offload_checks import OFFLOAD_CONTRADICTIONS
from megatron.core.transformer.parallel_checks import PARALLEL_CONTRADICTIONS
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

BASE: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4}

OVERLAP: dict[str, Any] = {
    "num_moe_experts": 2,
    "expert_model_parallel_size": 2,
    "overlap_moe_expert_parallel_comm": True,
}
CONTRADICTORY: list[tuple[dict[str, Any], str]] = [
    ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
    ({"hidden_size": -1}, "hidden_size must be at least 1 .*, got -1"),
    ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
    ({"ffn_hidden_size": 0}, "ffn_hidden_size must be at least 1"),
    ({"kv_channels": 0}, "kv_channels must be at least 1"),
    ({"num_attention_heads": 3}, "hidden_size must be a multiple of num_attention_heads, got 16 and 3"),
    ({"num_query_groups": 0}, "num_query_groups must be at least 1"),
    ({"num_query_groups": 3}, "num_attention_heads must be a multiple of num_query_groups, got 4 and 3"),
    ({"hidden_dropout": 1.0}, r"hidden_dropout must be in \[0, 1\), got 1.0"),
    ({"attention_dropout": -0.1}, r"attention_dropout must be in \[0, 1\), got -0.1"),
    ({"layernorm_epsilon": 0.0}, "layernorm_epsilon must be positive, got 0.0"),
    ({"init_method_std": -1.0}, "init_method_std must not be negative, got -1.0"),
    ({"normalization": "BatchNorm"}, "normalization must be 'LayerNorm' or 'RMSNorm', got 'BatchNorm'"),
    ({"activation_func": "tanh"}, "activation_func must be .* got 'tanh'"),
    ({"attention_backend": "best"}, "attention_backend must be one of .* got 'best'"),
    ({"activation_func": "relu", "bias_activation_fusion": True}, "bias_activation_fusion must go with .* got 'relu'"),
    ({"params_dtype": torch.float64}, "params_dtype must be .* got torch.float64"),
    ({"context_parallel_size": 0}, "context_parallel_size must be at least 1, got 0"),
    ({"cp_comm_type": "ring"}, "cp_comm_type must be of p2p, all_gather and a2a, got 'ring'"),
    ({"cp_comm_type": ["p2p"] * 3}, r"cp_comm_type must be one for all layers or one for each of num_layers \(2\)"),
    ({"context_parallel_size": 8}, "attention_dropout must be 0 with context_parallel_size > 1, got 0.1"),
    ({"mup_width_mult": 2.0}, "mup_width_mult must be left out, got 2.0: it is hidden_size / mup_base_hidden_size"),
    (
        {"use_mup": True, "mup_base_hidden_size": -1},
        "mup_base_hidden_size and mup_base_head_dim must be positive, got -1",
    ),
    ({"recompute_granularity": "all"}, "recompute_granularity must be 'full', 'selective' or None, got 'all'"),
    ({"recompute_method": "some"}, "recompute_method must be 'uniform', 'block' or None, got 'some'"),
    ({"recompute_granularity": "full"}, "recompute_method 'uniform' or 'block', got None"),
    ({"recompute_granularity": "full", "recompute_method": "block"}, "recompute_num_layers from 1 to num_layers"),
    (
        {"recompute_granularity": "selective", "recompute_modules": ["norm"]},
        r"recompute_modules must be of 'core_attn', 'mla_up_proj', 'mlp_act', 'mlp' and 'moe', at least one, got \['norm'\]",
    ),
    (
        {"recompute_granularity": "selective", "recompute_modules": ["mlp_act"], "num_moe_experts": 4},
        "recompute_modules must not have 'mlp_act' with num_moe_experts",
    ),
    ({"num_moe_experts": 0}, "num_moe_experts must be at least 1"),
    ({"moe_router_score_function": "tanh"}, "moe_router_score_function must be .* got 'tanh'"),
    ({"moe_router_dtype": "bf16"}, "moe_router_dtype must be None, 'fp32' or 'fp64', got 'bf16'"),
    ({"moe_token_drop_policy": "random"}, "moe_token_drop_policy must be .* got 'random'"),
    ({"moe_token_dispatcher_type": "none"}, "moe_token_dispatcher_type must be .* got 'none'"),
    ({"moe_router_load_balancing_type": "expert"}, "moe_router_load_balancing_type must be .* got 'expert'"),
    (
        {
            "num_moe_experts": 2,
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [0.1],
        },
        r"moe_aux_loss_coeff must be a number, or one for each .* got \[0.1\] and \['aux_loss', 'seq_aux_loss'\]",
    ),
    ({"num_moe_experts": 2, "moe_router_topk": 3}, r"moe_router_topk must be from 1 to num_moe_experts \(2\), got 3"),
    ({"num_moe_experts": 2, "moe_router_topk": 1}, "moe_router_topk=1 must go with moe_router_pre_softmax"),
    (
        {"num_moe_experts": 2, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1},
        "moe_aux_loss_coeff must be 0 with moe_router_load_balancing_type='none', got 0.1",
    ),
    (
        {
            "num_moe_experts": 2,
            "moe_router_load_balancing_type": "sinkhorn",
            "moe_router_topk_scaling_factor": 2.0,
        },
        "moe_router_topk_scaling_factor must be None with moe_router_load_balancing_type='sinkhorn', got 2.0",
    ),
    ({"num_moe_experts": 2, "moe_z_loss_coeff": -0.1}, "must be numbers that are not negative, got 0.0 and -0.1"),
    ({"num_moe_experts": 2, "moe_ffn_hidden_size": 0}, "moe_ffn_hidden_size must be at least 1"),
    ({"num_moe_experts": 2, "moe_expert_capacity_factor": -1.0}, "moe_expert_capacity_factor must be positive"),
    (
        {"num_moe_experts": 2, "moe_expert_rank_capacity_factor": 2.0, "moe_expert_capacity_factor": 1.0},
        "moe_expert_rank_capacity_factor must be positive and without moe_expert_capacity_factor .* got 2.0 and 1.0",
    ),
    (
        {"num_moe_experts": 2, "moe_pad_expert_input_to_capacity": True},
        "moe_pad_expert_input_to_capacity must go with moe_expert_capacity_factor, got None",
    ),
    (
        {"num_moe_experts": 2, "moe_layer_freq": [1]},
        r"moe_layer_freq must be a number or one for each of num_layers \(2\), got \[1\]",
    ),
    ({"num_moe_experts": 2, "moe_layer_freq": 0}, "moe_layer_freq must be at least 1, got 0"),
    (
        {"num_moe_experts": 2, "moe_router_group_topk": 2},
        "moe_router_group_topk must go with moe_router_num_groups, got None",
    ),
    (
        {"num_moe_experts": 6, "moe_router_num_groups": 3, "moe_router_group_topk": 1, "moe_router_topk": 3},
        "got 6 experts in 3 groups, of which 1 give 3 experts",
    ),
    (
        {
            "num_moe_experts": 4,
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 1,
            "moe_router_load_balancing_type": "sinkhorn",
        },
        "moe_router_num_groups must be None with moe_router_load_balancing_type='sinkhorn', got 2",
    ),
    (
        {"num_moe_experts": 2, "moe_router_enable_expert_bias": True},
        "moe_router_enable_expert_bias must go with moe_router_score_function 'sigmoid' or 'sqrtsoftplus'.* got 'softmax'",
    ),
    (
        {
            "num_moe_experts": 2,
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
            "moe_router_bias_update_rate": -1.0,
        },
        "moe_router_bias_update_rate must be a number that is not negative, got -1.0",
    ),
    (
        {"num_moe_experts": 2, "moe_latent_size": 4},
        "moe_latent_size must be at least 1 and go with .* got 4 and add_bias_linear=True",
    ),
    (
        {"num_moe_experts": 2, "moe_apply_probs_on_input": True},
        "moe_apply_probs_on_input must go with moe_router_topk=1, got 2",
    ),
    (
        {"num_moe_experts": 2, "moe_shared_expert_gate": True},
        "moe_shared_expert_gate must go with moe_shared_expert_intermediate_size",
    ),
    (
        {"num_moe_experts": 2, "moe_shared_expert_intermediate_size": 8},
        "moe_shared_expert_intermediate_size must go with add_bias_linear=False",
    ),
    (
        {**OVERLAP, "delay_wgrad_compute": True, "overlap_moe_expert_parallel_comm": False},
        "delay_wgrad_compute must go with overlap_moe_expert_parallel_comm, got False",
    ),
    (
        {**OVERLAP, "expert_model_parallel_size": 1},
        "overlap_moe_expert_parallel_comm must go with expert_model_parallel_size above 1, got 1",
    ),
    (
        {**OVERLAP, "pipeline_model_parallel_size": 2},
        r"overlap_moe_expert_parallel_comm must go with virtual_pipeline_model_parallel_size .* \(2\) is above 1, got None",
    ),
    (
        {**OVERLAP, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
        "overlap_moe_expert_parallel_comm must go without recomputation of layers or of 'moe', got .*'selective'",
    ),
    (
        {**OVERLAP, "moe_shared_expert_overlap": True},
        "overlap_moe_expert_parallel_comm must go without moe_shared_expert_overlap, got True",
    ),
    (
        {**OVERLAP, "cpu_offloading": True, "cpu_offloading_num_layers": 1},
        "overlap_moe_expert_parallel_comm must go without cpu_offloading, got True",
    ),
]


def test_every_row_of_the_tables_has_a_test() -> None:
    elsewhere = (
        PARALLEL_CONTRADICTIONS,
        FP8_CONTRADICTIONS,
        ATTENTION_CONTRADICTIONS,
        OFFLOAD_CONTRADICTIONS,
        LINEAR_ATTENTION_CONTRADICTIONS,
        HYBRID_CONTRADICTIONS,
    )
    assert len(CONTRADICTORY) == len(CONTRADICTIONS) - sum(map(len, elsewhere))


@pytest.mark.parametrize("row", range(len(CONTRADICTORY)))
def test_each_contradiction_is_refused(row: int) -> None:
    """By its own row of the table, not by another that happens to match."""
    fields, message = CONTRADICTORY[row]
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{**BASE, **fields})
    probe = dataclasses.make_dataclass("Probe", [])()
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    vars(probe).update({**defaults, **BASE, **fields})
    assert CONTRADICTIONS[row][0](probe)


def test_modules_that_are_no_transformer_have_a_configuration_without_width() -> None:
    """Callers wrap any module by ``TransformerConfig(num_layers=1, num_attention_heads=1)``; layers refuse it."""
    config = TransformerConfig(num_layers=1, num_attention_heads=1)
    assert (config.hidden_size, config.ffn_hidden_size) == (0, None)
    spec = get_gpt_layer_local_spec()
    for build in (lambda: build_module(spec, config=config), lambda: GPTModel(config, spec, 8, 4)):
        with pytest.raises(ValueError, match="hidden_size must be at least 1 to build a layer, got 0"):
            build()


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="hidden_sise"):
        TransformerConfig(**BASE, hidden_sise=3)  # type: ignore[call-arg]


def test_what_is_set_after_the_checks_is_checked() -> None:
    config = TransformerConfig(**BASE)
    with pytest.raises(ValueError, match="num_attention_heads must be a multiple of num_query_groups, got 3 and 4"):
        config.num_attention_heads = 3
    config.bf16 = True
    with pytest.raises(ValueError, match="fp16 and bf16 exclude each other"):
        config.fp16 = True
    assert config.num_attention_heads == 4 and config.fp16 is False, "what is refused is not set"
    config.tensor_model_parallel_size = 2
    config.no_sync_func = print
    config.of_a_caller = "any"
    assert (config.tensor_model_parallel_size, config.no_sync_func) == (2, print)


def test_replacing_keeps_widths_of_another_scale() -> None:
    config = TransformerConfig(**{**BASE, "hidden_size": 100}, use_mup=True, mup_base_hidden_size=48)
    assert dataclasses.replace(config).mup_width_mult == config.mup_width_mult == 100 / 48


def test_sizes_are_derived_as_in_megatron_core() -> None:
    config = TransformerConfig(**BASE)
    assert (config.ffn_hidden_size, config.kv_channels, config.num_query_groups) == (64, 4, 4)
    assert config.activation_func is F.gelu


@pytest.mark.parametrize(
    ("name", "function"), [("gelu", F.gelu), ("silu", F.silu), ("relu", F.relu), ("squared_relu", squared_relu)]
)
def test_an_activation_may_be_named(name: str, function: object) -> None:
    assert TransformerConfig(**BASE, activation_func=name).activation_func is function


def test_replacing_the_standard_deviation_replaces_the_derived_init_methods() -> None:
    """Otherwise the new value would silently have no effect."""
    config = dataclasses.replace(TransformerConfig(**BASE), init_method_std=0.5)
    tensor = torch.empty(10_000)
    for method, std in [
        (config.init_method, 0.5),
        (config.output_layer_init_method, 0.25),
        (config.embedding_init_method, 0.5),
    ]:
        assert method is not None
        method(tensor)
        assert tensor.std().item() == pytest.approx(std, rel=0.05)


def test_replacing_keeps_given_init_methods_and_the_embedding_follows_the_new_one() -> None:
    config = TransformerConfig(**BASE, init_method=torch.nn.init.zeros_)
    assert dataclasses.replace(config, init_method_std=0.5).init_method is torch.nn.init.zeros_
    embedding_init_method = dataclasses.replace(config, init_method=torch.nn.init.ones_).embedding_init_method
    assert embedding_init_method is not None
    assert embedding_init_method(torch.empty(2)).tolist() == [1.0, 1.0]
