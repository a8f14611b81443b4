"""Each rank gets its groups, each set of ranks has one group for one purpose, and nothing is kept in globals."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch.distributed as dist

from megatron.core.parallel_state import initialize_model_parallel
from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import GROUP_NAMES, RankGrid
from tests.support.launch import run_ranks


def _ranks_of(groups: ProcessGroupCollection) -> dict[str, list[int]]:
    found = {field.name: getattr(groups, field.name) for field in fields(groups)}
    return {name: dist.get_process_group_ranks(group) for name, group in found.items() if group is not None}


def _all_layouts() -> list[dict[str, list[int]]]:
    found = []
    for degrees in LAYOUTS:
        groups = build_process_groups(RankGrid(world_size=4, **degrees), create_all_gather_group=True)
        found.append(_ranks_of(groups))
        _check_identities(groups)
    dist.barrier()  # a rank that ends would cut off another that still connects
    return found


def _check_identities(groups: ProcessGroupCollection) -> None:
    """Process groups of the model and of the engine never share a communicator."""
    engine = [groups.dp, groups.dp_cp, groups.expt_dp, groups.intra_dp_cp, groups.inter_dist_opt, groups.embd]
    model = [groups.tp, groups.cp, groups.ep, groups.pp, groups.expt_tp, groups.tp_ep, groups.tp_cp, groups.mp]
    model += [groups.tp_dp_cp]
    gathers = [groups.dp_cp_ag, groups.expt_dp_ag]
    for some, others in ((engine, model), (engine, gathers), (model, gathers)):
        assert not {id(g) for g in some if g is not None} & {id(g) for g in others if g is not None}
    for purpose in (engine, model):
        by_ranks: dict[tuple[int, ...], Any] = {}
        for group in purpose:
            if group is not None:
                ranks = tuple(dist.get_process_group_ranks(group))
                assert by_ranks.setdefault(ranks, group) is group, f"one group for {ranks}"


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor_model_parallel_size": 4},
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    {"context_parallel_size": 2, "num_distributed_optimizer_instances": 2},
    {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
]


def test_each_rank_has_the_groups_of_the_grid() -> None:
    by_rank = run_ranks(4, _all_layouts)
    for number, degrees in enumerate(LAYOUTS):
        grid = RankGrid(world_size=4, **degrees)
        hybrid = grid.num_distributed_optimizer_instances > 1
        for rank, found in enumerate(layouts[number] for layouts in by_rank):
            for name in GROUP_NAMES:
                used = grid.size(name) > 1 or name in ("dp", "dp_cp", "expt_dp")
                used = used if not name.startswith(("intra", "inter")) else hybrid
                if name == "tp_dp_cp":
                    used = "pipeline_model_parallel_size" in degrees
                assert found.get(name) == (grid.ranks(name, rank) if used else None), (degrees, name)
            sharding = found["intra_dp_cp"] if hybrid else found["dp_cp"]
            expert_sharding = found["intra_expt_dp"] if hybrid else found["expt_dp"]
            some_gather = len(sharding) > 1 or len(expert_sharding) > 1
            assert found.get("dp_cp_ag") == (sharding if some_gather else None)
            assert found.get("expt_dp_ag") == (expert_sharding if some_gather else None)


def _megatrons_door() -> tuple[dict[str, list[int]], str]:
    groups = initialize_model_parallel(2, 1, num_distributed_optimizer_instances=1, distributed_timeout_minutes=1)
    with pytest.raises(ValueError, match="the grid must have all 2 ranks, got one of 4") as caught:
        build_process_groups(RankGrid(world_size=4))
    dist.barrier()  # a rank that ends would cut off another that still connects
    return _ranks_of(groups), str(caught.value)


def test_the_door_of_megatron_returns_a_collection() -> None:
    for rank, (found, _) in enumerate(run_ranks(2, _megatrons_door)):
        assert found == {
            "tp": [0, 1],
            "expt_tp": [0, 1],
            "mp": [0, 1],
            "tp_cp": [0, 1],
            "tp_ep": [0, 1],
            "dp": [rank],
            "dp_cp": [rank],
            "expt_dp": [rank],
        }


def test_groups_need_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="must be initialised before process groups"):
        initialize_model_parallel()
