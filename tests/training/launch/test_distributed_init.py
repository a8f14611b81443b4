"""Ranks start with or without torchrun, and a missing one is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.rank_grid import RankGrid
from megatron.training.launch.distributed_init import (
    DistributedConfig,
    initialize_distributed,
    process_groups,
    set_deterministic,
)
from tests.support.launch import run_ranks


def test_without_torchrun_there_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    try:
        assert initialize_distributed(DistributedConfig(backend="gloo")) == torch.device("cpu")
        assert (dist.get_world_size(), dist.get_rank()) == (1, 0)
        config = DistributedConfig(create_all_gather_group=True)
        assert process_groups(config, RankGrid(world_size=1)).dp_cp_ag is None
    finally:
        dist.destroy_process_group()


def test_a_missing_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def never_comes(*args: Any, **kwargs: Any) -> None:
        assert kwargs["timeout"].total_seconds() == 180
        raise dist.DistStoreError("1/2 clients joined")

    monkeypatch.setattr(dist, "init_process_group", never_comes)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "somewhere", "MASTER_PORT": "7"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        RuntimeError, match=r"rank 1 must reach 2 ranks at .* somewhere:7 within 3 minutes.*1/2 clients"
    ):
        initialize_distributed(DistributedConfig(backend="gloo", timeout_minutes=3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are CUDA devices")
def test_nccl_without_cuda_is_refused() -> None:
    with pytest.raises(RuntimeError, match="needs CUDA devices, got none; use --distributed-backend gloo"):
        initialize_distributed(DistributedConfig(backend="nccl"))


@pytest.mark.parametrize("settings", [{"backend": "mpi"}, {"timeout_minutes": 0}])
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        DistributedConfig(**settings)


def _gathers_have_their_own_communicator() -> tuple[bool, int]:
    grid = RankGrid(world_size=2)
    groups = process_groups(DistributedConfig(timeout_minutes=1, create_all_gather_group=True), grid)
    assert groups.dp_cp is not None and groups.dp_cp_ag is not None
    assert process_groups(DistributedConfig(), grid).dp_cp_ag is None, "only where it is asked for"
    return groups.dp_cp_ag is not groups.dp_cp, groups.dp_cp_ag.size()


def test_gathers_and_reductions_have_two_communicators_where_it_is_asked_for() -> None:
    assert run_ranks(2, _gathers_have_their_own_communicator) == [(True, 2), (True, 2)]


def _is_deterministic() -> bool:
    set_deterministic()
    return torch.are_deterministic_algorithms_enabled()


def test_deterministic_mode_is_in_effect() -> None:
    assert run_ranks(1, _is_deterministic) == [True]
