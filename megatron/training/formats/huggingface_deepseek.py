"""Hugging Face models of the family of DeepSeek-V3: latent attention, and experts chosen by groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.core.distributed.fsdp.checkpoint import Part
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import yarn_mscale
from megatron.training.formats.architecture import Architecture, comparable, layers_with_experts
from megatron.training.formats.huggingface_llama import (
    DENSE,
    LAYER,
    OUTSIDE,
    ROUTER,
    THERE,
    llama_config,
    llama_settings,
    mlp,
    require,
)
from megatron.training.formats.rules import Rule, Subject, Table, same

_NAMES = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_SCORED_EXPERTS = 2
"""Experts of a group by which it is chosen there; ours are as many as a token has of each of its groups."""


def _attention() -> dict[str, Any]:
    there = {
        "linear_q_proj": "q_proj",
        "linear_q_down_proj": "q_a_proj",
        "q_layernorm": "q_a_layernorm",
        "linear_q_up_proj": "q_b_proj",
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
        "linear_kv_up_proj": "kv_b_proj",
        "linear_proj": "o_proj",
    }
    return {
        f"{LAYER}self_attention.{ours}.weight": same(f"{THERE}self_attn.{name}.weight") for ours, name in there.items()
    }


_LAYERS: Table = {
    **_attention(),
    LAYER + "input_layernorm.weight": same(THERE + "input_layernorm.weight"),
    LAYER + "pre_mlp_layernorm.weight": same(THERE + "post_attention_layernorm.weight"),
    **DENSE,
    ROUTER: same(THERE + "mlp.gate.weight"),
    LAYER + "mlp.router.expert_bias": same(THERE + "mlp.gate.e_score_correction_bias"),
    **mlp("mlp.shared_experts.", *(f"mlp.shared_experts.{name}" for name in _NAMES)),
    **mlp("mlp.experts.local_experts.{expert}.", *(f"mlp.experts.{{expert}}.{name}" for name in _NAMES)),
}


def _behind(rule: Rule) -> Rule:
    """Read from a layer of multi-token prediction, which are counted on behind the model's there."""

    def parts(own: Subject) -> list[Part]:
        layer = own.architecture["num_layers"] + int(own.numbers["layer"])
        return rule(replace(own, numbers={**own.numbers, "layer": str(layer)}))

    return parts


