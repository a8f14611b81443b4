"""Muon on matrices that tensor parallelism splits: whole ones in two ways, or each rank's part by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.core.distributed.fsdp import FlatMuon, ModelParallel, fully_shard
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from tests.support.models import difference, full
from tests.support.plain_muon import PlainMuon
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
LR, DECAY, TENSOR_RANKS = 0.02, 0.1, 2
# Whole shapes, and the dim that is split; None: each tensor-parallel rank has the whole.
SHAPES = [((24, 10), 0), ((10, 36), 1), ((12, 12), 0), ((8, 6), None)]


def _whole(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape, _ in SHAPES]


def _part(matrix: torch.Tensor, dim: int | None, mesh: DeviceMesh) -> torch.Tensor:
    if dim is None:
        return matrix.clone()
    return matrix.chunk(TENSOR_RANKS, dim)[mesh.get_local_rank("tp")].clone()


class _Parts(nn.Module):
    """Weights whose gradients are what they are multiplied with."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh, self.weights = mesh, nn.ParameterList()
        for matrix, (_, dim) in zip(_whole(0), SHAPES, strict=True):
            weight = nn.Parameter(_part(matrix, dim, mesh))
            if dim is not None:
                weight.tensor_model_parallel, weight.partition_dim = True, dim  # type: ignore[attr-defined]
            self.weights.append(weight)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        parts = [_part(g, dim, self.mesh) for g, (_, dim) in zip(gradients, SHAPES, strict=True)]
        return torch.stack([(w * part).sum() for w, part in zip(self.weights, parts, strict=True)]).sum()


def _train(strategy: str, **options: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Two steps; return whole weights, and those of Muon on whole matrices."""
    mesh = init_device_mesh("cpu", (TENSOR_RANKS, dist.get_world_size() // TENSOR_RANKS), mesh_dim_names=("tp", "dp"))
    module = _Parts(mesh)
    placements = strategy_placements(strategy, "dp")
    fully_shard(module, mesh, placements=placements, model_parallel=ModelParallel(tensor_axis="tp"))
    named: Any = {"params": list(module.parameters()), "use_muon": True}
    optimizer = FlatMuon([named], lr=LR, weight_decay=DECAY, **options)
    whole = _whole(0)
    dtype = torch.float32 if options.get("fp32_matmul_prec") == "highest" else torch.bfloat16
    reference = PlainMuon(whole, lr=LR, weight_decay=DECAY, dtype=dtype)
    for step in range(2):
        module(_whole(step + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.step(_whole(step + 1))
    return [full(weight) for weight in module.weights], whole


@CHECKS.on(2, 4)
def gathered_parts_are_the_whole_matrix() -> None:
    for strategy in ("optim_grads_params", "no_shard"):
        for got, expected in zip(*_train(strategy), strict=True):
            assert torch.equal(got, expected), expected.shape


@CHECKS.on(2, 4)
def parts_that_work_together_are_as_the_whole() -> None:
    """In fp32, for sums over ranks come in another order; the long side is iterated on where it is split."""
    for got, expected in zip(*_train("optim", tp_mode="distributed", fp32_matmul_prec="highest"), strict=True):
        assert difference(got, expected) < 1e-5, expected.shape


@CHECKS.on(2)
def parts_by_themselves_are_matrices() -> None:
    got, _ = _train("optim_grads_params", tp_mode="blockwise")
    for index, (_, dim) in enumerate(SHAPES):
        matrix = _whole(0)[index]
        pieces = [matrix] if dim is None else list(matrix.chunk(TENSOR_RANKS, dim))
        weights = [piece.clone() for piece in pieces]
        reference = PlainMuon(weights, lr=LR, weight_decay=DECAY)
        for step in range(2):
            gradient = _whole(step + 1)[index]
            reference.step([gradient] if dim is None else list(gradient.chunk(TENSOR_RANKS, dim)))
        assert torch.equal(got[index], weights[0] if dim is None else torch.cat(weights, dim)), index


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
