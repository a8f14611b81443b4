"""Qwen3-Next as Hugging Face stores it: gated delta net, gated attention, zero-centred norms, experts with a gated shared one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.distributed.fsdp.checkpoint import Part
from megatron.core.transformer.linear_attention_checks import LINEAR_ATTENTION_SIZES
from megatron.training.formats.architecture import Architecture, layers_with_experts, layers_with_linear_attention
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
from megatron.training.formats.linear_attention import rows_of_key_head
from megatron.training.formats.rules import Rule, Subject, Table, same

_ATTENTION, _LINEAR = THERE + "self_attn.", THERE + "linear_attn."


def _pieces(own: Subject, rows: Iterator[tuple[str, int, int]]) -> list[Part]:
    """Return parts that follow each other in ours: (name there, first row there, rows)."""
    parts, row, rest = [], 0, tuple(own.size[1:])
    for source, begin, length in rows:
        parts.append(Part((row, *own.start[1:]), (length, *rest), own.source(source), (begin, *own.start[1:])))
        row += length
    return parts


def _queries_gates_keys_values(own: Subject) -> list[Part]:
    """Group by group ours has the queries of its heads, their gates, its key and its value; there a head's gate follows its query."""
    width, groups = own.architecture["kv_channels"], own.architecture["num_query_groups"]
    heads = own.architecture["num_attention_heads"] // groups

    def rows() -> Iterator[tuple[str, int, int]]:
        for group in range(groups):
            for gate in range(2):
                for head in range(group * heads, (group + 1) * heads):
                    yield _ATTENTION + "q_proj.weight", (2 * head + gate) * width, width
            for letter in "kv":
                yield _ATTENTION + f"{letter}_proj.weight", group * width, width

    return _pieces(own, rows())


def _projections_of_key_heads(own: Subject) -> list[Part]:
    """Key head by key head ours has both: query, key, values and gates, and the strengths and decays of its value heads."""
    widths, heads = rows_of_key_head(own.architecture), own.architecture["linear_num_key_heads"]

    def rows() -> Iterator[tuple[str, int, int]]:
        for head in range(heads):
            for name, width in zip(("in_proj_qkvz", "in_proj_ba"), (sum(widths[:4]), sum(widths[4:])), strict=True):
                yield _LINEAR + f"{name}.weight", head * width, width

    return _pieces(own, rows())


def _channels(own: Subject) -> list[Part]:
    """Key head by key head ours has the channels of query, key and values; there all of one kind follow each other."""
    widths, heads = rows_of_key_head(own.architecture)[:3], own.architecture["linear_num_key_heads"]
    begins = (0, heads * widths[0], heads * (widths[0] + widths[1]))

    def rows() -> Iterator[tuple[str, int, int]]:
        for head in range(heads):
            for begin, width in zip(begins, widths, strict=True):
                yield _LINEAR + "conv1d.weight", begin + head * width, width

    return _pieces(own, rows())


def _minus_one(template: str) -> Rule:
    """Read a norm's weights that are zero-centred in ours and not there."""
    return lambda own: [Part(own.start, tuple(own.size), own.source(template), own.start, shift=-1.0)]


TABLE: Table = {
    **OUTSIDE,
    LAYER + "input_layernorm.weight": same(THERE + "input_layernorm.weight"),
    LAYER + "pre_mlp_layernorm.weight": same(THERE + "post_attention_layernorm.weight"),
    LAYER + "self_attention.linear_qkv.weight": _queries_gates_keys_values,
    LAYER + "self_attention.linear_proj.weight": same(_ATTENTION + "o_proj.weight"),
    LAYER + "self_attention.q_layernorm.weight": same(_ATTENTION + "q_norm.weight"),
    LAYER + "self_attention.k_layernorm.weight": same(_ATTENTION + "k_norm.weight"),
    LAYER + "self_attention.in_proj.weight": _projections_of_key_heads,
    LAYER + "self_attention.conv1d.weight": _channels,
    LAYER + "self_attention.dt_bias": same(_LINEAR + "dt_bias"),
    LAYER + "self_attention.A_log": same(_LINEAR + "A_log"),
    LAYER + "self_attention.out_norm.weight": _minus_one(_LINEAR + "norm.weight"),
    LAYER + "self_attention.out_proj.weight": same(_LINEAR + "out_proj.weight"),
    **DENSE,
    ROUTER: same(THERE + "mlp.gate.weight"),
    **mlp(
        "mlp.experts.local_experts.{expert}.",
        *(f"mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")),
    ),
    **mlp("mlp.shared_experts.", *(f"mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down"))),
    LAYER + "mlp.shared_experts.gate_weight": same(THERE + "mlp.shared_expert_gate.weight"),
}


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings of a ``config.json``."""
    require(config, norm_topk_prob=(True, None))
    layers, rope = config["num_hidden_layers"], config.get("rope_parameters") or {}
    interval = config.get("full_attention_interval", 4)
    kinds = config.get("layer_types") or [
        "full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(layers)
    ]
    dense, step = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step") or 1
    return {
        **llama_settings(config),
        **{name: config[name] for name in LINEAR_ATTENTION_SIZES},
        "rotary_percent": rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 0.25,
        "layernorm_zero_centered_gamma": True,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "experimental_attention_variant": "gdn",
        "linear_attention_freq": [int(kind == "linear_attention") for kind in kinds],
        "num_moe_experts": config["num_experts"],
        "moe_layer_freq": [int(layer not in dense and (layer + 1) % step == 0) for layer in range(layers)],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": None,
    }


def config(settings: Architecture) -> dict[str, Any]:
    """Return the ``config.json`` of our settings, which may say less than they do."""
    if settings.get("experimental_attention_variant") is None:
        raise NotImplementedError("it has linear attention")
    found, rotated = llama_config(settings), settings["rotary_percent"]
    return {
        **found,
        **{name: settings[name] for name in LINEAR_ATTENTION_SIZES},
        "rope_parameters": {**found["rope_parameters"], "partial_rotary_factor": rotated},
        "partial_rotary_factor": rotated,
        "layer_types": [
            "linear_attention" if linear else "full_attention" for linear in layers_with_linear_attention(settings)
        ],
        "moe_intermediate_size": settings.get("moe_ffn_hidden_size") or settings["ffn_hidden_size"],
        "shared_expert_intermediate_size": settings.get("moe_shared_expert_intermediate_size"),
        "num_experts": settings.get("num_moe_experts"),
        "num_experts_per_tok": settings.get("moe_router_topk"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, has in enumerate(layers_with_experts(settings)) if not has],
    }
