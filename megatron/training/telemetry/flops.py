"""Number of floating-point operations of a training step."""

from __future__ import annotations

from megatron.core.transformer.attention_patterns import is_linear
from megatron.core.transformer.hybrid_layers import (
    ATTENTION,
    EXPERTS,
    KERNEL,
    LAYER_KINDS,
    MAMBA,
    MLP,
    kind_of_layer,
    num_mamba_heads,
)
from megatron.core.transformer.moe.moe_layer import has_experts
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

FLOP_CONVENTION = (
    "TFLOP/s count the model's matrix multiplications: 6 per weight and token (2 in forward, 4 in backward; with the "
    "output layer and the experts of a token, without the embedding lookup) and the causal half of attention "
    "scores, also where a layer attends within a window; of linear attention and Mamba the convolution, and four and two products with the state "
    "of each head; recomputation is not counted"
)


def flops_per_sample(config: TransformerConfig, *, seq_length: int, vocab_size: int) -> int:
    """Count the floating-point operations of forward and backward on one sample; see ``FLOP_CONVENTION``.

    Args:
        vocab_size: the padded size, since the output layer computes all of it.

    Source: Megatron-LM counts the same (its num_floating_point_operations halves attention for causal masks).
    """
    if config.hybrid_layer_pattern is not None:
        return _of_hybrid(config, seq_length, vocab_size)
    attention_weights, widths = _attention(config)
    further = (
        config.mtp_num_layers or 0
    )  # layers of multi-token prediction are as the last one, with a projection before
    layers = [*range(1, config.num_layers + 1), *[config.num_layers] * further]
    mlp_weights = sum(_expert_weights(config) if has_experts(config, n) else _dense_weights(config) for n in layers)
    linear = sum(is_linear(config, number) for number in layers)
    weights = (len(layers) - linear) * attention_weights + linear * _linear_attention(config) + mlp_weights
    weights += (1 + further) * config.hidden_size * vocab_size + further * 2 * config.hidden_size**2
    # scores and their product with values: 2 matrices of [s, s] per head, half of them masked, 3 x 2 operations each
    scores = (len(layers) - linear) * 3 * seq_length * seq_length * widths
    return 6 * weights * seq_length + scores


def _attention(config: TransformerConfig) -> tuple[int, int]:
    """Count the weights of an attention, and the widths of all heads' queries and values together."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if isinstance(config, MLATransformerConfig):
        query, value = config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
        rank = config.q_lora_rank
        queries = hidden * heads * query if rank is None else rank * (hidden + heads * query)
        latent = config.kv_lora_rank * (hidden + heads * (config.qk_head_dim + value))
        return queries + latent + hidden * config.qk_pos_emb_head_dim + heads * value * hidden, heads * (query + value)
    assert config.kv_channels and config.num_query_groups
    query = heads * config.kv_channels
    gate = query if config.attention_output_gate else 0
    return hidden * (query + gate + 2 * config.num_query_groups * config.kv_channels) + query * hidden, 2 * query


def _of_hybrid(config: TransformerConfig, seq_length: int, vocab_size: int) -> int:
    """Count those of a hybrid model, whose layers have attention, an MLP, experts or Mamba alone."""
    attention, widths = _attention(config)
    weights, number = config.hidden_size * vocab_size, dict.fromkeys(LAYER_KINDS, 0)
    for layer in range(1, config.num_layers + 1):
        number[kind_of_layer(config, layer) or ""] += 1
    weights += number[ATTENTION] * attention + number[MAMBA] * _mamba(config) + number[MLP] * _dense_weights(config)
    weights += number[EXPERTS] * _expert_weights(config) if number[EXPERTS] else 0
    return 6 * weights * seq_length + number[ATTENTION] * 3 * seq_length * seq_length * widths


def _mamba(config: TransformerConfig) -> int:
    """Count the multiplications of a token in a Mamba layer: projections, convolution, writing to and reading from states."""
    heads, groups, state = num_mamba_heads(config), config.mamba_num_groups, config.mamba_state_dim
    channels = heads * config.mamba_head_dim
    projections = config.hidden_size * (3 * channels + 2 * groups * state + heads)
    return projections + KERNEL * (channels + 2 * groups * state) + 2 * channels * state


def _linear_attention(config: TransformerConfig) -> int:
    """Count the multiplications of a token in a layer of gated delta net, as Megatron-LM does."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    projections = config.hidden_size * (2 * keys + 3 * values + 2 * config.linear_num_value_heads)
    return projections + config.linear_conv_kernel_dim * (2 * keys + values) + 4 * values * config.linear_key_head_dim


def _mlp_weights(config: TransformerConfig, width: int) -> int:
    return (3 if config.gated_linear_unit else 2) * config.hidden_size * width


def _dense_weights(config: TransformerConfig) -> int:
    assert config.ffn_hidden_size
    return _mlp_weights(config, config.ffn_hidden_size)


def _expert_weights(config: TransformerConfig) -> int:
    """Count the weights that a token uses in a layer with experts: its experts, the shared expert, the router."""
    width = config.moe_ffn_hidden_size or config.ffn_hidden_size
    assert width and config.num_moe_experts
    router = config.hidden_size * config.num_moe_experts
    shared = _mlp_weights(config, config.moe_shared_expert_intermediate_size or 0)
    routed = _mlp_weights(config, config.moe_router_topk * width)
    if config.moe_latent_size is not None:
        routed = routed * config.moe_latent_size // config.hidden_size + 2 * config.hidden_size * config.moe_latent_size
    return router + shared + routed
