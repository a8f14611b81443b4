"""What families of Hugging Face models have in common with Llama: names of tensors, and entries of ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.training.formats.architecture import Architecture, exact, windows_of_layers
from megatron.training.formats.rules import halves, queries_keys_values, same, vocabulary

ROUTER = "decoder.layers.{layer}.mlp.router.weight"
LAYER, THERE = "decoder.layers.{layer}.", "model.layers.{layer}."


def attention(kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return the rules of attention and norms; ``kinds``: "weight", and "bias" where the projection has one."""
    rules: dict[str, Any] = {
        LAYER + "self_attention.linear_proj.weight": same(THERE + "self_attn.o_proj.weight"),
        LAYER + "input_layernorm.weight": same(THERE + "input_layernorm.weight"),
        LAYER + "pre_mlp_layernorm.weight": same(THERE + "post_attention_layernorm.weight"),
    }
    for kind in kinds:
        names = [THERE + f"self_attn.{letter}_proj.{kind}" for letter in "qkv"]
        rules[LAYER + f"self_attention.linear_qkv.{kind}"] = queries_keys_values(*names)
    return rules


def mlp(ours: str, gate: str, up: str, down: str) -> dict[str, Any]:
    """Return the rules of a gated MLP ``ours``."""
    return {
        LAYER + ours + "linear_fc1.weight": halves(THERE + gate, THERE + up),
        LAYER + ours + "linear_fc2.weight": same(THERE + down),
    }


OUTSIDE = {
    "embedding.word_embeddings.weight": vocabulary("model.embed_tokens.weight"),
    "output_layer.weight": vocabulary("lm_head.weight"),
    "decoder.final_layernorm.weight": same("model.norm.weight"),
}
DENSE = mlp("mlp.", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")


def llama_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings of a model with Llama's entries."""
    require(config, hidden_act=("silu",), attention_bias=(False, None), mlp_bias=(False, None))
    return plain_settings(config)


def plain_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return Llama's settings of a model that may have another activation and other biases."""
    heads = config["num_attention_heads"]
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "gated_linear_unit": True,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config["rms_norm_eps"],
        "layernorm_zero_centered_gamma": False,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "rotary_interleaved": False,
        "activation_func": "silu",
        "max_position_embeddings": config["max_position_embeddings"],
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "share_embeddings_and_output_weights": bool(config.get("tie_word_embeddings", False)),
        "padded_vocab_size": config["vocab_size"],
        **rope_settings(config),
        **window_settings(config),
    }


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings of rotary positions."""
    parameters = config.get("rope_parameters") or {}
    scaling = parameters or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    found = {
        "rotary_base": exact(parameters.get("rope_theta") or config.get("rope_theta") or 10000),
        "rope_scaling": kind == "llama3",
        "rope_scaling_factor": float(scaling["factor"]) if kind == "llama3" else 8.0,
        "rotary_seq_len_interpolation_factor": exact(scaling["factor"]) if kind == "linear" else None,
    }
    if kind == "yarn":
        return {**found, "position_embedding_type": "yarn", **_yarn_settings(scaling)}
    if kind == "llama3":
        require(
            scaling,
            low_freq_factor=(1, None),
            high_freq_factor=(4, None),
            original_max_position_embeddings=(8192, None),
        )
    elif kind not in ("default", "linear"):
        raise NotImplementedError(
            f"rope_type must be default, linear, llama3 or yarn, got {kind!r}, which is not served"
        )
    return found


def require(config: Mapping[str, Any], **lawful: tuple[Any, ...]) -> None:
    """Raise NotImplementedError where an entry has another value than these; the last is that of one that is left out."""
    for name, values in lawful.items():
        if config.get(name, values[-1]) not in values:
            raise NotImplementedError(
                f"{name} must be {' or '.join(str(value) for value in values if value is not None) or 'null'}, got {config[name]!r}, "
                "which is not served"
            )


def window_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings of windows; {} where no layer has one that is shorter than the contexts."""
    window, layers = config.get("sliding_window"), config["num_hidden_layers"]
    if window is None or not config.get("use_sliding_window", True) or window >= config["max_position_embeddings"]:
        return {}
    kinds = config.get("layer_types")
    if kinds is not None:
        windows = [int(kind == "sliding_attention") for kind in kinds]
    else:
        first = config.get("max_window_layers") or 0
        windows = [int(layer >= first) for layer in range(layers)]
    return {"window_size": [window - 1, 0], "window_attn_skip_freq": windows} if any(windows) else {}


def window_config(settings: Architecture) -> dict[str, Any]:
    """Return the entries of windows in some layers."""
    size, windows = windows_of_layers(settings)
    return {
        "sliding_window": None if size is None else size + 1,
        "layer_types": ["sliding_attention" if has else "full_attention" for has in windows],
    }


def _yarn_settings(scaling: Mapping[str, Any]) -> dict[str, Any]:
    require(scaling, attention_factor=(None,), mscale=(None, 1.0), mscale_all_dim=(None, 0.0))
    return {
        "yarn_rotary_scaling_factor": float(scaling["factor"]),
        "yarn_original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "yarn_beta_fast": float(scaling.get("beta_fast") or 32.0),
        "yarn_beta_slow": float(scaling.get("beta_slow") or 1.0),
        "yarn_mscale": 1.0,
        "yarn_mscale_all_dim": 0.0,
        "yarn_correction_range_round_to_int": bool(scaling.get("truncate", True)),
    }


def _yarn_config(settings: Architecture) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": settings["yarn_rotary_scaling_factor"],
        "original_max_position_embeddings": settings["yarn_original_max_position_embeddings"],
        "beta_fast": settings["yarn_beta_fast"],
        "beta_slow": settings["yarn_beta_slow"],
        "truncate": settings["yarn_correction_range_round_to_int"],
    }


def llama_config(settings: Architecture) -> dict[str, Any]:
    """Return Llama's entries of our settings."""
    rope: dict[str, Any] = {"rope_type": "default"}
    if settings["position_embedding_type"] == "yarn":
        rope = _yarn_config(settings)
    elif settings["rope_scaling"]:
        rope = {
            "rope_type": "llama3",
            "factor": settings["rope_scaling_factor"],
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    elif settings["rotary_seq_len_interpolation_factor"]:
        rope = {"rope_type": "linear", "factor": float(settings["rotary_seq_len_interpolation_factor"])}
    theta = float(settings["rotary_base"])
    return {
        "vocab_size": settings["padded_vocab_size"],
        "hidden_size": settings["hidden_size"],
        "intermediate_size": settings["ffn_hidden_size"],
        "num_hidden_layers": settings["num_layers"],
        "num_attention_heads": settings["num_attention_heads"],
        "num_key_value_heads": settings["num_query_groups"],
        "head_dim": settings["kv_channels"],
        "hidden_act": settings["activation_func"],
        "max_position_embeddings": settings["max_position_embeddings"],
        "rms_norm_eps": settings["layernorm_epsilon"],
        "tie_word_embeddings": settings["share_embeddings_and_output_weights"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        # Version 5 reads the first, version 4 the other two.
        "rope_parameters": {**rope, "rope_theta": theta},
        "rope_theta": theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
    }
