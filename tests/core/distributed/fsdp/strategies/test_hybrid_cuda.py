"""Hybrid sharding on GPUs: the outer reduction hides behind backward, and every transport inside trains alike."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import fully_shard, hybrid_placements, microbatch
from tests.core.distributed.fsdp.runtime.test_systems_cuda import DEVICE, NUM_ROWS, NUM_UNITS, Trainer
from tests.support.device_trace import Work, num_overlapping, streams_of, traced
from tests.support.launch import num_simulated_hosts, run_ranks
from tests.support.models import difference, full

WORLD = 4
_ALL_REDUCE = re.compile(r"nccl.*AllReduce")


def _overlap(num_inner: int, outer: str, folder: str) -> None:
    mesh = init_device_mesh(DEVICE, (2, num_inner), mesh_dim_names=("outer", "inner"))
    trainer = Trainer(NUM_ROWS, mesh=mesh, placements=hybrid_placements("optim_grads_params", outer))

    def step(is_last: bool) -> None:
        # Ranks start together, whenever their profilers let them: one that waits for another has no GEMMs meanwhile.
        dist.all_reduce(torch.zeros(1, device=DEVICE))
        torch.cuda._sleep(200_000_000)  # the host gets ahead, as it does where units take longer than their launches
        with microbatch(trainer.net, is_first=not is_last, is_last=is_last):
            trainer.forward()
            trainer.backward()

    for _ in range(4):  # until all memory has been allocated once: the device waits for its allocation
        step(False)
        step(True)
        trainer.update()
    # The first profile starts slowly, on each rank differently.
    traced(lambda: torch.zeros(1, device=DEVICE), Path(folder) / f"warmup-{dist.get_rank()}.json")
    early = traced(lambda: step(False), Path(folder) / f"early-{dist.get_rank()}.json")
    last = traced(lambda: step(True), Path(folder) / f"last-{dist.get_rank()}.json")
    trainer.update()
    assert trainer.context.planner.plan is not None
    for works, is_last in ((early, False), (last, True)):
        _check_overlap(works, is_last=is_last, is_inner=num_inner > 1, scatters=outer == "optim")


def _check_overlap(works: list[Work], *, is_last: bool, is_inner: bool, scatters: bool) -> None:
    """All but the last outer reduction of a step overlap GEMMs; another microbatch has none."""
    gemms = [work for work in works if work.is_gemm]
    inner_and_outer = [work for work in works if work.is_reduction]
    _, *outer = (work for work in works if _ALL_REDUCE.search(work.name))  # the first is that of the ranks' start
    if is_last:  # the last one over each axis asks which gradients are missing
        outer = outer[: len(outer) - 1 - is_inner]
    if scatters:  # over the outer axis too: behind each inner one
        assert not outer and len(inner_and_outer) == NUM_UNITS * (is_inner + is_last)
        outer = inner_and_outer[is_inner :: 1 + is_inner] if is_last else []
    else:
        assert len(inner_and_outer) == NUM_UNITS * is_inner
    assert len(outer) == (NUM_UNITS if is_last else 0)
    assert not streams_of(outer) & streams_of(gemms)
    if outer:
        spans = [(round(work.begin - gemms[0].begin), round(work.end - gemms[0].begin)) for work in outer]
        ends = [round(work.end - gemms[0].begin) for work in gemms]
        assert num_overlapping(outer, gemms) >= NUM_UNITS - 1, f"us: {spans}, matrix products until {ends}"


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
@pytest.mark.parametrize(
    "num_inner", [pytest.param(1, marks=pytest.mark.gpu(2)), pytest.param(2, marks=pytest.mark.gpu(4))]
)
def test_outer_reductions_come_with_the_last_microbatch_and_overlap_gemms(
    num_inner: int, outer: str, tmp_path: Path
) -> None:
    if num_simulated_hosts() > 1:
        pytest.skip("ranks that share a device take turns, so nothing of one lies beside what another waits for")
    run_ranks(2 * num_inner, _overlap, num_inner, outer, str(tmp_path), backend="nccl")


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64)) for _ in range(3))
    return nn.Sequential(*blocks).to(DEVICE)


def _trains(transport: str, outer: str) -> str | None:
    """Why the transport cannot serve the ranks, if so."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("outer", "inner"))
    net: Any = _net()
    plain: Any = _net()
    try:
        for module in (*net, net):
            fully_shard(module, mesh, hybrid_placements("optim_grads_params", outer), transport=transport)  # type: ignore[arg-type]
    except ValueError as error:
        if "cannot serve" not in str(error):
            raise
        return str(error)
    ours, theirs = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, plain))
    for step in range(4):
        batch = torch.randn(2, WORLD, 8, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        for at in range(2):
            with microbatch(net, is_first=at == 0, is_last=at == 1):
                net(batch[at, dist.get_rank()]).square().mean().backward()
        (plain(batch).square().mean() * 2).backward()
        for parameter, own in zip(net.parameters(), plain.parameters(), strict=True):
            # fp32 (without TF32), but sums over rows and ranks in another order: a few roundings.
            assert difference(full(parameter.grad), own.grad) <= 1e-5
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for parameter, own in zip(net.parameters(), plain.parameters(), strict=True):
        assert difference(full(parameter), own.detach()) <= 1e-5
    return None


@pytest.mark.gpu(4)
@pytest.mark.parametrize("outer", ["no_shard", "optim"])
@pytest.mark.parametrize("transport", ["nccl", "peer_copy", "symm"])
def test_every_transport_inside_trains_as_no_sharding_does(transport: str, outer: str) -> None:
    problems = run_ranks(WORLD, _trains, transport, outer, backend="nccl")
    if problems[0] is not None:
        pytest.skip(problems[0])