_MTP = "mtp.layers.{layer}."
TABLE: Table = {
    **OUTSIDE,
    **_LAYERS,
    **{f"{_MTP}mtp_model_layer.{ours.removeprefix(LAYER)}": _behind(rule) for ours, rule in _LAYERS.items()},
    **{
        f"{_MTP}{ours}.weight": _behind(same(f"{THERE}{theirs}.weight"))
        for ours, theirs in (
            ("enorm", "enorm"),
            ("hnorm", "hnorm"),
            ("eh_proj", "eh_proj"),
            ("final_layernorm", "shared_head.norm"),
        )
    },
}


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings of a ``config.json``.

    Raises:
        NotImplementedError: a part of the model is not served.
    """
    require(
        config,
        rms_norm_eps=(1e-6,),  # what the norms of latent vectors have there, whatever is said
        rope_interleave=(True, None),
        num_key_value_heads=(config["num_attention_heads"], None),
        quantization_config=(None,),
    )
    without_rope = {**config, "rope_parameters": None, "rope_scaling": None}
    parameters = config.get("rope_parameters") or {}
    without_rope["rope_theta"] = parameters.get("rope_theta") or config.get("rope_theta")
    found = llama_settings(without_rope) | {
        "kv_channels": max(1, config["hidden_size"] // config["num_attention_heads"]),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
    }
    return found | _rope_settings(config) | _expert_settings(config)


def is_of_later_tokens(config: Mapping[str, Any], name: str) -> bool:
    """Return whether a tensor is of a layer behind the last: multi-token prediction, which transformers leaves out, too.

    A run may have such layers; then these tensors are read, but for copies of embedding and output layer.
    """
    layer = name.removeprefix("model.layers.").partition(".")[0]
    return layer.isdigit() and int(layer) >= int(config["num_hidden_layers"])


def _rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    found = {
        "rope_type": "rope" if kind == "default" else "yarn",
        "rotary_scaling_factor": 1.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
    }
    if kind == "default":
        return found
    if kind != "yarn":
        raise NotImplementedError(f"rope_type must be default or yarn, got {kind!r}, which is not served")
    require(scaling, truncate=(True, None), partial_rotary_factor=(1.0, None))
    length = scaling["original_max_position_embeddings"]
    factor = float(scaling.get("factor") or config["max_position_embeddings"] / length)
    mscale, of_scores = scaling.get("mscale") or 0.0, scaling.get("mscale_all_dim") or 0.0
    # Where one of the two is left out, cosines and sines have the factor of mscale 1 alone.
    growth = (
        yarn_mscale(factor, mscale) / yarn_mscale(factor, of_scores) if mscale and of_scores else yarn_mscale(factor)
    )
    if of_scores and not mscale:
        raise NotImplementedError("mscale must go with mscale_all_dim, got none, which is not served")
    if scaling.get("attention_factor") not in (None, growth):
        raise NotImplementedError(
            f"attention_factor must be that of mscale and mscale_all_dim, {growth}, got {scaling['attention_factor']}, which is"
            " not served"
        )
    return found | {
        "rotary_scaling_factor": factor,
        "original_max_position_embeddings": length,
        "beta_fast": float(scaling.get("beta_fast") or 32),
        "beta_slow": float(scaling.get("beta_slow") or 1),
        "mscale": float(mscale if of_scores else 1.0),
        "mscale_all_dim": float(of_scores),
    }


def _expert_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    dense = min(config.get("first_k_dense_replace", 3), layers)
    if dense == layers:
        return {}
    require(config, norm_topk_prob=(True, None), moe_layer_freq=(1, None), topk_method=("noaux_tc", None))
    require(config, scoring_func=("sigmoid", None))
    groups, of_token = config["n_group"] or 1, config["topk_group"] or 1
    topk, width = config["num_experts_per_tok"], config["moe_intermediate_size"]
    if groups > 1 and topk // of_token != _SCORED_EXPERTS:
        raise NotImplementedError(
            f"num_experts_per_tok must be {_SCORED_EXPERTS} times topk_group, got {topk} and {of_token}: groups are chosen there"
            f" by {_SCORED_EXPERTS} of their experts"
        )
    return {
        "num_moe_experts": config["n_routed_experts"],
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": (config.get("n_shared_experts") or 0) * width or None,
        "moe_shared_expert_gate": False,
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor"),
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": of_token if groups > 1 else None,
        "moe_router_enable_expert_bias": True,
    }


def config(settings: Architecture) -> dict[str, Any]:
    """Return the ``config.json`` of our settings, which may say less than they do."""
    if not settings.get("multi_latent_attention"):
        raise NotImplementedError("its attention is multi-latent")
    if settings.get("mtp_use_repeated_layer"):
        raise NotImplementedError("each of its layers of multi-token prediction has weights of its own")
    plain = {"rope_scaling": False, "rotary_seq_len_interpolation_factor": None, "rotary_percent": 1.0}
    base = llama_config({**settings, **plain})
    rope: dict[str, Any] = {"rope_type": "default"}
    if comparable(settings)["rope_type"] == "yarn":
        rope = {
            "rope_type": "yarn",
            "factor": float(settings["rotary_scaling_factor"]),
            "original_max_position_embeddings": settings["original_max_position_embeddings"],
            "beta_fast": settings["beta_fast"],
            "beta_slow": settings["beta_slow"],
            "mscale": settings["mscale"],
            "mscale_all_dim": settings["mscale_all_dim"],
        }
    return {
        **base,
        "num_key_value_heads": settings["num_attention_heads"],
        "head_dim": settings["qk_pos_emb_head_dim"],
        "q_lora_rank": settings["q_lora_rank"],
        "kv_lora_rank": settings["kv_lora_rank"],
        "qk_nope_head_dim": settings["qk_head_dim"],
        "qk_rope_head_dim": settings["qk_pos_emb_head_dim"],
        "v_head_dim": settings["v_head_dim"],
        "rope_interleave": True,
        "rope_parameters": {**rope, "rope_theta": base["rope_theta"]},
        "rope_scaling": None if rope["rope_type"] == "default" else {**rope, "type": "yarn"},
        **_expert_config(settings),
    }


def _expert_config(settings: Architecture) -> dict[str, Any]:
    layers = settings["num_layers"]
    if settings.get("num_moe_experts") is None:
        return {"first_k_dense_replace": layers, "num_nextn_predict_layers": settings.get("mtp_num_layers") or 0}
    width = settings.get("moe_ffn_hidden_size") or settings["ffn_hidden_size"]
    has_experts = layers_with_experts(settings)
    return {
        "first_k_dense_replace": has_experts.index(1) if 1 in has_experts else layers,
        "num_nextn_predict_layers": settings.get("mtp_num_layers") or 0,
        "moe_intermediate_size": width,
        "n_routed_experts": settings["num_moe_experts"],
        "n_shared_experts": (settings.get("moe_shared_expert_intermediate_size") or 0) // width,
        "num_experts_per_tok": settings.get("moe_router_topk"),
        "n_group": settings.get("moe_router_num_groups") or 1,
        "topk_group": settings.get("moe_router_group_topk") or 1,
        "routed_scaling_factor": settings.get("moe_router_topk_scaling_factor") or 1.0,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
