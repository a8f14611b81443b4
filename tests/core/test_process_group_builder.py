"""Each rank gets its groups, each set of ranks has one group for one purpose, and nothing is kept in globals."""

from __future__ import annotations

import os
import tracemalloc
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import own_process_group
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
    _check_making()
    dist.barrier()  # a rank that ends would cut off another that still connects
    return found


class _Communicator:
    """Stands for NCCL's of all ranks, from which groups are split."""

    def __init__(self) -> None:
        self.splits_without_a_group = 0

    def perform_nocolor_split(self, device: object) -> None:
        self.splits_without_a_group += 1


def _check_making() -> None:
    """Groups meet under their own names with a barrier asked for, when they are split, and when their hashes are the same."""
    stages, halves = RankGrid(world_size=4, pipeline_model_parallel_size=4), RankGrid(world_size=4, **LAYOUTS[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_DIST_INIT_BARRIER", "1")
        _assert_meets(halves)
        assert os.environ["TORCH_DIST_INIT_BARRIER"] == "1"
    communicator = _Communicator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_process_group, "_split_source", lambda: communicator)
        _assert_meets(stages)  # two of its ranks have no embedding
        assert communicator.splits_without_a_group == (dist.get_rank() in (1, 2))
        patch.setattr(distributed_c10d, "_process_group_color", lambda ranks: 7)
        _assert_meets(halves)
    dist.new_group([0, 1])  # for which torch's count of groups must be the same everywhere
    counts: list[Any] = [None] * 4
    dist.all_gather_object(counts, distributed_c10d._world.group_count)
    assert len(set(counts)) == 1


def _assert_meets(grid: RankGrid) -> None:
    groups = build_process_groups(grid, create_all_gather_group=True)
    for name, ranks in _ranks_of(groups).items():
        total = torch.tensor([dist.get_rank()])
        dist.all_reduce(total, group=getattr(groups, name))
        assert total.item() == sum(ranks), name
    _check_identities(groups)


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


def _made(world_size: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return how many groups the last rank makes or looks at, and the most bytes that this takes of the host."""
    grid = RankGrid(
        world_size=world_size,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        num_distributed_optimizer_instances=2,
    )
    calls: list[object] = []
    make = distributed_c10d._new_process_group_helper
    monkeypatch.setattr(
        distributed_c10d,
        "_new_process_group_helper",
        lambda *args, **named: (calls.append(args), make(*args, **named))[1],
    )
    dist.init_process_group("fake", rank=world_size - 1, world_size=world_size, store=FakeStore())
    tracemalloc.start()
    try:
        build_process_groups(grid, create_all_gather_group=True)
        return len(calls), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        dist.destroy_process_group()


def test_a_rank_of_many_makes_as_many_groups_as_one_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own, not all of 16,384 ranks: those were 30,000, and NCCL would have split a communicator of all ranks for each."""
    few, many = (_made(world_size, monkeypatch)[0] for world_size in (64, 16_384))
    assert few == many < 16
    assert _made(16_384, monkeypatch)[1] < 4 * 2**20, "some numbers for each rank, not some for each rank and group"
