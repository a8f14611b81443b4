"""Floating-point operations against hand-computed numbers."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.telemetry.flops import flops_per_sample


def test_plain_layer_by_hand() -> None:
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    # weights of a layer: qkv 8 * 24, projection 8 * 8, mlp 2 * 8 * 32; output layer 8 * 100
    weights = 2 * (192 + 64 + 512) + 800
    # scores and values, forward: 2 * 2 * s * s * 8 per layer, half of it masked; backward twice that
    scores = 2 * 3 * (2 * 2 * 10 * 10 * 8) // 2
    assert flops_per_sample(config, seq_length=10, vocab_size=100) == 6 * weights * 10 + scores


def test_grouped_gated_layer_by_hand() -> None:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=4,
        ffn_hidden_size=20,
        gated_linear_unit=True,
    )
    # query 8 * 16, key and value 2 * 8 * 8, projection 16 * 8, mlp 3 * 8 * 20
    weights = 128 + 128 + 128 + 480 + 8 * 10
    assert flops_per_sample(config, seq_length=6, vocab_size=10) == 6 * weights * 6 + 6 * 6 * 6 * 16


def test_layers_with_experts_by_hand() -> None:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        ffn_hidden_size=20,
        add_bias_linear=False,
        num_moe_experts=4,
        moe_layer_freq=[0, 1],
        moe_router_topk=3,
        moe_ffn_hidden_size=5,
        moe_shared_expert_intermediate_size=7,
    )
    # attention 8 * 24 + 8 * 8 in both; dense 2 * 8 * 20; router 8 * 4, 3 experts and the shared one 2 * 8 * (3 * 5 + 7)
    weights = 2 * 256 + 320 + 32 + 352 + 8 * 10
    assert flops_per_sample(config, seq_length=6, vocab_size=10) == 6 * weights * 6 + 2 * 6 * 6 * 6 * 8
