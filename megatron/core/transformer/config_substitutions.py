"""Values of a TransformerConfig's fields that are taken as others: one table, which the command line follows too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.core.substitutions import Substitution, without_effect
from megatron.core.transformer.context_parallel import comm_types
from megatron.core.transformer.hybrid_layers import MAMBA_SIZES
from megatron.core.transformer.linear_attention_checks import LINEAR_ATTENTION_SIZES
from megatron.core.transformer.moe.auxiliary_losses import BALANCING_LOSSES
from megatron.core.transformer.moe.moe_config_checks import VALUES_OF
from megatron.core.upstream_fields import UPSTREAM_FIELDS

_DEFAULTS = UPSTREAM_FIELDS["ModelParallelConfig"] | UPSTREAM_FIELDS["TransformerConfig"]


def _defaults(names: str) -> dict[str, object]:
    return {name: _DEFAULTS[name] for name in names.split()}


_OF_EXPERTS = _defaults(
    "expert_tensor_parallel_size moe_layer_freq moe_ffn_hidden_size moe_latent_size moe_apply_probs_on_input "
    "moe_shared_expert_intermediate_size moe_shared_expert_gate moe_grouped_gemm moe_router_topk "
    "moe_enable_routing_replay moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor "
    "moe_router_num_groups moe_router_group_topk moe_router_enable_expert_bias moe_router_bias_update_rate "
    "moe_router_dtype moe_router_load_balancing_type moe_router_force_load_balancing moe_aux_loss_coeff "
    "moe_z_loss_coeff moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_pad_expert_input_to_capacity "
    "moe_token_drop_policy"
)
_OF_FP8 = _defaults(
    "fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_dot_product_attention "
    "fp8_multi_head_attention fp8_param tp_only_amax_red use_transformer_engine_op_fuser "
    "activation_func_fp8_input_store first_last_layers_bf16"
)
_OF_DELAYED = _defaults("fp8_margin fp8_amax_history_len fp8_amax_compute_algo tp_only_amax_red")
_VALUES_OF_FP8 = {
    "fp8_recipe": ("delayed", "tensorwise", "blockwise", "mxfp8", "custom").__contains__,
    "fp8_margin": lambda margin: margin >= 0,
    "fp8_amax_history_len": lambda length: length >= 1,
    "fp8_amax_compute_algo": ("most_recent", "max").__contains__,
}
"""Fields whose values must be of some kind, whether they have an effect or not."""

_OF_MUP = _defaults("mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim mup_attn_scale_power")
_OF_OFFLOADED_MODULES = {"offload_modules": []} | _defaults(
    "min_offloaded_tensor_size activation_offload_fraction fine_grained_offloading_max_inflight_offloads"
)


def _num_groups(config: Any) -> int:
    """Return the number of key and value heads; 1 where it is not given."""
    return int(config.num_query_groups or config.num_attention_heads or 1)


def _balances_without_losses(config: Any) -> bool:
    """Return whether a kind of load-balancing loss is given, other than by default, and no coefficient."""
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        return kinds != "aux_loss" and kinds in BALANCING_LOSSES and coefficients == 0.0
    return len(kinds) == len(coefficients) and {*kinds} <= {*BALANCING_LOSSES} and not any(coefficients)


def _recomputes(config: Any, *modules: str) -> bool:
    return config.recompute_modules is not None and bool({*modules} & {*config.recompute_modules})


def _taking_modules(others: Mapping[str, str]) -> Any:
    """Return what recomputes others in the place of some modules, or nothing if none is left; each comes once."""

    def takes(config: Any) -> dict[str, Any]:
        names = [name for name in dict.fromkeys(others.get(name, name) for name in config.recompute_modules) if name]
        return {"recompute_modules": names} if names else {"recompute_modules": None, "recompute_granularity": None}

    return takes


def _as_ring(given: str | list[str]) -> str | list[str]:
    if isinstance(given, str):
        return "p2p"
    return ["p2p" if one == "a2a+p2p" else one for one in given]


SUBSTITUTIONS: tuple[Substitution, ...] = (
    Substitution(
        lambda c: c.sequence_parallel and c.tensor_model_parallel_size == 1,
        "sequence_parallel has no effect without tensor_model_parallel_size above 1",
        {"sequence_parallel": False},
    ),
    Substitution(
        lambda c: c.apply_query_key_layer_scaling and not c.attention_softmax_in_fp32,
        "apply_query_key_layer_scaling is taken with attention_softmax_in_fp32",
        {"attention_softmax_in_fp32": True},
    ),
    Substitution(
        lambda c: c.num_moe_experts is not None and c.moe_token_dispatcher_type == "flex",
        "moe_token_dispatcher_type flex is taken as alltoall: tokens go to their experts by one all-to-all",
        {"moe_token_dispatcher_type": "alltoall"},
    ),
    Substitution(
        lambda c: (
            c.num_moe_experts is not None
            and c.expert_model_parallel_size > 1
            and c.moe_token_dispatcher_type == "allgather"
        ),
        "moe_token_dispatcher_type allgather is taken as alltoall: only the tokens of an expert travel to it, and the numbers "
        "are the same",
        {"moe_token_dispatcher_type": "alltoall"},
    ),
    Substitution(
        lambda c: (
            c.fp8 is not None
            and not c.fp16
            and c.params_dtype in (torch.float32, torch.bfloat16)
            and not (c.bf16 and c.params_dtype is torch.bfloat16)
        ),
        "fp8 {fp8} is taken with bf16=True: what is not multiplied in FP8 is in bf16, and main weights are in fp32",
        {"bf16": True, "params_dtype": torch.bfloat16},
    ),
    Substitution(
        lambda c: c.moe_router_pre_softmax and c.moe_router_score_function != "softmax",
        "moe_router_pre_softmax has no effect with moe_router_score_function {moe_router_score_function}: scores are made "
        "before the choice",
        {"moe_router_pre_softmax": False},
    ),
    Substitution(
        lambda c: not c.moe_router_enable_expert_bias and c.moe_router_bias_update_rate != 1e-3,
        "moe_router_bias_update_rate has no effect without moe_router_enable_expert_bias",
        {"moe_router_bias_update_rate": 1e-3},
    ),
    Substitution(
        lambda c: c.moe_router_num_groups is not None and c.moe_router_group_topk is None,
        "moe_router_num_groups has no effect without moe_router_group_topk",
        {"moe_router_num_groups": None},
    ),
    *without_effect(
        _OF_EXPERTS, needs=lambda c: c.num_moe_experts is not None, words="num_moe_experts", choices=VALUES_OF
    ),
    Substitution(
        lambda c: c.num_moe_experts is not None and _balances_without_losses(c),
        "moe_router_load_balancing_type {moe_router_load_balancing_type} has no effect without moe_aux_loss_coeff above 0",
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0},
    ),
    *without_effect(
        {"moe_token_drop_policy": "probs"},
        needs=lambda c: c.moe_expert_capacity_factor is not None,
        words="moe_expert_capacity_factor: nothing is dropped",
        choices=VALUES_OF,
    ),
    *without_effect(
        MAMBA_SIZES,
        needs=lambda c: c.hybrid_layer_pattern is not None or c.is_hybrid_model,
        words="hybrid_layer_pattern",
    ),
    *without_effect(
        LINEAR_ATTENTION_SIZES,
        needs=lambda c: c.experimental_attention_variant is not None,
        words="experimental_attention_variant",
    ),
    Substitution(
        lambda c: c.mtp_num_layers == 0,
        "mtp_num_layers 0 is taken as none: there is no multi-token prediction",
        {"mtp_num_layers": None},
    ),
    *without_effect(
        _defaults("mtp_loss_scaling_factor mtp_use_repeated_layer"),
        needs=lambda c: c.mtp_num_layers is not None,
        words="mtp_num_layers",
    ),
    Substitution(
        lambda c: "a2a+p2p" in comm_types(c.cp_comm_type),
        "cp_comm_type a2a+p2p is taken as p2p: keys and values go round one ring, and the numbers are the same",
        lambda c: {"cp_comm_type": _as_ring(c.cp_comm_type)},
    ),
    Substitution(
        lambda c: (
            c.context_parallel_size > 1
            and c.attention_dropout > 0.0
            and set(comm_types(c.cp_comm_type)) != {"a2a"}
            and _num_groups(c) % (c.context_parallel_size * c.tensor_model_parallel_size) == 0
        ),
        "cp_comm_type {cp_comm_type} is taken as a2a: with attention_dropout, attention is over whole sequences, of some heads",
        {"cp_comm_type": ["a2a"]},
    ),
    *without_effect(
        {"recompute_method": None, "recompute_num_layers": None},
        needs=lambda c: c.recompute_granularity == "full",
        words="recompute_granularity='full'",
        choices={"recompute_method": ("uniform", "block").__contains__},
    ),
    *without_effect(
        {"recompute_modules": None},
        needs=lambda c: c.recompute_granularity == "selective",
        words="recompute_granularity='selective'",
    ),
    *without_effect(_OF_FP8, needs=lambda c: c.fp8 is not None, words="fp8", choices=_VALUES_OF_FP8),
    *without_effect(
        _OF_DELAYED,
        needs=lambda c: c.fp8_recipe == "delayed",
        words="fp8_recipe='delayed': scales of others follow from the tensors themselves",
        choices=_VALUES_OF_FP8,
    ),
    *without_effect(
        _defaults("num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"),
        needs=lambda c: c.first_last_layers_bf16,
        words="first_last_layers_bf16",
    ),
    *without_effect(
        {"gradient_accumulation_fusion_min_numel": None},
        needs=lambda c: c.gradient_accumulation_fusion,
        words="gradient_accumulation_fusion",
        choices={"gradient_accumulation_fusion_min_numel": lambda numel: numel >= 0},
    ),
    Substitution(
        lambda c: c.use_transformer_engine_op_fuser and c.num_moe_experts is not None,
        "use_transformer_engine_op_fuser has no effect with num_moe_experts: experts' activations are not written in FP8",
        {"use_transformer_engine_op_fuser": False},
    ),
    # Before moe_act is taken as moe, with which Megatron-Core refuses the overlap.
    Substitution(
        lambda c: (
            c.overlap_moe_expert_parallel_comm
            and (
                c.fp8 is not None or c.fine_grained_activation_offloading or _recomputes(c, "moe_act", "shared_experts")
            )
        ),
        "overlap_moe_expert_parallel_comm has no effect with fp8, offloaded activations and recomputed parts of experts: these follow"
        " one pass at a time; the numbers are the same",
        {"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False},
    ),
    Substitution(
        lambda c: _recomputes(c, "moe_act", "shared_experts"),
        "recompute_modules {recompute_modules}: moe_act and shared_experts are taken as moe, all of which is recomputed",
        _taking_modules({"moe_act": "moe", "shared_experts": "moe"}),
    ),
    Substitution(
        lambda c: _recomputes(c, "moe") and c.num_moe_experts is None,
        "recompute_modules moe: there is none without num_moe_experts",
        _taking_modules({"moe": ""}),
    ),
    Substitution(
        lambda c: _recomputes(c, "layernorm"),
        "recompute_modules layernorm: outputs of norms are kept",
        _taking_modules({"layernorm": ""}),
    ),
    Substitution(
        lambda c: _recomputes(c, "mla_up_proj") and not c.multi_latent_attention,
        "recompute_modules mla_up_proj: there is none without multi_latent_attention",
        _taking_modules({"mla_up_proj": ""}),
    ),
    *without_effect(_OF_MUP, needs=lambda c: c.use_mup, words="use_mup"),
    *without_effect(
        _OF_OFFLOADED_MODULES,
        needs=lambda c: c.fine_grained_activation_offloading,
        words="fine_grained_activation_offloading",
    ),
    Substitution(
        lambda c: c.cross_entropy_fusion_impl == "te",
        "cross_entropy_fusion_impl te is taken as native, the fused cross entropy that is here",
        {"cross_entropy_fusion_impl": "native"},
    ),
)
