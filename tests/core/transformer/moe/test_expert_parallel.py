"""A GPT whose experts are divided over ranks has the losses and gradients of one on one rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.transformer.moe.tiny_moe import reference, sharded_step
from tests.support.launch import run_ranks

TP, CP = "tensor_model_parallel_size", "context_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"

DEGREES: dict[int, dict[str, dict[str, int]]] = {
    2: {
        "ep2": {EP: 2},
        "tp2": {TP: 2},
        "tp2_ep2": {TP: 2, EP: 2, ETP: 1},
        "cp2": {CP: 2},
        "cp2_ep2": {CP: 2, EP: 2},
    },
    4: {
        "ep4": {EP: 4},
        "ep2_dp2": {EP: 2},
        "tp2_ep2_etp2": {TP: 2, EP: 2, ETP: 2},
        "tp2_cp2_ep2": {TP: 2, CP: 2, EP: 2, ETP: 1},
    },
}

MODELS: dict[str, dict[str, Any]] = {
    "dropless": {},
    "gate_and_bias_free_gelu": {"gated_linear_unit": False, "activation_func": "gelu", "moe_shared_expert_gate": True},
    "one_dense_layer": {"moe_layer_freq": [0, 1], "moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "by_sequence": {"moe_grouped_gemm": True, "moe_router_load_balancing_type": "seq_aux_loss"},
}
# Capacity is counted on each rank alone: the same only where ranks have whole sequences.
CAPACITIES: dict[str, dict[str, Any]] = {
    "dropped": {"moe_expert_capacity_factor": 0.75},
    "padded": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
}


def _steps(world_size: int) -> dict[str, tuple[float, float, int]]:
    """Loss, largest difference of a gradient, and data-parallel rank, of each layout and model."""
    results = {}
    for layout, degrees in DEGREES[world_size].items():
        whole_sequences = TP not in degrees and CP not in degrees
        models = MODELS if world_size == 2 else {name: MODELS[name] for name in ("dropless", "recomputed")}
        for name, fields in (models | (CAPACITIES if whole_sequences else {})).items():
            loss, differences, data_rank = sharded_step(degrees, fields)
            results[f"{layout} {name}"] = (loss, max(differences.values()), data_rank)
    return results


@pytest.mark.parametrize("world_size", DEGREES)
def test_losses_and_gradients_are_those_of_one_rank(world_size: int) -> None:
    """fp32: experts add up their rows in another order, and tensor-parallel ranks their summands."""
    expected = {name: reference(world_size, **fields)[0] for name, fields in (MODELS | CAPACITIES).items()}
    for results in run_ranks(world_size, _steps, world_size):
        for cell, (loss, difference, data_rank) in results.items():
            assert loss == pytest.approx(expected[cell.split()[1]][data_rank], rel=1e-5), cell
            assert difference < 1e-5, cell
