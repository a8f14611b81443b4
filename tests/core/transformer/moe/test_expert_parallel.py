"""A GPT whose experts are divided over ranks has the losses and gradients of one on one rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.launch import run_ranks
from tests.support.tiny_moe import Reference, reference, sharded_step

TP, CP = "tensor_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"

DEGREES: dict[str, dict[str, int]] = {
    "ep2": {EP: 2},
    "tp2": {TP: 2},
    "tp2_ep2": {TP: 2, EP: 2, ETP: 1},
    "cp2": {CP: 2},
    "cp2_ep2": {CP: 2, EP: 2},
    "ep4": {EP: 4},
    "tp2_ep2_etp2": {TP: 2, EP: 2, ETP: 2},
    "tp2_cp2_ep2": {TP: 2, CP: 2, EP: 2, ETP: 1},
}

MODELS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "gate_and_gelu": {"gated_linear_unit": False, "activation_func": "gelu", "moe_shared_expert_gate": True},
    "one_dense_layer": {"moe_layer_freq": [0, 1], "moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "by_sequence": {"moe_grouped_gemm": True, "moe_router_load_balancing_type": "seq_aux_loss"},
    # Capacity is counted on each rank alone: the same only where ranks have whole sequences.
    "dropped": {"moe_expert_capacity_factor": 0.75},
    "padded": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "latent": {"moe_latent_size": 8},
    "biases": {
        "add_bias_linear": True,
        "moe_shared_expert_intermediate_size": None,
        "gated_linear_unit": False,
        "activation_func": "gelu",
    },
    # Room for all rows, so nothing is dropped.
    "bounded": {"moe_expert_rank_capacity_factor": 8.0, "moe_grouped_gemm": True},
}

CELLS: dict[int, dict[str, tuple[str, ...]]] = {
    2: {
        "ep2": tuple(MODELS),
        "tp2": ("dropless", "biases"),
        "tp2_ep2": ("dropless", "by_sequence", "gate_and_gelu", "bounded", "latent"),
        "cp2": ("by_sequence",),
        "cp2_ep2": ("dropless",),
    },
    4: {
        "ep4": ("dropless", "padded"),
        "tp2_ep2_etp2": ("dropless", "recomputed", "bounded", "biases"),
        "tp2_cp2_ep2": ("by_sequence",),
    },
}
"""Ranks, layouts and models: each model divided, each layout with one model at least."""

_REFERENCES = dict[tuple[int, str], Reference]


def _steps(world_size: int, references: _REFERENCES) -> dict[str, tuple[float, float]]:
    """Relative difference of the loss, and the largest of a gradient, of each cell."""
    results = {}
    for layout, models in CELLS[world_size].items():
        degrees = DEGREES[layout]
        for model in models:
            expected = references[_num_data_ranks(world_size, degrees), model]
            results[f"{layout} {model}"] = sharded_step(degrees, MODELS[model], expected)
    return results


def _num_data_ranks(world_size: int, degrees: dict[str, int]) -> int:
    return world_size // (degrees.get(TP, 1) * degrees.get(CP, 1))


@pytest.mark.parametrize("world_size", CELLS)
def test_losses_and_gradients_are_those_of_one_rank(world_size: int) -> None:
    """fp32: experts add up their rows in another order, and tensor-parallel ranks their summands."""
    references: dict[tuple[int, str], Reference] = {}
    for layout, models in CELLS[world_size].items():
        size = _num_data_ranks(world_size, DEGREES[layout])
        references |= {(size, model): reference(size, **MODELS[model]) for model in models}
    for results in run_ranks(world_size, _steps, world_size, references):
        for cell, (loss, gradient) in results.items():
            assert loss < 1e-5 and gradient < 1e-5, (cell, loss, gradient)
