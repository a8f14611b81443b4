"""Ranks that run units of equal size in another order are told, before the wrong weights that they exchanged train anything."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import fully_shard, fully_shard_context
from megatron.core.distributed.fsdp.comm import alike
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


class _Branches(nn.Module):
    """Two layers of equal size, which run in the order of ``order``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.order = [0, 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


def _branches() -> _Branches:
    model = _Branches()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def _swap_on_rank_1(model: _Branches) -> None:
    if dist.get_rank() == 1:
        model.order = [1, 0]


_SAID = (
    r"got as collective 1 the forward's all-gather of layers\.0\.weight and 1 more \(\d+ elements\) on ranks "
    r"\[0\] and forward's all-gather of layers\.1\.weight and 1 more \(\d+ elements\) on ranks \[1\]; those would exchange"
)


@CHECKS.on(2)
def another_order_in_the_first_step_is_an_error_on_all_ranks() -> None:
    """All-gathers of one size meet, whatever they gather: nothing hangs, and weights are those of another layer."""
    model = _branches()
    _swap_on_rank_1(model)
    with pytest.raises(RuntimeError, match=_SAID):
        _step(model)


@CHECKS.on(2)
def another_order_of_a_first_evaluation_is_an_error_on_all_ranks() -> None:
    model = _branches()
    _swap_on_rank_1(model)
    with torch.no_grad():
        model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=_SAID):
        model(torch.ones(2, 4))


@CHECKS.on(2)
def a_new_order_is_compared_before_it_is_planned() -> None:
    model = _branches()
    for _ in range(3):
        _step(model)
    model.order = [1, 0]
    _step(model)  # leaves the plan
    with mock.patch.object(alike, "are_alike", wraps=alike.are_alike) as compared:
        for _ in range(2):  # the new order is recorded, and comes again
            _step(model)
        assert compared.call_count == 1
        for _ in range(3):
            _step(model)
        assert compared.call_count == 1, "a step that follows the plan costs nothing"


@CHECKS.on(2)
def every_collective_is_compared_under_the_debug_mode() -> None:
    """So a difference is told before a rank waits for another in another collective, also in a step that follows a plan."""
    with fully_shard_context(debug=True) as context:
        model = _branches()
    for _ in range(4):
        before = context.unsharder.num_gathers + context.grad_reducer.num_reductions
        with mock.patch.object(alike, "are_alike", wraps=alike.are_alike) as compared:
            _step(model)
        issued = context.unsharder.num_gathers + context.grad_reducer.num_reductions - before
        assert compared.call_count == issued + (context.plan is None)
    _swap_on_rank_1(model)
    with pytest.raises(
        RuntimeError,
        match=r"got as collective \d\d the last reduction of \S*layers\.1.* on ranks \[0\] and last reduction of \S*layers\.0",
    ):
        _step(model)


@CHECKS.on(2)
def what_one_rank_unshards_alone_is_told_under_the_debug_mode() -> None:
    """Also where no step is under way."""
    with fully_shard_context(debug=True):
        model = _branches()
    _step(model)
    with pytest.raises(RuntimeError, match=r"layers\.0.* on ranks \[0\] and forward's all-gather of \S*layers\.1"):
        model.layers[dist.get_rank()].unshard()  # type: ignore[operator]


@CHECKS.on(2)
def a_rank_that_ends_sooner_is_named() -> None:
    order = ["all-gather of a", "last reduction of a"][: 2 - dist.get_rank()]
    with pytest.raises(
        RuntimeError, match=r"collective 2 the last reduction of a on ranks \[0\] and end on ranks \[1\]"
    ):
        alike.check_same_order(order, [_world()], _CPU)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


_CPU = torch.device("cpu")


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
