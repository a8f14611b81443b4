"""Floating-point operations against hand-computed numbers."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
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


def test_output_gates_are_counted_and_windows_are_not() -> None:
    """As in Megatron-LM."""
    plain: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    counts = [
        flops_per_sample(TransformerConfig(**{**plain, **fields}), seq_length=10, vocab_size=100)
        for fields in ({}, {"window_size": (2, 0)}, {"attention_output_gate": True})
    ]
    assert counts[1] == counts[0] and counts[2] - counts[0] == 6 * 10 * 2 * 8 * 8


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


def test_latent_attention_by_hand() -> None:
    shape: dict[str, Any] = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 20}
    latent: dict[str, Any] = {"kv_lora_rank": 3, "qk_head_dim": 5, "qk_pos_emb_head_dim": 2, "v_head_dim": 4}
    # keys and values: 8 * 3 down with 8 * 2 for the shared keys, 3 * 2 * (5 + 4) up; projection 2 * 4 * 8; mlp 2 * 8 * 20
    others = 24 + 16 + 54 + 64 + 320 + 8 * 10
    # scores 2 * s * s * 7, values 2 * s * s * 4 for each of two heads, half of it masked; backward twice that
    scores = 3 * 2 * 2 * 6 * 6 * (7 + 4) // 2
    for rank, queries in ((None, 8 * 2 * 7), (6, 8 * 6 + 6 * 2 * 7)):
        config = MLATransformerConfig(**shape, **latent, q_lora_rank=rank)
        assert flops_per_sample(config, seq_length=6, vocab_size=10) == 6 * (others + queries) * 6 + scores


def test_the_flops_of_deepseek_v3_are_megatron_lms() -> None:
    """Megatron-LM also counts the multiplications by the weights of norms: one for each channel of the latent vectors."""
    config = MLATransformerConfig(num_layers=1, hidden_size=7168, num_attention_heads=128, q_lora_rank=1536)
    heads, length = 128, 4096
    queries = 1536 * (7168 + heads * (128 + 64) + 1)
    keys_values = 512 * (7168 + heads * (128 + 128) + 1) + 7168 * 64
    theirs = 6 * length * (queries + keys_values + heads * 128 * 7168)
    theirs += 6 * length * length * (heads * (128 + 64) // 2 + heads * 128 // 2)
    mlp_and_output = 6 * length * (2 * 7168 * 4 * 7168 + 7168 * 100)
    ours = flops_per_sample(config, seq_length=length, vocab_size=100) - mlp_and_output
    assert theirs - ours == 6 * length * (1536 + 512)
