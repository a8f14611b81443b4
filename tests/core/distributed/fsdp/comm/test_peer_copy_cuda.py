"""Peer copy between GPUs: copy engines move the data, sums go in rank order, and delayed ranks read no half-written buffer.

On a machine with one GPU the ranks share it: the same memory, streams, barriers and sums, without NVLink.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import fully_shard, fully_shard_optimizer, microbatch
from megatron.core.distributed.fsdp.comm.choose import TransportKind
from megatron.core.distributed.fsdp.comm.peer_copy import PeerCopyTransport, peer_copy_problem
from megatron.core.distributed.fsdp.comm.peer_memory import SHARING, peer_memory_of
from megatron.core.distributed.fsdp.comm.process_group import RankOrderTransport
from megatron.core.distributed.fsdp.comm.symmetric import symmetric_memory_problem
from megatron.core.distributed.fsdp.comm.transport import MemoryKind
from tests.support.launch import run_ranks
from tests.support.models import full as full_tensor
from tests.support.models import loss_of, make_net, my_piece
from tests.support.rank_checks import RankChecks

pytestmark = pytest.mark.gpu(1)

CHECKS = RankChecks(__name__)
# About a millisecond on a GPU of 1 to 2 GHz: longer than any copy here.
DELAY_CYCLES = 2_000_000


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _peer_copy() -> PeerCopyTransport:
    group = dist.group.WORLD
    assert group is not None
    return PeerCopyTransport(group, group, _device())


def _empty(transport: PeerCopyTransport, numel: int, dtype: torch.dtype, kind: MemoryKind) -> torch.Tensor:
    tensor = transport.empty(numel, dtype, _device(), kind)
    assert peer_memory_of(tensor) is not None
    return tensor


def _random(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def _num_peer_copies(names: list[str], *, of_own: int) -> int:
    """Return how many copies read another rank's memory, of the names of what ran; ``of_own`` copies read this rank's."""
    if dist.get_world_size() > torch.cuda.device_count():
        return sum("Memcpy" in name for name in names) - of_own
    return sum("Memcpy PtoP" in name for name in names)


def _meet() -> None:
    """Wait until all devices are idle. Ranks: all."""
    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()


def _device_events(work: Callable[[], None]) -> list[str]:
    """Names of what ran on the device."""
    work()
    _meet()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        work()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type.name == "CUDA"]


@contextmanager
def _streams() -> Any:
    """A stream for gathers and one for reductions, ordered after the current one's work and before what follows."""
    streams = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    yield streams
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)


@CHECKS.on(2)
def this_machine_can_serve_it() -> None:
    group = dist.group.WORLD
    assert group is not None and peer_copy_problem(group, _device()) is None


@CHECKS.on(2)
def a_device_is_shared_only_where_all_ranks_ask_for_it() -> None:
    """Two ranks on one device are nearly always a mistake of the launch."""
    group = dist.group.WORLD
    if group is None or group.size() <= torch.cuda.device_count():
        return
    with patch.dict(os.environ):
        if group.rank() == 1:
            del os.environ[SHARING]
        problem = peer_copy_problem(group, _device())
    assert (
        problem is not None
        and f"got devices [0, 0]; ranks may share one for peer copy only, with {SHARING}=1" in problem
    )
    assert symmetric_memory_problem(group, _device()) is not None, "NCCL's symmetric memory is not for shared devices"


@CHECKS.on(2)
def copy_engines_gather_the_shards() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64):
        transport, numel = _peer_copy(), 1 << 20
        arena = _empty(transport, numel + 64, dtype, MemoryKind.SHARD)
        shard = arena[64:]  # a view at an offset
        values = [_random(r, numel, torch.float32).to(dtype) for r in range(world)]
        shard.copy_(values[rank])
        full = transport.empty(world * numel, dtype, _device(), MemoryKind.UNSHARDED)
        transport.publish()
        transport.all_gather(full, shard)
        assert torch.equal(full.view(torch.uint8), torch.cat(values).view(torch.uint8)), dtype
        names = _device_events(functools.partial(transport.all_gather, full, shard))
        assert _num_peer_copies(names, of_own=1) == world - 1, names
        assert all("Memcpy" in name for name in names), f"no kernel takes an SM: {names}"
        transport.end_pass()
        _meet()


@CHECKS.on(2)
def sums_are_bitwise_those_in_rank_order() -> None:
    """With a power of two as scale, where a multiplication rounds nothing; in one round, in several, and directly."""
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    reference, numel = RankOrderTransport(group, group), 1_000_000
    for direct in (True, False):
        transport = _peer_copy()
        transport.direct_nbytes = 2**62 if direct else 0
        transport.scratch_nbytes = 2**20
        for wire in (torch.float32, torch.bfloat16):
            full = _empty(transport, world * numel, wire, MemoryKind.REDUCE_SCATTER_INPUT)
            for held in (torch.float32, torch.bfloat16):
                for scale, accumulate in ((1.0, False), (0.25, False), (0.25, True)):
                    values, out = _random(rank, world * numel, wire), _random(77, numel, held)
                    expected = out.clone()
                    full.copy_(values)
                    transport.reduce_scatter(out, full, scale=scale, accumulate=accumulate)
                    full.fill_(float("nan"))  # the peers have read it
                    reference.reduce_scatter(expected, values, scale=scale, accumulate=accumulate)
                    assert torch.equal(out, expected), (direct, wire, held, scale, accumulate)


