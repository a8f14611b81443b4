"""Transports move what they say they move; sums have one order and the width of fp32. On CPUs and on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.comm import process_group
from megatron.core.distributed.fsdp.comm.choose import make_transport
from megatron.core.distributed.fsdp.comm.process_group import ProcessGroupTransport, RankOrderTransport
from megatron.core.distributed.fsdp.comm.transport import LocalTransport, unfinished
from megatron.core.distributed.fsdp.config.torch_versions import all_gather_flat
from tests.support.launch import run_ranks
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
CPU = torch.device("cpu")


def _transports() -> list[Any]:
    """The transport that sums in rank order, the process group's, and peer copy, which sends these buffers through the group."""
    group, device = dist.group.WORLD, torch.get_default_device()
    assert group is not None
    copies = [make_transport(group, group, device, "peer_copy")] if group.size() > 1 else []
    in_rank_order = make_transport(group, group, device) if device == CPU else RankOrderTransport(group, group)
    return [in_rank_order, ProcessGroupTransport(group, group), *copies]


def _of_rank(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(rank), device=CPU)
    return values.to(torch.get_default_device(), dtype)


@CHECKS.on(1, 2, 4)
def each_collective_does_what_it_says() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    everyone = [_of_rank(r, 3 * world) for r in range(world)]
    total = torch.stack(everyone).sum(0)
    for transport in _transports():
        assert transport.size == world and transport.rank == rank and list(transport.ranks) == list(range(world))
        full = torch.empty(3 * world)
        transport.all_gather(full, everyone[rank][:3])
        assert torch.equal(full, torch.cat([piece[:3] for piece in everyone]))
        inside = torch.zeros(3 * world)
        inside[3 * rank : 3 * rank + 3] = everyone[rank][:3]
        transport.all_gather(inside, inside[3 * rank : 3 * rank + 3])
        assert torch.equal(inside, full), "the shard may lie in the full buffer"
        shard = torch.empty(3)
        transport.reduce_scatter(shard, everyone[rank].clone())
        torch.testing.assert_close(shard, total[3 * rank : 3 * rank + 3])
        out = torch.empty(3 * world)
        transport.all_reduce(out, everyone[rank].clone())
        torch.testing.assert_close(out, total)
        for move, into, sums in ((transport.reduce_scatter, shard, shard.clone()), (transport.all_reduce, out, total)):
            wide = into.double()
            move(wide, everyone[rank].clone(), scale=0.25, accumulate=True)
            torch.testing.assert_close(wide.float(), 1.25 * sums)
            move(wide, everyone[rank].clone(), scale=0.25)
            torch.testing.assert_close(wide.float(), 0.25 * sums)
        value = torch.full((2,), float(rank))
        transport.broadcast(value)
        assert value.tolist() == [0.0, 0.0]


@CHECKS.on(2, 4)
def means_of_fp16_do_not_leave_its_range_where_sums_would() -> None:
    world = dist.get_world_size()
    for transport in _transports():
        for move, numel in ((transport.reduce_scatter, world), (transport.all_reduce, 3)):
            mine = torch.full((numel,), 60000.0, dtype=torch.float16)
            for dtype in (torch.float32, torch.float16):
                out = torch.empty(1 if move == transport.reduce_scatter else 3, dtype=dtype)
                move(out, mine.clone(), scale=1 / world)
                assert (out == 60000.0).all(), (type(transport), out)


