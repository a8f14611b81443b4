"""The engine on CUDA: the same numbers as unsharded, no race between its streams, nothing left in memory."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp import (
    FlatAdamW,
    FlatMuon,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.comm.streams import CudaStreams
from megatron.core.distributed.fsdp.config.placement import STRATEGIES, strategy_placements
from tests.support.delayed_streams import DelayedStreams
from tests.support.launch import run_ranks
from tests.support.models import context_of, full

pytestmark = pytest.mark.gpu(2)
RANKS = [pytest.param(1, marks=pytest.mark.gpu(1)), 2]

WIDTH = 256


class Block(nn.Module):
    """Odd sizes, a parameter of one row, and enough arithmetic to be late when it is delayed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.down = nn.Linear(3 * WIDTH + 1, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.recomputes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x


def make_nets(dtype: torch.dtype) -> tuple[Net, Net]:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    reference = Net().to("cuda", dtype)
    return reference, copy.deepcopy(reference)


def shard(net: Net, strategy: str, **options: Any) -> Net:
    for unit in (*net.blocks, net):
        fully_shard(unit, placements=strategy_placements(strategy), **options)
    return net


def batch(step: int, num_pieces: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(step)
    return torch.randn(num_pieces, 64, WIDTH, device="cuda", generator=generator).to(dtype)


def train(
    net: Net, optimizer: torch.optim.Optimizer, *, steps: int, microbatches: int, dtype: torch.dtype
) -> list[float]:
    """Losses [steps * microbatches] of this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(steps):
        pieces = batch(step, microbatches * size, dtype)
        for index in range(microbatches):
            with microbatch(net, is_first=index == 0, is_last=index == microbatches - 1):
                loss = net(pieces[index * size + rank]).float().square().mean() / microbatches
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).tolist()


def train_reference(net: Net, *, steps: int, microbatches: int, dtype: torch.dtype) -> list[float]:
    """Losses of this rank's pieces, of a net that trains on all ranks' pieces alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        pieces = batch(step, microbatches * size, dtype)
        for index, piece in enumerate(pieces):
            loss = net(piece).float().square().mean() / microbatches
            (loss / size).backward()
            if index % size == rank:
                losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).tolist()


def _parity() -> None:
    for microbatches in (1, 3):
        for recomputes in (False, True):
            reference, source = make_nets(torch.float32)
            expected = train_reference(reference, steps=4, microbatches=microbatches, dtype=torch.float32)
            for strategy in STRATEGIES:
                net = shard(copy.deepcopy(source), strategy)
                net.recomputes = recomputes
                context_of(net).change_options(poisons=True)
                optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-3))
                losses = train(net, optimizer, steps=4, microbatches=microbatches, dtype=torch.float32)
                # Sums over microbatches and ranks are taken in another order.
                torch.testing.assert_close(losses, expected, rtol=2e-5, atol=1e-6, msg=f"{strategy} {microbatches}")
                for (name, a), b in zip(reference.named_parameters(), net.parameters(), strict=True):
                    # AdamW's first updates are near the sign of the gradient, which rounding may flip near zero.
                    difference = (a - full(b)).abs().max()
                    assert difference < 2e-3, f"{strategy} {microbatches} {name}: {difference}"


@pytest.mark.parametrize("num_ranks", RANKS)
def test_sharded_equals_unsharded_on_cuda(num_ranks: int) -> None:
    """Each strategy, with and without accumulation and recomputation, with released ranges poisoned."""
    run_ranks(num_ranks, _parity, backend="nccl")


def _optimizer(net: Net, name: str) -> torch.optim.Optimizer:
    if name == "flat, during the next forward":
        return FlatAdamW(net.parameters(), lr=1e-3, overlaps_forward=True)
    if name == "Muon, during the next forward":
        matrices = [p for p in net.parameters() if p.dim() == 2]
        of_muon = set(matrices)
        others = [p for p in net.parameters() if p not in of_muon]
        return FlatMuon(
            [{"params": matrices, "use_muon": True}, {"params": others}],
            lr=1e-3,
            overlaps_forward=True,
            round_numel=2**17,
        )
    return fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-3))


def _trace(
    streams: type[CudaStreams], strategy: str, optimizer_name: str, microbatches: int, options: dict[str, Any]
) -> tuple[list[float], torch.Tensor]:
    """Losses and final weights of a short training on these streams."""
    _, net = make_nets(torch.bfloat16)
    context_module = importlib.import_module("megatron.core.distributed.fsdp.runtime.context")
    with patch.object(context_module, "make_streams", streams), fully_shard_context() as context:
        shard(net, strategy, **options)
    assert type(context.streams) is streams
    context.change_options(poisons=True)
    optimizer = _optimizer(net, optimizer_name)
    losses = train(net, optimizer, steps=5, microbatches=microbatches, dtype=torch.bfloat16)
    if isinstance(optimizer, FlatAdamW):
        optimizer.synchronize()
    weights = torch.cat([p.to_local().flatten().float() for p in net.parameters()])  # type: ignore[attr-defined]
    assert context.planner.plan is not None and not context.planner._departures
    return losses, weights


