"""The core trains with an observer that does nothing, and gives the numbers that it gives with the checks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import fully_shard, fully_shard_context
from megatron.core.distributed.fsdp.api import fully_shard as core
from megatron.core.distributed.fsdp.api.module import fully_shard_context as core_context
from megatron.core.distributed.fsdp.checks.observer import RankObserver
from megatron.core.distributed.fsdp.config.engine_options import EngineOptions
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from megatron.core.distributed.fsdp.runtime.observer import Observer
from tests.support.models import context_of
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


class _Layer(nn.Module):
    """Uses its second weight only if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.uses_second = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return x + self.second(x) if self.uses_second else x


def _train(shard: Any) -> tuple[Any, list[torch.Tensor]]:
    """Train, evaluate in between, and leave out a weight on all ranks."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(*(_Layer() for _ in range(3)))
    for layer in net:
        shard(layer)
    shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found: list[torch.Tensor] = []
    for step in range(5):
        net[1].uses_second = step != 3
        loss = net(torch.full((2, 6), step / 5)).square().mean()
        loss.backward()
        found += [torch.zeros(1) if p.grad is None else p.grad.full_tensor() for p in net.parameters()]
        assert (net[1].second.weight.grad is None) is (step == 3)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(net(torch.ones(2, 6)))
    return net, [*found, *(p.full_tensor() for p in net.parameters())]


@CHECKS.on(1, 2)
def the_core_alone_trains_with_the_same_numbers() -> None:
    mesh, placements = init_device_mesh("cpu", (dist.get_world_size(),)), strategy_placements("optim_grads_params")
    shard_core = partial(core.fully_shard, mesh=mesh, placements=placements)
    (alone, numbers), (checked, expected) = map(_train, (shard_core, fully_shard))
    assert type(context_of(alone).observer) is Observer and type(context_of(checked).observer) is RankObserver
    assert all(map(torch.equal, numbers, expected)) and context_of(alone).planner.in_plan
    assert context_of(alone).observer.progress[0] == 0 < context_of(checked).observer.progress[0]


@CHECKS.on(1)
def the_debug_mode_needs_the_checks() -> None:
    with (
        pytest.raises(NotImplementedError, match="debug=True"),
        core_context(options=EngineOptions(debug=True)),
    ):
        pass
    with fully_shard_context(debug=True) as context:
        assert context.debug


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_core_alone(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
