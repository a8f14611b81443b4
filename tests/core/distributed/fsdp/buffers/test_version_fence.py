"""What autograd saved of gathered weights is refused after their release: an error, never gradients of whatever lies there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import context_of, loss_of, make_net, my_piece, shard_net
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


@CHECKS.on(2)
def a_backward_through_released_weights_is_refused() -> None:
    """A hook keeps a tensor that is no output of its unit: backward from there does not gather the unit's weights.

    Without poison, so that the fence is all there is; before there is a plan, and with the weights in an arena.
    """
    net = shard_net(make_net(3), poisons=False)
    aside: list[torch.Tensor] = []

    def keep(block: Any, args: tuple[torch.Tensor], out: torch.Tensor) -> None:
        aside.append(nn.functional.linear(args[0], block.up.weight).square().sum())

    for _ in range(3):
        handle = net.blocks[0].register_forward_hook(keep)
        loss = loss_of(net, my_piece(0))
        handle.remove()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            aside.pop().backward()
        del loss
        net.zero_grad()
        loss_of(net, my_piece(0)).backward()  # the next step is right again, and records or confirms a plan
        net.zero_grad()
    assert context_of(net).plan is not None


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_version_fence(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
