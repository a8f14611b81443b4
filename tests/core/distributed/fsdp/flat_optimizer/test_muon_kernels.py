"""Muon's Triton kernels compute what the torch operations compute.

tests/core/test_interpreted_kernels.py runs the check.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import FlatMuon, MixedPrecisionPolicy, fully_shard
from megatron.core.distributed.fsdp.flat_optimizer.adamw_update import AdamWUpdate, FlatShard
from megatron.core.distributed.fsdp.flat_optimizer.flat_runs import Run
from megatron.core.distributed.fsdp.flat_optimizer.hyperparameter_table import COLUMNS
from megatron.core.distributed.fsdp.flat_optimizer.muon_update import (
    MuonUpdate,
    Rates,
    RoundPart,
    Stretch,
    VectorRun,
)
from megatron.core.distributed.fsdp.matrices import gram_iteration
from tests.support.models import difference
from tests.support.plain_muon import PlainMuon
from tests.support.triton_interpreter import let_ranges_be_loaded

CPU = torch.device("cpu")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# Words of 16 elements, and of one.
ALIGNED = [Stretch(16, 32, 0, 4096, 2.0), Stretch(4160, 4128, 4096, 64, 0.5)]
ODD = [Stretch(3, 1, 7, 2049, 3.0), Stretch(2060, 2050, 2056, 5, 0.25)]


def _compare_matrices() -> None:
    generator = torch.Generator().manual_seed(0)
    works = (MuonUpdate(uses_kernels=False), MuonUpdate(uses_kernels=True))
    cases = [
        (ALIGNED, Rates(0.1, 0.2, 0.95, True), FP32, FP32, BF16, FP16),
        (ODD, Rates(0.1, 0.0, 0.95, False), FP32, BF16, None, FP16),
        (ODD, Rates(0.1, 0.2, 0.25, True), BF16, FP32, None, BF16),
    ]
    for stretches, rates, main_dtype, grad_dtype, model_dtype, result_dtype in cases:
        main, grad, momentum, result = (torch.randn(4300, generator=generator) for _ in range(4))
        found = []
        for work in works:
            part = RoundPart(0, 0, [stretch._replace(scale=1.0) for stretch in stretches], stretches)
            work.prepare(part, CPU)
            own, weights, sent = momentum.clone(), main.to(main_dtype, copy=True), torch.zeros(4300)
            model = None if model_dtype is None else torch.zeros(4300, dtype=model_dtype)
            work.accumulate(part, rates, grad.to(grad_dtype), own, sent, torch.tensor([0.5]))
            work.apply(part, rates, weights, model, result.to(result_dtype), 0.2)
            found.append((own, sent, weights, weights if model is None else model))
        for ours, theirs in zip(found[1], found[0], strict=True):
            # Rounding differs: only torch fuses products with sums, and the interpreter cuts bf16 off where devices round.
            rtol, atol = (2.0**-6, 1e-3) if ours.dtype == BF16 else (1e-5, 1e-6)
            torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)
            assert not torch.equal(theirs, main)


def _compare_vectors() -> None:
    generator = torch.Generator().manual_seed(0)
    coefficients = torch.rand(2, len(COLUMNS), generator=generator)
    coefficients[:, -1] = 0.0
    main, grad = (torch.randn(3000, generator=generator) for _ in range(2))
    state = torch.rand(2, 2500, generator=generator)
    work, rows = MuonUpdate(uses_kernels=True), [VectorRun(5, 0, 0, 2100), VectorRun(2200, 2100, 1, 7)]
    weights, model, own = main.clone(), torch.zeros(3000, dtype=BF16), state.clone()
    work.update_vectors(
        work.vectors(rows, [True] * 2, CPU), weights, model, grad.to(BF16), (own[0], own[1]), coefficients
    )
    for begin, place, table_row, numel in rows:
        shard = FlatShard(
            main=main[begin : begin + numel].clone(),
            exp_avg=state[0, place : place + numel],
            exp_avg_sq=state[1, place : place + numel],
            remainder=None,
            model=None,
            runs=(Run(0, numel, table_row),),
            blocks=None,
        )
        AdamWUpdate(uses_kernels=False).update(shard, grad.to(BF16)[begin : begin + numel], coefficients)
        for ours, theirs in (
            (weights[begin : begin + numel], shard.main),
            (own[0, place : place + numel], shard.exp_avg),
            (own[1, place : place + numel], shard.exp_avg_sq),
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model[begin : begin + numel].float(), shard.main, rtol=2.0**-6, atol=1e-3)
    assert torch.equal(weights[2105:2200], main[2105:2200]) and not model[2105:2200].any()


class _Matrices(nn.Module):
    """Weights whose gradients are what they are multiplied with; the small matrix is iterated on by itself."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(128, 192), (256, 128), (8, 20), (30,)]
        self.weights = nn.ParameterList(
            nn.Parameter((torch.randn(shape, generator=generator) * 0.1).bfloat16().float()) for shape in shapes
        )

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]).sum()


def _train() -> None:
    """Steps of a model through all kernels."""
    gram_iteration.SHORTEST = 128
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = _Matrices()
        whole = [w.detach().clone() for w in net.weights]
        fully_shard(net, mp_policy=MixedPrecisionPolicy(main_params_dtype=FP32))
        vector = net.weights[3]
        groups = [{"params": list(net.weights)[:3], "use_muon": True}, {"params": [vector], "weight_decay": 0.1}]
        optimizer = FlatMuon(groups, lr=0.02, weight_decay=0.1, nesterov=True)
        reference = PlainMuon(whole[:3], lr=0.02, weight_decay=0.1, nesterov=True)
        adamw = torch.optim.AdamW([whole[3]], lr=0.02, weight_decay=0.1)
        for step in range(2):
            generator = torch.Generator().manual_seed(step + 1)
            gradients = [torch.randn(w.shape, generator=generator) for w in whole]
            net(gradients).backward()
            optimizer.step()
            optimizer.zero_grad()
            reference.step(gradients[:3])
            whole[3].grad = gradients[3]
            adamw.step()
        for mine, theirs in zip(net.weights, whole, strict=True):
            assert difference(mine.detach().full_tensor(), theirs) < 2e-2, theirs.shape
    finally:
        dist.destroy_process_group()


def check_interpreted() -> None:
    let_ranges_be_loaded()
    _compare_matrices()
    _compare_vectors()
    _train()
