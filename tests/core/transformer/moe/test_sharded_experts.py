"""Experts under the sharding engine: gradients are those of one rank, and gathered experts lie at equal distances."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import FullyShardedDataParallel, microbatch
from megatron.core.distributed.fsdp.layout.flat_layout import pack_rows
from megatron.core.module_names import named_parameters
from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.rank_grid import RankGrid
from tests.support.launch import run_ranks
from tests.support.tiny_moe import (
    LENGTH,
    Reference,
    build_moe_gpt,
    difference,
    mean_loss_of_part,
    own_part,
    reference,
)

CELLS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "ep2": ({"expert_model_parallel_size": 2}, {}),
    # One expert of four for each token: on most ranks some have nothing to do.
    "ep4_top1": ({"expert_model_parallel_size": 4}, {"moe_router_topk": 1, "moe_router_score_function": "sigmoid"}),
    "tp2_ep2": ({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}, {}),
}
_PER_TOKEN = ("ep2",)


def _difference(degrees: dict[str, Any], fields: dict[str, Any], expected: Reference, *, per_token: bool) -> float:
    """Return the largest relative difference of a main gradient over two steps; the second follows the plan of the first."""
    groups = build_process_groups(RankGrid(world_size=dist.get_world_size(), **degrees))
    parallel = {**degrees, "sequence_parallel": group_size(groups.tp) > 1, "calculate_per_token_loss": per_token}
    model = build_moe_gpt(groups, **fields, **parallel)
    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
    )
    sharded = FullyShardedDataParallel(model.config, ddp_config, model, pg_collection=groups)
    num_data_ranks, num_tokens = group_size(groups.dp), 2 * LENGTH
    worst = 0.0
    for _ in range(2):
        with microbatch(sharded, is_first=True, is_last=True):
            loss = mean_loss_of_part(sharded, group_rank(groups.dp), groups.cp)
            (loss * num_tokens if per_token else loss).backward()
        sharded.finish_grad_sync()
        if per_token:
            sharded.scale_gradients(1.0 / (num_tokens * num_data_ranks))
        for name, parameter in named_parameters(model):
            theirs = own_part(torch.from_numpy(expected.gradients[name]), parameter, groups)
            ours = _full(parameter.grad)
            ours = ours if ours.shape == theirs.shape else own_part(ours, parameter, groups)
            worst = max(worst, difference(ours, theirs))
        sharded.zero_grad_buffer()
    return worst


def _full(grad: Any) -> torch.Tensor:
    full: torch.Tensor = grad.full_tensor()
    return full


def _all_cells(references: dict[str, Reference]) -> dict[str, float]:
    return {
        name: _difference(degrees, fields, references[name], per_token=name in _PER_TOKEN)
        for name, (degrees, fields) in CELLS.items()
    }


def test_gradients_of_sharded_experts_are_those_of_one_rank() -> None:
    """In fp32, with auxiliary losses; dense gradients are the mean over 4 ranks, experts' over what ep leaves."""
    references = {
        name: reference(4 // degrees.get("tensor_model_parallel_size", 1), **fields)
        for name, (degrees, fields) in CELLS.items()
    }
    for differences in run_ranks(4, _all_cells, references):
        assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize(
    ("hidden", "width", "num_experts"), [(4096, 14336, 8), (7168, 2048, 32), (2048, 768, 16), (6144, 32768, 2)]
)
@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
def test_gathered_experts_lie_at_even_distances(hidden: int, width: int, num_experts: int, num_ranks: int) -> None:
    """So the grouped kernel reads them without a copy. Shapes of Mixtral, DeepSeek-V3, Qwen3 and Grok."""
    shapes = [torch.Size(shape) for _ in range(num_experts) for shape in ((2 * width, hidden), (hidden, width))]
    slots = pack_rows(shapes, num_ranks=num_ranks).slots
    for layer in (0, 1):
        starts = [slot.start for slot in slots[layer::2]]
        distances = {after - before for before, after in pairwise(starts)}
        assert len(distances) == 1
        assert all(start % 8 == 0 for start in (*distances, starts[0]))
