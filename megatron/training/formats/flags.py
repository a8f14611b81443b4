"""The command line of a model, from its settings."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.formats.architecture import Architecture, layers_with_experts

_FLAGS = {
    "layernorm_epsilon": "--norm-epsilon",
    "num_moe_experts": "--num-experts",
    "yarn_rotary_scaling_factor": "--rotary-scaling-factor",
    "yarn_mscale": "--mscale",
    "yarn_mscale_all_dim": "--mscale-all-dim",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
}
"""Flags of settings that have another name."""


def _flags(names: str) -> dict[str, str]:
    return {name: _FLAGS.get(name, f"--{name.replace('_', '-')}") for name in names.split()}


_NUMBERS = _flags(
    "num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels normalization layernorm_epsilon "
    "max_position_embeddings position_embedding_type padded_vocab_size"
)
_OF_ROPE = _flags("rotary_base rotary_percent rotary_seq_len_interpolation_factor")
_OF_EXPERTS = _flags(
    "num_moe_experts moe_ffn_hidden_size moe_latent_size moe_shared_expert_intermediate_size moe_router_topk "
    "moe_router_score_function moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk"
)
_OF_LATENT_ATTENTION = _flags(
    "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent "
    "rotary_scaling_factor mscale_all_dim"
)
_OF_YARN = _flags("mscale original_max_position_embeddings beta_fast beta_slow")
_OF_OTHER_YARN = _flags(
    "rotary_base yarn_rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast "
    "yarn_beta_slow yarn_mscale yarn_mscale_all_dim"
)
_VARIANTS = _flags(
    "window_size window_attn_skip_freq softmax_type no_rope_freq glu_linear_offset activation_func_clamp_value "
    "window_rotary_base embedding_scale mtp_num_layers softmax_scale"
)
_OF_LINEAR_ATTENTION = _flags(
    "experimental_attention_variant linear_attention_freq linear_conv_kernel_dim linear_key_head_dim "
    "linear_value_head_dim linear_num_key_heads linear_num_value_heads"
)
_ACTIVATIONS = {"quick_gelu": "--quick-geglu", "fast_gelu": "--geglu"}
_SWITCHES = _flags(
    "mtp_use_repeated_layer sandwich_layernorm qk_l2_norm attention_output_gate multi_latent_attention "
    "layernorm_zero_centered_gamma add_qkv_bias qk_layernorm rotary_interleaved moe_shared_expert_gate "
    "moe_router_pre_softmax moe_apply_probs_on_input moe_router_enable_expert_bias"
)


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