@CHECKS.on(2, 4)
def sums_go_in_rank_order_in_fp32() -> None:
    """Not in bf16, where 256 + 1 is 256; and not in the ring's order, which strategies would not share."""
    world, rank = dist.get_world_size(), dist.get_rank()
    transport = _transports()[0]
    assert isinstance(transport, RankOrderTransport)
    mine = torch.full((world,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    for out, call in ((torch.empty(1), transport.reduce_scatter), (torch.empty(world), transport.all_reduce)):
        call(out, mine.clone())
        assert out.tolist() == [256.0 + world - 1] * out.numel()
    numel = 5 * world + 1
    pieces = [_of_rank(r, numel) * 10.0**r for r in range(world)]
    in_order = pieces[0].clone()
    for piece in pieces[1:]:
        in_order += piece
    everything = torch.empty(numel)
    transport.all_reduce(everything, pieces[rank].clone())
    assert torch.equal(everything, in_order), "also where the ranks do not divide the buffer"
    scattered = torch.empty(5)
    transport.reduce_scatter(scattered, pieces[rank][: 5 * world].contiguous())
    assert torch.equal(scattered, in_order[5 * rank : 5 * rank + 5])


@CHECKS.on(2)
def bytes_of_any_dtype_are_gathered() -> None:
    for transport in _transports():
        for dtype in (torch.bool, torch.int8, torch.int64, torch.float8_e4m3fn, torch.complex64):
            shard = torch.tensor([dist.get_rank(), 1]).to(dtype)
            full = torch.empty(4, dtype=dtype)
            transport.all_gather(full, shard)
            expected = torch.tensor([0, 1, 1, 1]).to(dtype)
            assert torch.equal(full.view(torch.uint8), expected.view(torch.uint8)), dtype
            transport.broadcast(shard)
            assert torch.equal(shard.view(torch.uint8), expected[:2].view(torch.uint8)), dtype


@CHECKS.on(2)
def gathers_use_the_group_that_is_kept_for_them() -> None:
    """So that they run beside reductions, which one communicator would put one after the other."""
    group, gathers = dist.group.WORLD, dist.new_group([0, 1])
    assert group is not None
    transport = make_transport(group, gathers, CPU)
    assert isinstance(transport, RankOrderTransport)
    assert transport.gather_group is gathers and transport.group is group
    with patch.object(process_group, "all_gather_flat", wraps=all_gather_flat) as gather:
        transport.all_gather(torch.empty(4), torch.ones(2))
    assert [call.args[0] for call in gather.call_args_list] == [gathers]


@CHECKS.on(2)
def cuda_tensors_need_nccl() -> None:
    everyone = dist.group.WORLD
    assert everyone is not None
    with pytest.raises(ValueError, match=r"must have the nccl backend, got '.*gloo.*'"):
        make_transport(everyone, everyone, torch.device("cuda"))
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    local = make_transport(alone, alone, torch.device("cuda"))
    assert isinstance(local, LocalTransport) and local.ranks == [dist.get_rank()]


@CHECKS.on(2)
def what_did_not_finish_is_said() -> None:
    error = unfinished("all-gather of x", [_transports()[0]], RuntimeError("Connection closed by peer"))
    assert str(error).startswith("all-gather of x must be joined by all of ranks [0, 1], and did not finish on rank ")
    assert "Connection closed by peer" in str(error) and "different orders" in str(error)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([*range(1024), 1025], "[0-1023, 1025]"),
        (
            range(0, 1024, 8),
            "[0, 8, 16, 24, 32, 40, 48, 56, ... (128 ranks), 960, 968, 976, 984, 992, 1000, 1008, 1016]",
        ),
    ],
)
def test_many_ranks_are_named_in_a_line(ranks: Sequence[int], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16,384 ranks each would else print all, and hide what happened."""
    monkeypatch.setattr(dist, "get_rank", lambda: 1025)
    error = unfinished("all-gather of x", [LocalTransport(ranks)], RuntimeError("closed"))
    assert f"must be joined by all of ranks {words}, and did not finish" in str(error)


def test_one_rank_alone_copies() -> None:
    local = LocalTransport()
    out, source = torch.zeros(3), torch.arange(3.0)
    for move in (local.all_gather, local.reduce_scatter, local.all_reduce):
        out.zero_()
        move(out, source)
        assert torch.equal(out, source)
        move(source, source)
    local.broadcast(source)


def _run_on_cuda() -> None:
    torch.set_default_device(torch.device("cuda", torch.cuda.current_device()))
    for check in (
        each_collective_does_what_it_says,
        means_of_fp16_do_not_leave_its_range_where_sums_would,
        sums_go_in_rank_order_in_fp32,
        bytes_of_any_dtype_are_gathered,
    ):
        check()


@pytest.mark.gpu(1)
def test_on_devices() -> None:
    run_ranks(2, _run_on_cuda, backend="nccl")


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
