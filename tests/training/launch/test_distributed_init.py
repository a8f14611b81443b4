"""Ranks start with or without torchrun, and a missing one is named."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
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
from megatron.training.launch.rendezvous import meet
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


def _environment(monkeypatch: pytest.MonkeyPatch, *, rank: int, port: int) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    for name, value in {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))


def test_missing_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 comes, and rank 2 does not; rank 1 itself hears nothing of rank 0 where that is not there."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _environment(monkeypatch, rank=1, port=server.port)
    with pytest.raises(
        RuntimeError, match=r"rank 1 must reach 3 ranks .* within 0 s, got no answer of rank 0; look for"
    ):
        meet(timedelta(seconds=0.4))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    came = threading.Thread(target=lambda: meet(timedelta(seconds=60)))
    greetings = server.queue_len("megatron/greetings")
    came.start()
    deadline = time.monotonic() + 60.0
    while server.queue_len("megatron/greetings") == greetings:  # then it has read its number
        assert time.monotonic() < deadline
        time.sleep(0.01)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match=r"rank 0 must reach 3 ranks .* got no sign of rank 2; look for"):
        meet(timedelta(seconds=1))
    came.join()


def test_greetings_of_an_earlier_start_are_not_counted() -> None:
    """After a restart torchrun's store still holds what ranks wrote before: a rank that died, a name that was agreed on."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = []
    for _ in range(2):
        server.queue_push("megatron/greetings", "of a rank that died")
        met = run_ranks(3, _meet_at, server.port)
        assert len({name for name, _ in met}) == 1 and [rank for _, rank in met] == [0, 1, 2]
        names.append(met[0][0])
    assert names[0] != names[1]


def _meet_at(port: int) -> tuple[str, int]:
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    met = meet(timedelta(seconds=60))
    dist.init_process_group("gloo", store=met.store, rank=met.rank, world_size=met.world_size)
    return met.name, met.rank


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
