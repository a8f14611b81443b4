"""Peer copy between CPU processes: the same states as on GPUs, the numbers of the process group, no leaks."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import fully_shard, fully_shard_optimizer, microbatch
from megatron.core.distributed.fsdp.comm import peer_memory
from megatron.core.distributed.fsdp.comm.choose import TransportKind
from megatron.core.distributed.fsdp.comm.peer_copy import PeerCopyTransport, peer_copy_problem
from megatron.core.distributed.fsdp.comm.peer_memory import (
    Barrier,
    CpuPeerMemory,
    Place,
    peer_memory_nbytes,
    peer_memory_of,
)
from megatron.core.distributed.fsdp.comm.process_group import RankOrderTransport
from megatron.core.distributed.fsdp.comm.transport import MemoryKind
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from tests.support.launch import run_ranks
from tests.support.models import STRATEGY_NAMES, context_of, loss_of, make_net, my_piece
from tests.support.models import full as full_tensor
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
CPU = torch.device("cpu")


def _peer_copy(group: Any = None) -> PeerCopyTransport:
    group = group or dist.group.WORLD
    return PeerCopyTransport(group, group, CPU)


def _rank_order() -> RankOrderTransport:
    group = dist.group.WORLD
    assert group is not None
    return RankOrderTransport(group, group)


def _random(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _in_peer_memory(transport: PeerCopyTransport, values: torch.Tensor, kind: MemoryKind) -> torch.Tensor:
    memory = transport.empty(values.numel(), values.dtype, CPU, kind)
    assert peer_memory_of(memory) is not None
    return memory.copy_(values)


def _mappings() -> int:
    """Files of peer memory that this process has mapped, or open."""
    mapped = Path("/proc/self/maps").read_text().count("fsdp peer memory")
    files = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return mapped + sum("fsdp peer memory" in os.readlink(file) for file in files if file.is_symlink())


class _ByGroup:
    """Fails if the process group moves data instead of copies between peers."""

    def __init__(self, transport: PeerCopyTransport) -> None:
        self.transport = transport

    def __enter__(self) -> None:
        self._kept, self.transport._by_group = self.transport._by_group, None  # type: ignore[assignment]

    def __exit__(self, *_: Any) -> None:
        self.transport._by_group = self._kept


@CHECKS.on(2, 3, 4)
def shards_are_gathered_from_the_peers() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn):
        transport = _peer_copy()
        values = [_random(r, 24, torch.float32).to(dtype) for r in range(world)]
        shards = _in_peer_memory(transport, values[rank], MemoryKind.SHARD)
        transport.publish()
        for part in (slice(0, 24), slice(8, 24)):  # views of an allocation are found at their offset
            full = transport.empty(world * shards[part].numel(), dtype, CPU, MemoryKind.UNSHARDED)
            with _ByGroup(transport):
                transport.all_gather(full, shards[part])
            expected = torch.cat([value[part] for value in values])
            assert torch.equal(full.view(torch.uint8), expected.view(torch.uint8)), dtype
        transport.end_pass()


@CHECKS.on(2)
def a_unit_may_use_memory_that_another_units_transport_made() -> None:
    first, second = _peer_copy(), _peer_copy()
    arena = first.empty(64, torch.uint8, CPU, MemoryKind.SHARD)
    shard = arena[16:32].view(torch.float32)
    shard.fill_(dist.get_rank() + 1.0)
    second.publish()  # knows of no signals yet
    full = torch.empty(8)
    with _ByGroup(second):
        second.all_gather(full, shard)
        second.end_pass()
        shard.fill_(dist.get_rank() + 3.0)
        second.publish()
        second.all_gather(full, shard)
    assert full.tolist() == [3.0] * 4 + [4.0] * 4
    second.end_pass()


@CHECKS.on(2, 3, 4)
def sums_are_bitwise_those_of_the_process_group() -> None:
    """In rank order and fp32, in one round or several, whatever the transport: gradients do not depend on the choice."""
    world, rank = dist.get_world_size(), dist.get_rank()
    numel = 3 * 1024 + 40
    reference = _rank_order()
    for direct in (True, False):
        transport = _peer_copy()
        transport.direct_nbytes = 2**20 if direct else 0
        transport.scratch_nbytes = 1024 * 2 * (world - 1)  # rounds of 1024 elements
        for wire in (torch.float32, torch.bfloat16, torch.float64):
            full = transport.empty(world * numel, wire, CPU, MemoryKind.REDUCE_SCATTER_INPUT)
            for held in (torch.float32, torch.bfloat16, torch.float64):
                for scale, accumulate in ((1.0, False), (0.25, False), (1 / 3, True)):
                    values = _random(rank, world * numel, wire)
                    out = _random(77, numel, held)
                    expected = out.clone()
                    full.copy_(values)
                    with _ByGroup(transport):
                        transport.reduce_scatter(out, full, scale=scale, accumulate=accumulate)
                    reference.reduce_scatter(expected, values, scale=scale, accumulate=accumulate)
                    assert torch.equal(out, expected), (direct, wire, held, scale, accumulate)


@CHECKS.on(2, 4)
def what_is_not_in_peer_memory_goes_through_the_group() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    transport, reference = _peer_copy(), _rank_order()
    full, expected = torch.empty(3 * world), torch.empty(3 * world)
    shard = _random(rank, 3, torch.float32)
    transport.all_gather(full, shard)
    reference.all_gather(expected, shard)
    assert torch.equal(full, expected)
    inside = _in_peer_memory(transport, torch.zeros(3 * world), MemoryKind.SHARD)
    own = inside[3 * rank : 3 * rank + 3].copy_(shard)  # written just now, on each rank in its own time
    transport.all_gather(inside, own)
    assert torch.equal(inside, expected)
    for move in ("reduce_scatter", "all_reduce"):
        values = _random(rank, 3 * world, torch.float32)
        out, sums = (torch.zeros(3 * world if move == "all_reduce" else 3) for _ in range(2))
        getattr(transport, move)(out, values.clone(), scale=0.5, accumulate=True)
        getattr(reference, move)(sums, values.clone(), scale=0.5, accumulate=True)
        assert torch.equal(out, sums)
    value = torch.full((2,), float(rank))
    transport.broadcast(value)
    assert value.tolist() == [0.0, 0.0] and transport.exchange(rank) == list(range(world))


@CHECKS.on(4)
def memory_of_other_groups_goes_through_this_ones() -> None:
    """A mesh has several axes; memory is mapped by the ranks of the one whose transport made it."""
    rank = dist.get_rank()
    whole, pairs = _peer_copy(), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = _peer_copy(pairs[rank // 2])
    shard = _in_peer_memory(pair, torch.full((4,), float(rank)), MemoryKind.SHARD)
    pair.publish()
    full, all_of_them = torch.empty(8), torch.empty(16)
    with _ByGroup(pair):
        pair.all_gather(full, shard)
    whole.all_gather(all_of_them, shard)
    assert full.tolist() == [rank // 2 * 2.0] * 4 + [rank // 2 * 2.0 + 1] * 4
    assert all_of_them.tolist() == [float(r) for r in range(4) for _ in range(4)]
    pair.end_pass()


@CHECKS.on(2, 3)
def memory_goes_with_its_last_view() -> None:
    """Without the garbage collector, and neither a mapping nor an open file stays."""
    gc.collect()
    gc.disable()
    before, counted = _mappings(), peer_memory_nbytes(CPU)
    transport = _peer_copy()
    shard = transport.empty(100_000, torch.bfloat16, CPU, MemoryKind.SHARD)
    inputs = transport.empty(60_000, torch.float32, CPU, MemoryKind.REDUCE_SCATTER_INPUT)
    view = shard[10:34]
    assert peer_memory_of(view) is peer_memory_of(shard)
    assert peer_memory_nbytes(CPU) - counted == 2 * 2**21, "each in a page of its own"
    transport.publish()
    transport.all_gather(torch.empty(24 * transport.size, dtype=torch.bfloat16), view)
    transport.reduce_scatter(torch.empty(60_000 // transport.size), inputs)
    transport.end_pass()
    del shard
    assert _mappings() > before and view.shape == (24,), "a view keeps the memory"
    del view, inputs
    assert (_mappings(), peer_memory_nbytes(CPU)) == (before, counted)
    transport.publish()  # and a transport without memory still meets its peers
    gc.enable()


@CHECKS.on(2)
def nothing_is_taken_for_nothing() -> None:
    transport = _peer_copy()
    before = _mappings()
    kept = [transport.empty(0, torch.float32, CPU, kind) for kind in MemoryKind]
    kept.append(transport.empty(8, torch.float32, CPU, MemoryKind.UNSHARDED))
    assert _mappings() == before and all(peer_memory_of(tensor) is None for tensor in kept)


@CHECKS.on(2)
def an_input_of_another_size_is_refused() -> None:
    transport = _peer_copy()
    full = transport.empty(8, torch.float32, CPU, MemoryKind.REDUCE_SCATTER_INPUT)
    with pytest.raises(ValueError, match="full must have 2 times out's 3 elements, got 8"):
        transport.reduce_scatter(torch.empty(3), full)


@CHECKS.on(2)
def ranks_that_ask_for_different_memory_are_told() -> None:
    transport = _peer_copy()
    with pytest.raises(
        RuntimeError, match=r"ranks \[0, 1\] of the group did not: ranks must ask for the same memory, got"
    ):
        transport.empty(10 + dist.get_rank(), torch.float32, CPU, MemoryKind.SHARD)


@CHECKS.on(2, 4)
def published_shards_are_never_read_half() -> None:
    """Each round all ranks rewrite their shards at random times; a gather sees the round, and nothing of another."""
    world, rank = dist.get_world_size(), dist.get_rank()
    wait, transport = random.Random(rank), _peer_copy()
    shard = transport.empty(512, torch.int64, CPU, MemoryKind.SHARD)
    full = torch.empty(512 * world, dtype=torch.int64)
    for step in range(40):
        for half in (shard[:256], shard[256:]):
            half.fill_(step * world + rank)
            time.sleep(wait.choice((0, 0, 0.001)))
        transport.publish()
        for _ in range(2):
            time.sleep(wait.choice((0, 0, 0.001)))
            transport.all_gather(full, shard)
            expected = torch.arange(world).repeat_interleave(512) + step * world
            assert torch.equal(full, expected), step
        transport.end_pass()


@CHECKS.on(2, 4)
def inputs_are_read_whole_and_overwritten_only_when_all_have_read() -> None:
    """Two buffers that take turns, as in a backward, with ranks that are late at random."""
    world, rank = dist.get_world_size(), dist.get_rank()
    wait, transport = random.Random(rank), _peer_copy()
    numel = 4096
    transport.direct_nbytes = 0
    inputs = [transport.empty(world * numel, torch.float32, CPU, MemoryKind.REDUCE_SCATTER_INPUT) for _ in range(2)]
    out = torch.empty(numel)
    for step in range(40):
        full = inputs[step % 2]
        for segment in full.view(world, numel):
            segment.fill_(float(step * world + rank))
            time.sleep(wait.choice((0, 0, 0.001)))
        transport.reduce_scatter(out, full)
        assert torch.equal(out, torch.full_like(out, sum(step * world + r for r in range(world)))), step
        full.fill_(float("nan"))


@CHECKS.on(2)
def barriers_on_one_memory_do_not_mix() -> None:
    """Gathers and reductions run at the same time: each barrier has signals of its own."""
    rank, transport = dist.get_rank(), _peer_copy()
    tensor = transport.empty(8, torch.int64, CPU, MemoryKind.SHARD)
    memory = peer_memory_of(tensor)
    assert memory is not None
    if rank == 0:
        seen: list[int] = []
        view = memory.views(tensor.data_ptr(), 8, torch.int64)[1]

        def read_once_published() -> None:
            memory.barrier(Barrier.PUBLISHED)
            seen.append(int(view[0]))

        thread = threading.Thread(target=read_once_published)
        thread.start()
        time.sleep(0.05)
        memory.barrier(Barrier.INPUTS_WRITTEN)
        thread.join()
        assert seen == [7]
    else:
        memory.barrier(Barrier.INPUTS_WRITTEN)
        time.sleep(0.1)
        tensor.fill_(7)
        memory.barrier(Barrier.PUBLISHED)
    memory.barrier(Barrier.PASS_ENDED)


@CHECKS.on(1, 2)
def what_cannot_be_served_is_said() -> None:
    group = dist.group.WORLD
    assert group is not None
    problem = peer_copy_problem(group, CPU)
    if group.size() == 1:
        assert problem == "peer copy is for two ranks or more, got a group of one"
        return
    assert problem is None
    assert peer_copy_problem(group, torch.device("meta")) == "peer copy is for cuda and cpu devices, got meta"
    rank, problem_among = group.rank(), peer_memory.problem_among
    for here, words in (
        (Place(f"host-{rank}", rank, (0, 1)), "got 2 hosts: host-0, host-1"),
        (Place("host", rank, (0, 1), None if rank == 0 else "no x86"), "no x86"),
        (Place("host", 0, ()), r"a device of its own .* got devices \[0, 0\]"),
        (Place("host", rank, (1,)), "between devices 1 and 0"),
    ):
        with patch.object(peer_memory, "problem_among", lambda _, group, here=here: problem_among(here, group)):
            assert re.search(words, str(peer_copy_problem(group, CPU)))


def _train(transport: TransportKind, strategy: str) -> tuple[list[torch.Tensor], int]:
    """Losses and last weights, and how often the process group gathered or reduced in the last two steps.

    Ranks are late at random, and the forward without a backward that ends each step reads weights too.
    """
    net = make_net()
    for unit in (*net.blocks, net):
        fully_shard(unit, placements=strategy_placements(strategy), transport=transport)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-2))
    context_of(net).change_options(poisons=True)
    wait, results, by_group = random.Random(dist.get_rank()), [], 0
    calls: list[None] = []
    kept = RankOrderTransport.all_gather, RankOrderTransport.reduce_scatter
    for name, method in (("all_gather", kept[0]), ("reduce_scatter", kept[1])):
        setattr(RankOrderTransport, name, _counting(method, calls))
    for step in range(6):
        if step == 4:
            calls.clear()
        for index in range(2):
            with microbatch(net, is_first=index == 0, is_last=index == 1):
                loss = loss_of(net, my_piece(2 * step + index))
                time.sleep(wait.choice((0, 0.002)))
                loss.backward()
            results.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            results.append(loss_of(net, my_piece(0)))
    by_group = len(calls)
    RankOrderTransport.all_gather, RankOrderTransport.reduce_scatter = kept  # type: ignore[method-assign]
    return [*results, *(full_tensor(parameter) for parameter in net.parameters())], by_group


def _counting(method: Callable[..., None], calls: list[None]) -> Callable[..., None]:
    def counted(*args: Any, **options: Any) -> None:
        calls.append(None)
        method(*args, **options)

    return counted


@CHECKS.on(2)
def the_engine_trains_bitwise_the_same() -> None:
    for strategy in STRATEGY_NAMES:
        expected, _ = _train("nccl", strategy)
        results, by_group = _train("peer_copy", strategy)
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)), strategy
        if strategy == "optim_grads_params":
            # Once a step ranks ask by it which gradients are missing; no weight or gradient goes that way.
            assert by_group == 2, "once the plan has made the arenas, weights and gradients go by peer copy"


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)


# ---- lost ranks ---------------------------------------------------------------------------------------------------------

# Of barriers with a rank that is stopped: the group's own bounds the start of processes on a busy machine as well.
_TIME_OUT_S, _OF_GROUP_S = 2.0, 60.0


def _lose(moment: str, how: signal.Signals, path: str) -> None:
    rank, transport = dist.get_rank(), _peer_copy()
    shard = transport.empty(8, torch.float32, CPU, MemoryKind.SHARD).zero_()
    inputs = transport.empty(24, torch.float32, CPU, MemoryKind.REDUCE_SCATTER_INPUT).zero_()
    for tensor in (shard, inputs):
        memory = peer_memory_of(tensor)
        assert isinstance(memory, CpuPeerMemory) and memory._time_out == _OF_GROUP_S, "the group's"
        if how == signal.SIGSTOP:
            memory._time_out = _TIME_OUT_S
    calls: dict[str, Callable[[], None]] = {
        "publish": transport.publish,
        "all_gather": lambda: transport.all_gather(torch.empty(24), shard),
        "reduce_scatter": lambda: transport.reduce_scatter(torch.empty(8), inputs),
        "end_pass": transport.end_pass,
    }
    for _ in range(3):
        for call in calls.values():
            call()
    begin, words = time.monotonic(), "finished"
    try:
        for name, call in calls.items():
            if name == moment and rank == 1:
                time.sleep(0.2)
                os.kill(os.getpid(), how)
            call()
    except RuntimeError as error:
        words = f"{time.monotonic() - begin} {error}"
    Path(f"{path}/said by {rank}").write_text(words)
    os._exit(0)


@pytest.mark.parametrize(
    ("moment", "how", "words"),
    [
        ("publish", signal.SIGKILL, "have published its weights before rank {rank} goes on, and has ended"),
        (
            "reduce_scatter",
            signal.SIGKILL,
            "have written its reduce-scatter inputs before rank {rank} goes on, and has ended",
        ),
        (
            "all_gather",
            signal.SIGKILL,
            "have written its reduce-scatter inputs before rank {rank} goes on, and has ended",
        ),
        ("end_pass", signal.SIGSTOP, "have ended its pass .* did not come within the group's time-out of 2 s"),
    ],
)
def test_the_others_say_what_a_lost_rank_owes(moment: str, how: signal.Signals, words: str, tmp_path: Path) -> None:
    """One that is killed, at once; one that hangs, after the group's time-out. A gather itself waits for no rank."""
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(3, _lose, moment, how, str(tmp_path), timeout_s=_OF_GROUP_S, grace_s=_OF_GROUP_S)
    for rank in (0, 2):
        seconds, message = (tmp_path / f"said by {rank}").read_text().split(" ", 1)
        assert float(seconds) < _OF_GROUP_S / 2, "of a rank that was killed nobody waits for the time-out"
        assert re.search("rank 1 must " + words.format(rank=rank), message), message
