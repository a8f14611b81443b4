"""The command line of a model, from its settings."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.formats.architecture import Architecture, layers_with_experts

_NUMBERS = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "ffn_hidden_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "kv_channels": "--kv-channels",
    "normalization": "--normalization",
    "layernorm_epsilon": "--norm-epsilon",
    "max_position_embeddings": "--max-position-embeddings",
    "position_embedding_type": "--position-embedding-type",
    "padded_vocab_size": "--padded-vocab-size",
}
_OF_ROPE = {
    "rotary_base": "--rotary-base",
    "rotary_percent": "--rotary-percent",
    "rotary_seq_len_interpolation_factor": "--rotary-seq-len-interpolation-factor",
}
_OF_EXPERTS = {
    "num_moe_experts": "--num-experts",
    "moe_ffn_hidden_size": "--moe-ffn-hidden-size",
    "moe_latent_size": "--moe-latent-size",
    "moe_shared_expert_intermediate_size": "--moe-shared-expert-intermediate-size",
    "moe_router_topk": "--moe-router-topk",
    "moe_router_score_function": "--moe-router-score-function",
    "moe_router_topk_scaling_factor": "--moe-router-topk-scaling-factor",
    "moe_router_num_groups": "--moe-router-num-groups",
    "moe_router_group_topk": "--moe-router-group-topk",
}
_OF_LATENT_ATTENTION = {
    "q_lora_rank": "--q-lora-rank",
    "kv_lora_rank": "--kv-lora-rank",
    "qk_head_dim": "--qk-head-dim",
    "qk_pos_emb_head_dim": "--qk-pos-emb-head-dim",
    "v_head_dim": "--v-head-dim",
    "rope_type": "--rope-type",
    "rotary_base": "--rotary-base",
    "rotary_percent": "--rotary-percent",
    "rotary_scaling_factor": "--rotary-scaling-factor",
    "mscale_all_dim": "--mscale-all-dim",
}
_OF_YARN = {
    "mscale": "--mscale",
    "original_max_position_embeddings": "--original-max-position-embeddings",
    "beta_fast": "--beta-fast",
    "beta_slow": "--beta-slow",
}
_OF_OTHER_YARN = {
    "rotary_base": "--rotary-base",
    "yarn_rotary_scaling_factor": "--rotary-scaling-factor",
    "yarn_original_max_position_embeddings": "--yarn-original-max-position-embeddings",
    "yarn_beta_fast": "--yarn-beta-fast",
    "yarn_beta_slow": "--yarn-beta-slow",
    "yarn_mscale": "--mscale",
    "yarn_mscale_all_dim": "--mscale-all-dim",
}
_VARIANTS = {
    "window_size": "--window-size",
    "window_attn_skip_freq": "--window-attn-skip-freq",
    "softmax_type": "--softmax-type",
    "no_rope_freq": "--no-rope-freq",
    "glu_linear_offset": "--glu-linear-offset",
    "activation_func_clamp_value": "--activation-func-clamp-value",
    "window_rotary_base": "--window-rotary-base",
    "embedding_scale": "--embedding-scale",
    "mtp_num_layers": "--mtp-num-layers",
    "softmax_scale": "--softmax-scale",
}
_OF_LINEAR_ATTENTION = {
    "experimental_attention_variant": "--experimental-attention-variant",
    "linear_attention_freq": "--linear-attention-freq",
    "linear_conv_kernel_dim": "--linear-conv-kernel-dim",
    "linear_key_head_dim": "--linear-key-head-dim",
    "linear_value_head_dim": "--linear-value-head-dim",
    "linear_num_key_heads": "--linear-num-key-heads",
    "linear_num_value_heads": "--linear-num-value-heads",
}
_ACTIVATIONS = {"quick_gelu": "--quick-geglu", "fast_gelu": "--geglu"}
_SWITCHES = {
    "mtp_use_repeated_layer": "--mtp-use-repeated-layer",
    "sandwich_layernorm": "--sandwich-layernorm",
    "qk_l2_norm": "--qk-l2-norm",
    "attention_output_gate": "--attention-output-gate",
    "multi_latent_attention": "--multi-latent-attention",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "add_qkv_bias": "--add-qkv-bias",
    "qk_layernorm": "--qk-layernorm",
    "rotary_interleaved": "--rotary-interleaved",
    "moe_shared_expert_gate": "--moe-shared-expert-gate",
    "moe_router_pre_softmax": "--moe-router-pre-softmax",
    "moe_apply_probs_on_input": "--moe-apply-probs-on-input",
    "moe_router_enable_expert_bias": "--moe-router-enable-expert-bias",
}


def flags_of(architecture: Architecture) -> list[str]:
    """Return the flags of a model with these settings, as words of a command line."""
    return [str(word) for word in _words(architecture)]


def _words(settings: Architecture) -> Iterator[object]:
    values = _NUMBERS | _VARIANTS | _OF_LINEAR_ATTENTION
    if settings.get("multi_latent_attention"):
        values |= _OF_LATENT_ATTENTION | (_OF_YARN if settings["rope_type"] == "yarn" else {})
        del values["kv_channels"]
    elif settings["position_embedding_type"] == "rope":
        values |= _OF_ROPE
    elif settings["position_embedding_type"] == "yarn":
        values |= _OF_OTHER_YARN
        rounds = settings["yarn_correction_range_round_to_int"]
        yield f"--{'' if rounds else 'no-'}yarn-correction-range-round-to-int"
    if settings.get("num_moe_experts") is not None:
        values |= _OF_EXPERTS
        yield from ("--moe-layer-freq", f"[{','.join(map(str, layers_with_experts(settings)))}]")
    for name, flag in values.items():
        if settings.get(name) is not None:
            yield from (flag, _value(name, settings[name]))
    for name, flag in _SWITCHES.items():
        if settings.get(name):
            yield flag
    if settings["num_query_groups"] != settings["num_attention_heads"]:
        yield from ("--group-query-attention", "--num-query-groups", settings["num_query_groups"])
    if settings["activation_func"] in _ACTIVATIONS:
        yield _ACTIVATIONS[settings["activation_func"]]
    elif settings["gated_linear_unit"]:
        yield "--swiglu"
    elif settings["activation_func"] == "squared_relu":
        yield "--squared-relu"
    if not settings["add_bias_linear"]:
        yield "--disable-bias-linear"
    if not settings["share_embeddings_and_output_weights"]:
        yield "--untie-embeddings-and-output-weights"
    if settings["rope_scaling"]:
        yield from ("--use-rope-scaling", "--rope-scaling-factor", settings["rope_scaling_factor"])


def _value(name: str, value: object) -> object:
    """Return a value as a word of a command line."""
    if not isinstance(value, list):
        return value
    numbers = ",".join(map(str, value))
    return numbers if name == "window_size" else f"[{numbers}]"
