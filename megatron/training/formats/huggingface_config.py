"""``config.json`` of a Hugging Face model: the entries that are read of it, each with its type and range."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.transformer.linear_attention_checks import LINEAR_ATTENTION_SIZES
from megatron.training.formats.value_kinds import (
    ANY,
    FLAG,
    MAX_LAYERS,
    MAX_SIZE,
    MAX_WIDTH,
    NULL,
    Kind,
    checked,
    number,
    several,
    whole,
)

CONFIG = "config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

_LAYERS, _WIDTH, _SIZE = whole(0, MAX_LAYERS), whole(1, MAX_WIDTH), whole(1, MAX_SIZE)
_FRACTION, _POSITIVE = number(above=0, most=1), number(above=0)
_OBJECT = Kind("an object", lambda value: isinstance(value, dict))
_ID = whole(-1, MAX_SIZE)
_SHORT_TEXTS = several(Kind("a text", lambda value: isinstance(value, str)), most=MAX_LAYERS)

KINDS_OF_IDS: dict[str, Kind] = dict.fromkeys(TOKEN_IDS, _ID | several(_ID, most=MAX_LAYERS))
_NEEDED: dict[str, Kind] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), whole(1, MAX_LAYERS)),
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "n_embd", "n_head"), _WIDTH),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "n_positions"), _SIZE),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon"), _FRACTION),
}
"""Of layers, or of the whole model: where an entry is there, it has such a value."""

_OPTIONAL: dict[str, Kind] = {
    **dict.fromkeys(
        (
            "num_key_value_heads",
            "head_dim",
            "n_inner",
            "moe_intermediate_size",
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            *LINEAR_ATTENTION_SIZES,
        ),
        _WIDTH,
    ),
    "shared_expert_intermediate_size": whole(0, MAX_WIDTH),
    **dict.fromkeys(
        (
            "num_local_experts",
            "num_experts",
            "n_routed_experts",
            "num_experts_per_tok",
            "decoder_sparse_step",
            "full_attention_interval",
            "sliding_window_pattern",
        ),
        whole(1, MAX_LAYERS),
    ),
    **dict.fromkeys(
        ("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "max_window_layers"), _LAYERS
    ),
    "mlp_only_layers": several(_LAYERS, most=MAX_LAYERS),
    "layer_types": _SHORT_TEXTS,
    "sliding_window": _SIZE,
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window", "norm_topk_prob"), FLAG),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"), _POSITIVE),
    "partial_rotary_factor": _FRACTION,
    **dict.fromkeys(("swiglu_limit", "routed_scaling_factor"), number()),
    "quantization_config": _OBJECT,
    **KINDS_OF_IDS,
}
"""Which may be null."""

# Served with certain values alone, with which they are compared.
_COMPARED = (
    "model_type",
    "hidden_act",
    "hidden_activation",
    "activation_function",
    "attention_bias",
    "mlp_bias",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "add_cross_attention",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
    "rope_interleave",
    "moe_layer_freq",
    "topk_method",
    "scoring_func",
    "swiglu_alpha",
)
_ROPE: dict[str, Kind] = {
    **dict.fromkeys(("rope_type", "type", "low_freq_factor", "high_freq_factor"), ANY),
    "original_max_position_embeddings": _SIZE | NULL,
    "partial_rotary_factor": _FRACTION | NULL,
    **dict.fromkeys(("rope_theta", "factor", "beta_fast", "beta_slow"), _POSITIVE | NULL),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), number() | NULL),
    "truncate": FLAG | NULL,
}
_ROPE_OF_LAYERS = ("full_attention", "sliding_attention")
_ENTRIES: dict[str, Kind] = {
    **_NEEDED,
    **{name: kind | NULL for name, kind in _OPTIONAL.items()},
    **dict.fromkeys(_COMPARED, ANY),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), _OBJECT | NULL),
}


def checked_config(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the entries of a ``config.json`` that say what the model computes; others are left out.

    Raises:
        InvalidValue: an entry is of another type or out of range; names file and key.
    """
    found = checked(config, _ENTRIES, path)
    for name in ("rope_parameters", "rope_scaling"):
        if found.get(name) is not None:
            found[name] = _checked_rope(found[name], f"{path}: {name}")
    return found


def _checked_rope(rope: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the entries of rotary positions, which Gemma-3 has for two kinds of layers."""
    kinds = {**_ROPE, **dict.fromkeys(_ROPE_OF_LAYERS, _OBJECT | NULL)}
    found = checked(rope, kinds, where)
    for name in _ROPE_OF_LAYERS:
        if found.get(name) is not None:
            found[name] = checked(found[name], _ROPE, f"{where}.{name}")
    return found
