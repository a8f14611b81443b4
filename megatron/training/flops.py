"""Floating-point operations of a training step, by one convention."""

from __future__ import annotations

from typing import Protocol

FLOP_CONVENTION = (
    "TFLOP/s count the model's matrix multiplications: 6 per weight and token (2 in forward, 4 in backward; with the "
    "output layer, without the embedding lookup) and the causal half of attention scores; recomputation is not counted"
)


class TransformerShape(Protocol):
    """What is known of a model, as far as it is counted."""

    @property
    def num_layers(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_attention_heads(self) -> int: ...

    @property
    def num_query_groups(self) -> int | None: ...

    @property
    def kv_channels(self) -> int | None: ...

    @property
    def ffn_hidden_size(self) -> int | None: ...

    @property
    def gated_linear_unit(self) -> bool: ...


def flops_per_sample(shape: TransformerShape, *, seq_length: int, vocab_size: int) -> int:
    """Floating-point operations of forward and backward on one sample; see ``FLOP_CONVENTION``.

    Args:
        shape: all sizes set (a TransformerConfig sets them).
        vocab_size: the padded one: the output layer computes all of it.

    Source: Megatron-LM counts the same (its num_floating_point_operations halves attention for causal masks).
    """
    assert shape.kv_channels and shape.num_query_groups and shape.ffn_hidden_size
    hidden, query = shape.hidden_size, shape.num_attention_heads * shape.kv_channels
    attention_weights = hidden * (query + 2 * shape.num_query_groups * shape.kv_channels) + query * hidden
    mlp_weights = (3 if shape.gated_linear_unit else 2) * hidden * shape.ffn_hidden_size
    weights = shape.num_layers * (attention_weights + mlp_weights) + hidden * vocab_size
    # scores and their product with values: 2 matrices of [s, s] per head, half of them masked, 3 x 2 operations each
    scores = shape.num_layers * 6 * seq_length * seq_length * query
    return 6 * weights * seq_length + scores