def _races(transport: str, optimizer_name: str, *, least_memory: bool = False) -> str | None:
    """Why the transport cannot serve these ranks, or None where nothing races."""
    for strategy in ("optim", "optim_grads", "optim_grads_params"):
        for microbatches, main_grads in ((1, None), (3, torch.bfloat16)):
            policy = MixedPrecisionPolicy(main_grads_dtype=main_grads)
            options = {"mixed_precision_policy": policy, "transport": transport, "least_memory": least_memory}
            arguments = (strategy, optimizer_name, microbatches, options)
            try:
                losses, weights = _trace(CudaStreams, *arguments)
            except ValueError as error:
                if "cannot serve" not in str(error):
                    raise
                return str(error)
            for _ in range(2):
                late_losses, late_weights = _trace(DelayedStreams, *arguments)
                assert late_losses == losses, (strategy, microbatches)
                assert torch.equal(late_weights, weights), (strategy, microbatches)
    return None


@pytest.mark.parametrize("optimizer", ["of torch", "flat, during the next forward", "Muon, during the next forward"])
@pytest.mark.parametrize("transport", ["nccl", "peer_copy", "symm"])
def test_random_delays_on_any_stream_do_not_change_a_bit(transport: str, optimizer: str) -> None:
    """A wait that is missing between two streams, or two ranks, lets one read too early or write too soon."""
    for reason in run_ranks(2, _races, transport, optimizer, backend="nccl"):
        if reason is not None:
            pytest.skip(reason)


@pytest.mark.parametrize("optimizer", ["of torch", "flat, during the next forward", "Muon, during the next forward"])
@pytest.mark.gpu(1)
def test_random_delays_do_not_change_a_bit_where_backward_writes_main_gradients(optimizer: str) -> None:
    run_ranks(1, _races, "nccl", optimizer, backend="nccl")


@pytest.mark.parametrize("optimizer", ["of torch", "flat, during the next forward"])
def test_random_delays_do_not_change_a_bit_of_units_with_the_least_memory(optimizer: str) -> None:
    run_ranks(2, functools.partial(_races, "nccl", optimizer, least_memory=True), backend="nccl")


def _memory() -> None:
    before = torch.cuda.memory_allocated()
    gc.disable()
    net = make_nets(torch.bfloat16)[1]
    shard(net, "optim_grads_params")
    at_rest = torch.cuda.memory_allocated() - before
    optimizer = fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-3))
    train(net, optimizer, steps=3, microbatches=1, dtype=torch.bfloat16)
    steady = torch.cuda.memory_allocated()
    train(net, optimizer, steps=2, microbatches=2, dtype=torch.bfloat16)
    assert torch.cuda.memory_allocated() == steady, "a step leaves nothing behind"
    numel = sum(p.numel() for p in net.parameters())
    # fp32 main and bf16 model weights over two ranks; alignment and bookkeeping stay below a tenth.
    assert at_rest < 1.1 * numel * 6 / dist.get_world_size()
    del net, optimizer
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() - before < 2**20, "deleting frees without the garbage collector"
    gc.enable()


@pytest.mark.parametrize("num_ranks", RANKS)
def test_memory_is_sharded_steady_and_freed(num_ranks: int) -> None:
    run_ranks(num_ranks, _memory, backend="nccl")


def _kernel_intervals(step: Callable[[], None]) -> dict[str, list[tuple[float, float]]]:
    """(begin, end) in microseconds of the gathers and reductions of two steps, by kind."""
    for _ in range(3):
        step()
    dist.all_reduce(torch.zeros(1, device="cuda"))  # ranks start together
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        step()
        step()
        torch.cuda.synchronize()
    found: dict[str, list[tuple[float, float]]] = {"AllGather": [], "ReduceScatter": []}
    for event in profile.events():
        for kind, intervals in found.items():
            if "nccl" in event.name and kind in event.name:
                intervals.append((event.time_range.start, event.time_range.end))
    assert all(found.values()), "the profiler saw gathers and reductions"
    return found


def _overlaps(found: dict[str, list[tuple[float, float]]]) -> int:
    return sum(max(a[0], b[0]) < min(a[1], b[1]) for a in found["AllGather"] for b in found["ReduceScatter"])


def _communicators() -> None:
    counts = {}
    for has_own_group in (False, True):
        torch.manual_seed(0)
        # 300 MB a unit: communication takes longer than compute and than the host's launches, so what may overlap does.
        width = 12288
        layers = (nn.Linear(width, width, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(6))
        net = nn.Sequential(*layers)
        group = dist.new_group() if has_own_group else None
        for unit in (*net, net):
            fully_shard(unit, fsdp_group_ag=group)
        optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=1e-3))
        inputs = torch.randn(8, width, device="cuda", dtype=torch.bfloat16)

        def step(net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer, x: torch.Tensor = inputs) -> None:
            net(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        counts[has_own_group] = _overlaps(_kernel_intervals(step))
    assert counts[False] == 0, "one communicator runs its collectives one after the other"
    assert counts[True] > 0, "two communicators run a gather beside a reduction"


def test_gathers_run_beside_reductions_on_a_communicator_of_their_own() -> None:
    """Collectives of one NCCL communicator never overlap, whatever streams they are on."""
    run_ranks(2, _communicators, backend="nccl")