@CHECKS.on(2)
def sums_are_bitwise_those_of_peer_copy_between_cpus() -> None:
    world, rank, numel = dist.get_world_size(), dist.get_rank(), 100_003
    gloo, cpu = dist.new_group(backend="gloo"), torch.device("cpu")
    on_cpu, on_cuda = PeerCopyTransport(gloo, gloo, cpu), _peer_copy()
    for direct_nbytes in (2**62, 0):
        on_cpu.direct_nbytes = on_cuda.direct_nbytes = direct_nbytes
        for wire in (torch.float32, torch.bfloat16):
            values, kind = _random(rank, world * numel, wire), MemoryKind.REDUCE_SCATTER_INPUT
            theirs = on_cpu.empty(world * numel, wire, cpu, kind)
            ours = _empty(on_cuda, world * numel, wire, kind)
            for scale, accumulate in ((1.0, False), (0.25, True)):
                theirs.copy_(values)
                ours.copy_(values)
                expected, out = _random(77, numel, torch.float32).cpu(), _random(77, numel, torch.float32)
                on_cpu.reduce_scatter(expected, theirs, scale=scale, accumulate=accumulate)
                on_cuda.reduce_scatter(out, ours, scale=scale, accumulate=accumulate)
                assert torch.equal(out.cpu(), expected), (direct_nbytes, wire, scale, accumulate)
    _meet()


@CHECKS.on(2)
def a_reduction_is_copies_and_one_kernel_between_two_barriers() -> None:
    world, numel = dist.get_world_size(), 1 << 20
    transport = _peer_copy()
    transport.direct_nbytes = 0
    full = _empty(transport, world * numel, torch.bfloat16, MemoryKind.REDUCE_SCATTER_INPUT).zero_()
    out = torch.zeros(numel, device="cuda")
    names = _device_events(functools.partial(transport.reduce_scatter, out, full, scale=0.5, accumulate=True))
    assert _num_peer_copies(names, of_own=0) == world - 1, names
    kernels = [name for name in names if "Memcpy" not in name]
    assert len(kernels) == 3 and sum("barrier" in name for name in kernels) == 2, kernels
    assert any("sum_kernel" in name for name in kernels), kernels


@CHECKS.on(2)
def what_is_not_in_peer_memory_goes_through_the_group() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    transport = _peer_copy()
    full, shard = torch.empty(4 * world, device="cuda"), torch.full((4,), float(rank), device="cuda")
    transport.publish()
    transport.all_gather(full, shard)
    assert full.tolist() == [float(r) for r in range(world) for _ in range(4)]
    inside = _empty(transport, 4 * world, torch.float32, MemoryKind.SHARD).zero_()
    inside[4 * rank : 4 * rank + 4] = rank
    transport.all_gather(inside, inside[4 * rank : 4 * rank + 4])
    assert torch.equal(inside, full)
    out = torch.ones(4, device="cuda")
    transport.reduce_scatter(out, full.clone(), scale=0.5, accumulate=True)
    assert out.tolist() == [1.0 + 0.5 * world * rank] * 4
    transport.all_reduce(full, full.clone(), scale=0.5)
    assert full.tolist() == [0.5 * world * r for r in range(world) for _ in range(4)]
    transport.broadcast(shard)
    assert shard.tolist() == [0.0] * 4
    _meet()


@CHECKS.on(2)
def delays_tear_nothing() -> None:
    """Steps as the engine makes them: gathers and reductions at the same time, with random delays on each rank."""
    world, rank, numel = dist.get_world_size(), dist.get_rank(), 1 << 18
    late, transport = random.Random(rank), _peer_copy()
    transport.direct_nbytes = 0

    def delay() -> None:
        if late.random() < 0.5:
            torch.cuda._sleep(late.randrange(DELAY_CYCLES))

    shard = _empty(transport, numel, torch.float32, MemoryKind.SHARD)
    inputs = [_empty(transport, world * numel, torch.float32, MemoryKind.REDUCE_SCATTER_INPUT) for _ in range(2)]
    full, out = torch.empty(world * numel, device="cuda"), torch.empty(numel, device="cuda")
    wrong_weights, wrong_sums = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))
    for step in range(40):
        with _streams() as (gather, reduce):
            with torch.cuda.stream(gather):
                delay()
                shard.fill_(float(step * world + rank))
                delay()
                transport.publish()
                for _ in range(2):
                    delay()
                    transport.all_gather(full, shard)
                    expected = torch.arange(world, device="cuda") + step * world
                    wrong_weights += (full.view(world, numel) != expected[:, None]).sum()
                delay()
                transport.end_pass()
            with torch.cuda.stream(reduce):
                for turn in range(3):
                    full_input = inputs[turn % 2]
                    delay()
                    full_input.fill_(float(step * world + rank + turn))
                    delay()
                    transport.reduce_scatter(out, full_input)
                    total = sum(step * world + r + turn for r in range(world))
                    wrong_sums += (out != total).sum()
                    full_input.fill_(float("nan"))
    torch.cuda.synchronize()
    assert (wrong_weights.item(), wrong_sums.item()) == (0, 0)


