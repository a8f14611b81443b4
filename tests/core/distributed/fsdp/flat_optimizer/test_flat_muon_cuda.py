"""``FlatMuon`` and torch's Muon on CUDA: independent of the number of ranks to the bit, without waits of the host."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import FlatMuon, fully_shard, fully_shard_optimizer
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from megatron.core.distributed.fsdp.matrices.newton_schulz import batch_size
from tests.support.launch import run_ranks, served_transports
from tests.support.models import difference, full
from tests.support.plain_muon import PlainMuon

# Matrices that are multiplied alone, by two, and by many; wide, tall and square.
SHAPES = [
    (2048, 2048),
    (5632, 2048),
    (1024, 1024),
    (1024, 1024),
    (1024, 1024),
    *[(256, 2048)] * 5,
    (2048, 256),
    (96, 32),
]
LR, DECAY = 0.02, 0.1


class _Matrices(nn.Module):
    """Matrices whose gradients are what they are multiplied with, the same on all ranks."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        generator = torch.Generator("cuda").manual_seed(0)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, device="cuda", generator=generator) * 0.02) for shape in shapes
        )

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]).sum()


def _gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(step + 1)
    return [torch.randn(shape, device="cuda", generator=generator) for shape in SHAPES]


def _sharded(strategy: str, transport: str = "nccl") -> Any:
    net = nn.ModuleList([_Matrices(SHAPES)])
    placements = strategy_placements(strategy)
    return fully_shard(net[0], placements=placements, transport=transport)  # type: ignore[arg-type]


def _train(net: Any, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> list[torch.Tensor]:
    """The whole weights after steps, the last of which must not make the host wait."""
    gradients = [_gradients(step) for step in range(num_steps)]
    for step in range(num_steps):
        net(gradients[step]).backward()
        with _refusing_waits() if step == num_steps - 1 else nullcontext():
            optimizer.step()
        optimizer.zero_grad()
    if isinstance(optimizer, FlatMuon):
        optimizer.synchronize()  # with overlaps_forward updates still run
    return [full(weight).clone() for weight in net.weights]


@contextmanager
def _refusing_waits() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _flat(net: Any, **options: Any) -> FlatMuon:
    groups = [{"params": list(net.parameters()), "use_muon": True}]
    return FlatMuon(groups, lr=LR, weight_decay=DECAY, nesterov=True, **options)


def _is_muon_whatever_shares_the_matrices() -> None:
    assert [batch_size(*shape, "cuda") for shape in ((2048, 2048), (1024, 1024), (256, 2048))] == [1, 2, 16]
    whole = [w.detach().clone() for w in _Matrices(SHAPES).weights]
    reference = PlainMuon(whole, lr=LR, weight_decay=DECAY, nesterov=True)
    for step in range(3):
        reference.step(_gradients(step))
    net = _sharded("no_shard")
    expected = _train(net, _flat(net))
    for got, theirs in zip(expected, whole, strict=True):
        assert difference(got, theirs) < 2e-2, got.shape  # bf16 products of a batch and of one matrix
    transports = served_transports("nccl", "peer_copy") if dist.get_world_size() > 1 else ["nccl"]
    for strategy, transport, overlaps in (
        ("optim", "nccl", False),
        *(("optim_grads_params", transport, True) for transport in transports),
    ):
        net = _sharded(strategy, transport)
        for got, same in zip(_train(net, _flat(net, overlaps_forward=overlaps)), expected, strict=True):
            assert torch.equal(got, same), (strategy, transport, got.shape)


def _torchs_muon_is_as_on_whole_matrices() -> None:
    net = _sharded("optim_grads_params")
    muon = fully_shard_optimizer(torch.optim.Muon(net.parameters(), lr=LR, adjust_lr_fn="match_rms_adamw"))
    got = _train(net, muon)
    whole = _Matrices(SHAPES)
    reference = torch.optim.Muon(whole.parameters(), lr=LR, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        whole(_gradients(step)).backward()
        reference.step()
        reference.zero_grad()
    for mine, theirs in zip(got, whole.weights, strict=True):
        rows, columns = mine.shape
        alone = batch_size(rows, columns, "cuda") == 1
        # Multi-tensor kernels may contract products and sums otherwise; batches may be multiplied by another kernel.
        assert difference(mine, theirs.detach()) <= (1e-6 if alone else 2e-2), mine.shape


def _muon_on_cuda() -> None:
    _is_muon_whatever_shares_the_matrices()
    _torchs_muon_is_as_on_whole_matrices()


@pytest.mark.gpu(2)
def test_muon_on_two_devices() -> None:
    run_ranks(2, _muon_on_cuda, backend="nccl")


@pytest.mark.gpu(1)
def test_muon_on_one_device() -> None:
    run_ranks(1, _muon_on_cuda, backend="nccl")
