"""Groups that NCCL splits from the communicator of all ranks: each rank takes part once, with its own group or with none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core import own_process_group
from megatron.core.process_group_builder import build_process_groups
from megatron.core.rank_grid import RankGrid
from tests.core.test_process_group_builder import _check_identities, _ranks_of
from tests.support.launch import run_ranks

_LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}],
    # Of four stages two have no embedding.
    4: [{"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, {"pipeline_model_parallel_size": 4}],
}


def _assert_meets(grid: RankGrid) -> None:
    groups = build_process_groups(grid, create_all_gather_group=True)
    for name, ranks in _ranks_of(groups).items():
        total = torch.tensor([float(dist.get_rank())], device="cuda")
        dist.all_reduce(total, group=getattr(groups, name))
        assert total.item() == sum(ranks), name
    _check_identities(groups)


def _all_meet(store: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", init_method=store, rank=rank, world_size=world_size, device_id=device)
    assert own_process_group._split_source() is not None, "groups must be split for what is tested here"
    for degrees in _LAYOUTS[world_size]:
        _assert_meets(RankGrid(world_size=world_size, **degrees))
    # Hashes that are the same for all groups: those that are not of all ranks are made one after the other.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "_process_group_color", lambda ranks: 7)
        _assert_meets(RankGrid(world_size=world_size, tensor_model_parallel_size=2))
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(1, device="cuda"), group=pair)
    torch.cuda.synchronize()
    dist.barrier()


@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in _LAYOUTS])
def test_groups_that_are_split_meet(num_ranks: int, tmp_path: Path) -> None:
    run_ranks(num_ranks, _all_meet, f"file://{tmp_path}/split", backend="nccl")
