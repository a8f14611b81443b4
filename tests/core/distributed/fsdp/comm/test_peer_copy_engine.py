"""The engine keeps peer copy's rules: no rank reads another's weights early, and reductions find gradients where planned."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import fully_shard, fully_shard_optimizer, microbatch
from megatron.core.distributed.fsdp.buffers.gradients import Gradients
from megatron.core.tensor_parallel.linear_function import linear_with_main_grad
from tests.support.models import context_of, full, local_of
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
SIZE, NUM_LAYERS = 6, 4


class Layer(nn.Module):
    """A unit whose gradient is written straight to the reduce-scatter input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) / SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(linear_with_main_grad(x, self.weight))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.order = list(range(NUM_LAYERS))
        self.pause = 0.0  # seconds before the second layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, index in enumerate(self.order):
            if place == 1:
                time.sleep(self.pause)
            x = self.layers[index](x)
        return x


def _train(transport: str, orders: list[list[int]], before_step: Callable[[int], None]) -> list[torch.Tensor]:
    """Losses of this rank and the whole weights after steps that run the layers in these orders. Ranks: all."""
    torch.manual_seed(0)
    net = Stack()
    for unit in (*net.layers, net):
        fully_shard(unit, transport=transport)  # type: ignore[arg-type]
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.3))
    inputs = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(dist.get_rank()))
    losses = []
    for step, order in enumerate(orders):
        net.order = order
        loss = net(inputs).square().mean()
        loss.backward()
        losses.append(loss.detach())
        before_step(step)
        optimizer.step()
        optimizer.zero_grad()
    assert context_of(net).planner.plan is not None
    return losses + [full(parameter) for parameter in net.parameters()]


def _train_unsharded(orders: list[list[int]]) -> list[torch.Tensor]:
    """The same by this process alone, without the engine."""
    torch.manual_seed(0)
    net = Stack()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    everyone = [
        torch.randn(3, SIZE, generator=torch.Generator().manual_seed(rank)) for rank in range(dist.get_world_size())
    ]
    own = []
    for order in orders:
        net.order = order
        losses = [net(inputs).square().mean() for inputs in everyone]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        own.append(losses[dist.get_rank()].detach())
    return own + [parameter.detach() for parameter in net.parameters()]


def _assert_right(got: list[torch.Tensor], orders: list[list[int]]) -> None:
    """Bitwise what the process group's transport makes of it, and what a model without the engine does but for rounding."""
    assert all(map(torch.equal, got, _train("nccl", orders, lambda step: None)))
    for own, expected in zip(got, _train_unsharded(orders), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


@CHECKS.on(2)
def weights_are_read_when_their_owner_has_written_them() -> None:
    """One rank is late with its step; the other must not compute with what was there before."""

    def late(step: int) -> None:
        if step % 2 == dist.get_rank():
            time.sleep(0.1)

    orders = [list(range(NUM_LAYERS))] * 5
    _assert_right(_train("peer_copy", orders, late), orders)


@CHECKS.on(2)
def weights_are_not_written_while_another_rank_evaluates_on_them() -> None:
    """A forward without backward ends when all ranks have read: what its rank writes then, no other may see in that forward."""
    outputs = []
    for transport in ("nccl", "peer_copy"):
        torch.manual_seed(0)
        net = Stack()
        for unit in (*net.layers, net):
            fully_shard(unit, transport=transport)
        for step in range(3):
            with torch.no_grad():
                with microbatch(net, is_first=True):  # in which ranks meet before each first gather
                    net(torch.ones(1, SIZE))
                net.pause = 0.2 * dist.get_rank()
                with microbatch(net, is_first=False):
                    outputs.append(net(torch.ones(1, SIZE)))
                net.pause = 0.0
                for parameter in net.parameters():
                    local_of(parameter).fill_(0.1 * step)
    assert all(map(torch.equal, outputs[:3], outputs[3:]))


@CHECKS.on(2)
def gradients_that_had_to_give_way_are_reduced_from_where_the_plan_says() -> None:
    """A layer that runs twice keeps its range to the end of backward, and layers that share it find it taken."""
    usual = list(range(NUM_LAYERS))
    orders = [usual, usual, usual, [*usual, 0], usual, [3, *usual], usual]
    aside: list[bool] = []
    move_input = Gradients.move_input

    def counted(grads: Gradients, flat: torch.Tensor | None, *, home: Any = None, copies: bool = False) -> None:
        if home is not None:
            aside.append(copies)
        move_input(grads, flat, home=home, copies=copies)

    with patch.object(Gradients, "move_input", counted):
        got = _train("peer_copy", orders, lambda step: None)
    assert False in aside and True in aside, "both ways of giving way occurred"
    _assert_right(got, orders)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_peer_copy_engine(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
