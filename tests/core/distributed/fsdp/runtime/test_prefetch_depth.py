"""Prefetch depth: so many units' weights are on their way, in each direction, and the numbers stay the same."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp import FsdpParameterGroup, fully_shard
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder
from tests.support.models import Net, assert_at_rest, context_of, full, loss_of, make_net, my_piece
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


def _net(forward: int | None = None, backward: int | None = None, *, of_blocks: dict[int, int] | None = None) -> Net:
    net = make_net(6)
    for index, block in enumerate(net.blocks):
        fully_shard(block, forward_prefetch_depth=(of_blocks or {}).get(index))
    return fully_shard(net, forward_prefetch_depth=forward, backward_prefetch_depth=backward)


def _most_alive(net: Net) -> dict[bool, int]:
    """Train three steps; return the most blocks that were unsharded or on their way, in forward and in backward."""
    prefetch, most = Unsharder.prefetch, {True: 0, False: 0}

    def counted(unsharder: Unsharder, group: FsdpParameterGroup, *, forward: bool) -> None:
        prefetch(unsharder, group, forward=forward)
        most[forward] = max(most[forward], len({other.prefix for other in unsharder.live if other.prefix}))

    for step in range(3):
        net.zero_grad()
        with patch.object(Unsharder, "prefetch", counted if step == 2 else prefetch):
            loss_of(net, my_piece(step)).backward()
    return most


@CHECKS.on(2)
def as_many_units_are_prefetched_as_asked() -> None:
    """Those, besides the unit that runs. Where forward turns into backward, what forward has prefetched is still there."""
    assert _most_alive(_net()) == {True: 2, False: 2}
    assert _most_alive(_net(forward=3)) == {True: 4, False: 3}
    assert _most_alive(_net(backward=2)) == {True: 2, False: 3}
    assert _most_alive(_net(forward=0, backward=0)) == {True: 1, False: 1}


@CHECKS.on(2)
def a_unit_may_have_a_depth_of_its_own() -> None:
    """Where none is given, the root's counts."""
    net = _net(forward=0, of_blocks={2: 3})
    assert _most_alive(net)[True] == 4
    units = context_of(net).units
    depths = {unit.name: unit.prefetch_depth(units[0]) for unit in units}
    assert depths["blocks.2"] == (3, 1) and depths["blocks.3"] == (0, 1) == depths["Net"]


@CHECKS.on(2)
def the_numbers_are_the_same_at_any_depth() -> None:
    nets = [_net(), _net(forward=2, backward=3), _net(forward=0, backward=0)]
    context_of(nets[1]).change_options(poisons=True)
    for step in range(4):
        losses = []
        for net in nets:
            net.zero_grad()
            losses.append(loss_of(net, my_piece(step)))
            losses[-1].backward()
            assert_at_rest(net)
        assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])
        for first, *others in zip(*(net.parameters() for net in nets), strict=True):
            assert all(torch.equal(full(first.grad), full(other.grad)) for other in others)


@CHECKS.on(1)
def a_negative_depth_is_refused() -> None:
    for name in ("forward_prefetch_depth", "backward_prefetch_depth"):
        depth: dict[str, Any] = {name: -1}
        with pytest.raises(ValueError, match=f"{name} must be 0 or more units, got -1"):
            fully_shard(nn.Linear(2, 2), **depth)
        for other in (1.5, "1", True):
            wrong: dict[str, Any] = {name: other}
            with pytest.raises(TypeError, match=f"{name} must be a whole number of units, got {other!r}"):
                fully_shard(nn.Linear(2, 2), **wrong)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_prefetch_depth(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