def _piece(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    features, classes = my_piece(step)
    return features.to("cuda"), classes.to("cuda")


@CHECKS.on(2)
def the_engine_trains_as_with_the_process_group() -> None:
    """Two ranks' sums in fp32 have one order, whatever moves them; the first steps have no plan, the others its arenas."""
    results: dict[str, list[torch.Tensor]] = {}
    transports: tuple[TransportKind, ...] = ("nccl", "peer_copy")
    for kind in transports:
        net: Any = make_net().to("cuda")
        for unit in (*net.blocks, net):
            fully_shard(unit, transport=kind)
        assert {axis.name for axis in net.parameter_groups[0].group_mesh.axes} == {kind}
        optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2))
        losses = results[kind] = []
        for step in range(6):
            for index in range(2):
                with microbatch(net, is_first=index == 0, is_last=index == 1):
                    loss = loss_of(net, _piece(2 * step + index))
                    loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses.append(loss_of(net, _piece(0)))
        losses += [full_tensor(parameter) for parameter in net.parameters()]
        del net, optimizer
        _meet()
    torch.testing.assert_close(results["peer_copy"], results["nccl"])


@CHECKS.on(2)
def a_graph_replays_it() -> None:
    """Barriers are flags that are raised and lowered: nothing of a replay is left for the next one."""
    world, rank, numel = dist.get_world_size(), dist.get_rank(), 1 << 16
    transport = _peer_copy()
    transport.direct_nbytes = 0
    weight, grad = torch.zeros(numel, device="cuda"), torch.zeros(world * numel, device="cuda")
    shard = _empty(transport, numel, torch.float32, MemoryKind.SHARD)
    inputs = _empty(transport, world * numel, torch.float32, MemoryKind.REDUCE_SCATTER_INPUT)
    full, out = torch.zeros(world * numel, device="cuda"), torch.zeros(numel, device="cuda")

    def step() -> None:
        with _streams() as (gather, reduce):
            with torch.cuda.stream(gather):
                shard.copy_(weight)
                transport.publish()
                transport.all_gather(full, shard)
                transport.end_pass()
            with torch.cuda.stream(reduce):
                inputs.copy_(grad)
                transport.reduce_scatter(out, inputs, scale=0.5, accumulate=True)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    _meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        step()
    out.zero_()
    late, expected = random.Random(rank), 0.0
    for replay in range(30):
        weight.fill_(float(replay * world + rank))
        grad.fill_(float(replay + rank))
        if late.random() < 0.5:
            torch.cuda._sleep(late.randrange(DELAY_CYCLES))
        graph.replay()
        expected += 0.5 * sum(replay + r for r in range(world))
        assert full.view(world, numel)[:, 0].tolist() == [float(replay * world + r) for r in range(world)]
        assert torch.equal(out, torch.full_like(out, expected)), replay
    step()  # and eager steps go on from there
    _meet()
    del graph


@CHECKS.on(2)
def memory_goes_with_its_last_view() -> None:
    transport, nbytes = _peer_copy(), 2**28
    transport.publish()
    _meet()
    before = torch.cuda.mem_get_info()[0]
    _meet()  # ranks that share a device see each other's memory
    tensor = _empty(transport, nbytes, torch.uint8, MemoryKind.SHARD)
    view = tensor[64:128]
    transport.publish()
    transport.all_gather(torch.empty(64 * transport.size, dtype=torch.uint8, device="cuda"), view)
    transport.end_pass()
    del tensor
    torch.cuda.synchronize()
    assert before - torch.cuda.mem_get_info()[0] >= nbytes, "a view keeps the memory"
    _meet()
    del view
    _meet()  # the last rank to unmap it gives it back
    assert before - torch.cuda.mem_get_info()[0] < nbytes // 4


def _run_checks() -> dict[str, str]:
    return CHECKS.run()


@functools.cache
def _failures() -> dict[str, str]:
    """All checks share one launch: starting CUDA takes longer than any of them."""
    everywhere: dict[str, str] = {}
    for failures in run_ranks(2, _run_checks, backend="nccl"):
        everywhere.update(failures)
    return everywhere


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    assert name not in _failures(), _failures()[name]
