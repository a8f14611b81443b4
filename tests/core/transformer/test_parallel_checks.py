"""Degrees that do not divide what they split, and settings of experts without experts: each row is a test."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from megatron.core.transformer.parallel_checks import PARALLEL_CONTRADICTIONS
from megatron.core.transformer.transformer_config import TransformerConfig

BASE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERTS: dict[str, Any] = {"num_moe_experts": 4}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tensor_model_parallel_size": 0}, "tensor_model_parallel_size must be at least 1, got 0"),
    ({"pipeline_model_parallel_size": 0}, "pipeline_model_parallel_size must be at least 1, got 0"),
    ({**EXPERTS, "expert_model_parallel_size": 0}, "expert_model_parallel_size must be at least 1, got 0"),
    ({**EXPERTS, "expert_tensor_parallel_size": 0}, "expert_tensor_parallel_size must be at least 1, got 0"),
    ({"tensor_model_parallel_size": 8}, "num_attention_heads must be a multiple of .*, got 4 and 8"),
    ({**TP2, "num_query_groups": 1}, "num_query_groups must be a multiple of .*, got 1 and 2; key and value heads"),
    ({**TP2, "ffn_hidden_size": 33}, "ffn_hidden_size, .* must be a multiple of .*, got 33 and 2"),
    (
        {**TP2, "cp_comm_type": "a2a", "context_parallel_size": 4},
        r"cp_comm_type='a2a' must go with num_query_groups, .*, got 4 and 2 \* 4",
    ),
    ({"expert_model_parallel_size": 2}, "expert_model_parallel_size must be 1 without num_moe_experts, got 2"),
    ({**EXPERTS, "expert_model_parallel_size": 3}, "num_moe_experts must be a multiple of .*, got 4 and 3"),
    (
        {**EXPERTS, **TP2, "moe_ffn_hidden_size": 7},
        "moe_ffn_hidden_size, .* must be a multiple of .*, got 7 and 2",
    ),
    (
        {**EXPERTS, **TP2, "moe_shared_expert_intermediate_size": 7},
        "moe_shared_expert_intermediate_size must be a multiple of .*, got 7 and 2",
    ),
    (
        {**EXPERTS, "tensor_model_parallel_size": 2},
        "sequence_parallel must be on with experts and .*, got it off with 2",
    ),
    ({**EXPERTS, "moe_layer_freq": [0, 1, 2, 1]}, r"moe_layer_freq must be a number, or .*, got \[0, 1, 2, 1\]"),
]


@pytest.mark.parametrize("row", range(len(REFUSED)), ids=[re.sub(r"\W+", "-", message) for _, message in REFUSED])
def test_each_contradiction_is_refused(row: int) -> None:
    """By its own row of the table, not by another that happens to match."""
    fields, message = REFUSED[row]
    with pytest.raises(ValueError, match=rf"TransformerConfig\.{message}"):
        TransformerConfig(**{**BASE, **fields})
    probe = dataclasses.make_dataclass("Probe", [])()
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    vars(probe).update({**defaults, **BASE, **fields})
    assert PARALLEL_CONTRADICTIONS[row][0](probe)


def test_every_row_of_the_table_has_a_test() -> None:
    assert len(REFUSED) == len(PARALLEL_CONTRADICTIONS)


@pytest.mark.parametrize(
    "fields",
    [
        {"context_parallel_size": 2, "cp_comm_type": "all_gather", "pipeline_model_parallel_size": 4},
        {**TP2, "num_query_groups": 2},
        {**EXPERTS, **TP2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1, "moe_ffn_hidden_size": 7},
        {**EXPERTS, **TP2, "moe_layer_freq": [1, 1, 1, 1], "ffn_hidden_size": 33, "moe_ffn_hidden_size": 8},
        {**EXPERTS, "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_layer_freq": 2},
        {"expert_tensor_parallel_size": 1},
    ],
    ids=str,
)
def test_what_fits_is_accepted(fields: dict[str, Any]) -> None:
    TransformerConfig(**{**BASE, **fields})
