"""Gemma-3's text models as Hugging Face stores them: norms on both sides of attention and MLP, and two rotary bases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.training.formats.architecture import Architecture
from megatron.training.formats.huggingface_llama import (
    DENSE,
    LAYER,
    OUTSIDE,
    THERE,
    attention,
    llama_config,
    plain_settings,
    require,
    window_config,
)
from megatron.training.formats.rules import Table, same

TABLE: Table = {
    **OUTSIDE,
    **attention(("weight",)),
    **DENSE,
    **{
        LAYER + f"self_attention.{letter}_layernorm.weight": same(THERE + f"self_attn.{letter}_norm.weight")
        for letter in "qk"
    },
    LAYER + "post_self_attn_layernorm.weight": same(THERE + "post_attention_layernorm.weight"),
    LAYER + "pre_mlp_layernorm.weight": same(THERE + "pre_feedforward_layernorm.weight"),
    LAYER + "post_mlp_layernorm.weight": same(THERE + "post_feedforward_layernorm.weight"),
}


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return our settings of a ``config.json``, of version 5 of transformers or before."""
    require(
        config,
        hidden_activation=("gelu_pytorch_tanh", None),
        attention_bias=(False, None),
        attn_logit_softcapping=(None,),
        final_logit_softcapping=(None,),
        use_bidirectional_attention=(False, None),
    )
    parameters = config.get("rope_parameters") or {}
    whole = parameters.get("full_attention") or {
        "rope_theta": config.get("rope_theta", 1_000_000.0),
        **(config.get("rope_scaling") or {}),
    }
    local = parameters.get("sliding_attention") or {"rope_theta": config.get("rope_local_base_freq", 10_000.0)}
    require(local, rope_type=("default", None))
    pattern, layers = config.get("sliding_window_pattern") or 6, range(config["num_hidden_layers"])
    kinds = ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in layers]
    found = plain_settings({"layer_types": kinds, "tie_word_embeddings": True, **config, "rope_parameters": whole})
    windows = {"window_rotary_base": float(local["rope_theta"])} if "window_size" in found else {}
    width, scalar = found["kv_channels"], config.get("query_pre_attn_scalar", 256)
    return {
        **found,
        **windows,
        "activation_func": "fast_gelu",
        "layernorm_zero_centered_gamma": True,
        "sandwich_layernorm": True,
        "qk_layernorm": True,
        "embedding_scale": math.sqrt(config["hidden_size"]),
        **({} if scalar == width else {"softmax_scale": scalar**-0.5}),
    }


def config(settings: Architecture) -> dict[str, Any]:
    """Return the ``config.json`` of our settings, which may say less than they do."""
    plain, scale = llama_config(settings), settings.get("softmax_scale")
    theta = settings.get("window_rotary_base") or settings["rotary_base"]
    for name in ("hidden_act", "rope_theta", "rope_scaling"):
        del plain[name]
    return {
        **plain,
        **window_config(settings),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": settings["kv_channels"] if scale is None else round(scale**-2),
        "rope_parameters": {
            "full_attention": plain["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
    }
