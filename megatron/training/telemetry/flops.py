"""Number of floating-point operations of a training step."""

from __future__ import annotations

from megatron.core.transformer.moe.moe_layer import has_experts
from megatron.core.transformer.transformer_config import TransformerConfig

FLOP_CONVENTION = (
    "TFLOP/s count the model's matrix multiplications: 6 per weight and token (2 in forward, 4 in backward; with the "
    "output layer and the experts of a token, without the embedding lookup) and the causal half of attention "
    "scores, also where a layer attends within a window; recomputation is not counted"
)


def flops_per_sample(config: TransformerConfig, *, seq_length: int, vocab_size: int) -> int:
    """Count the floating-point operations of forward and backward on one sample; see ``FLOP_CONVENTION``.

    Args:
        vocab_size: the padded size, since the output layer computes all of it.

    Source: Megatron-LM counts the same (its num_floating_point_operations halves attention for causal masks).
    """
    assert config.kv_channels and config.num_query_groups
    hidden, query = config.hidden_size, config.num_attention_heads * config.kv_channels
    gate = query if config.attention_output_gate else 0
    attention_weights = hidden * (query + gate + 2 * config.num_query_groups * config.kv_channels) + query * hidden
    layers = range(1, config.num_layers + 1)
    mlp_weights = sum(_expert_weights(config) if has_experts(config, n) else _dense_weights(config) for n in layers)
    weights = config.num_layers * attention_weights + mlp_weights + hidden * vocab_size
    # scores and their product with values: 2 matrices of [s, s] per head, half of them masked, 3 x 2 operations each
    scores = config.num_layers * 6 * seq_length * seq_length * query
    return 6 * weights * seq_length + scores


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
    widths = config.moe_router_topk * width + (config.moe_shared_expert_intermediate_size or 0)
    return router + _mlp_weights(config, widths)
