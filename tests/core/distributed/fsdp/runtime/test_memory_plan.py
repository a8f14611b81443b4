"""Memory is told before it is used, and what is spent on keeping weights gathered saves the gathers that it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.distributed.fsdp import MixedPrecisionPolicy, fully_shard_optimizer, microbatch
from tests.support.models import (
    STRATEGY_NAMES,
    Net,
    assert_at_rest,
    context_of,
    full,
    loss_of,
    make_net,
    my_piece,
    order_of,
    shard_net,
)
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


def _net(strategy: str = "optim_grads_params", *, memory_budget_nbytes: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    net = shard_net(make_net(4, dtype=torch.bfloat16), strategy, policy=MixedPrecisionPolicy())
    context_of(net).change_options(memory_budget_nbytes=memory_budget_nbytes)
    return net, fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))


def _step(net: Net, optimizer: torch.optim.Optimizer, num_microbatches: int) -> list[torch.Tensor]:
    losses = []
    for at in range(num_microbatches):
        with microbatch(net, is_first=at == 0, is_last=at == num_microbatches - 1):
            loss = loss_of(net, my_piece(at))
            loss.backward()
            losses.append(loss.detach())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def _engine_nbytes(net: Net) -> int:
    """Bytes of the engine's tensors that are allocated now, each storage once."""
    context = context_of(net)
    tensors: list[torch.Tensor] = list(context.planner.arenas)
    for group in context.groups:
        tensors += [group.weights.main.local, group.weights.model.local, group.grads.main.storage.flat]
        tensors += [group.weights.full.local, group.grads.input.storage.flat]
    storages: dict[int, Any] = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


@CHECKS.on(1, 2)
def what_is_told_is_what_is_allocated() -> None:
    for strategy in STRATEGY_NAMES:
        net, optimizer = _net(strategy)
        expected = context_of(net).describe()
        assert not expected.is_planned and "expected from the order of registration" in str(expected)
        for _ in range(2):
            _step(net, optimizer, 1)
        planned = context_of(net).describe()
        assert planned.is_planned
        used, total = (sum(getattr(g.layout, n) for g in context_of(net).groups) for n in ("used_numel", "total_numel"))
        assert sum(planned.padding.values()) == pytest.approx(total / used - 1)
        assert f"padding in these {total / used - 1:>20.2%}" in str(planned) and "alignment" in str(planned)
        assert planned.at_rest == _engine_nbytes(net), strategy
        assert expected.at_rest == pytest.approx(planned.at_rest, rel=0.02), strategy
        net(my_piece(0)[0].bfloat16()).float().sum().backward()
        assert planned.peak == _engine_nbytes(net), strategy


@CHECKS.on(2)
def a_budget_keeps_the_last_units_and_saves_their_gathers() -> None:
    """The same numbers to the last bit, and as many gathers fewer as the report says; kept weights are in a range of their own."""
    plain, plain_optimizer = _net()
    block = context_of(plain).groups[1].weights.full.local_nbytes
    for num_blocks_kept, num_microbatches in ((1, 1), (2, 1), (2, 3), (4, 3)):
        plain, plain_optimizer = _net()
        rich, rich_optimizer = _net(memory_budget_nbytes=num_blocks_kept * block)
        counts = []
        for _ in range(4):
            before = [order_of(context_of(net)).num_gathers for net in (plain, rich)]
            expected = _step(plain, plain_optimizer, num_microbatches)
            assert all(map(torch.equal, _step(rich, rich_optimizer, num_microbatches), expected))
            assert_at_rest(rich)
            counts = [order_of(context_of(net)).num_gathers - b for net, b in zip((plain, rich), before, strict=True)]
        # The last block stays gathered where forward turns into backward, budget or not.
        saved = (num_blocks_kept - 1) + (num_microbatches - 1) * (2 * num_blocks_kept - 1)
        assert counts[0] - counts[1] == saved, (num_blocks_kept, num_microbatches, counts)
        report = context_of(rich).describe()
        assert report.stays_unsharded == num_blocks_kept * block and report.saved_traffic == report.stays_unsharded // 2
        assert "stays unsharded for backward" in str(report)
        with torch.no_grad():
            assert torch.equal(loss_of(rich, my_piece(7)), loss_of(plain, my_piece(7)))
        assert_at_rest(rich)
        for own, theirs in zip(rich.parameters(), plain.parameters(), strict=True):
            assert torch.equal(full(own), full(theirs))


@CHECKS.on(2)
def a_failed_step_keeps_nothing() -> None:
    net, optimizer = _net(memory_budget_nbytes=2**20)
    for _ in range(2):
        _step(net, optimizer, 2)

    def fail(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("in forward")

    with microbatch(net, is_first=True, is_last=False):
        loss_of(net, my_piece(0)).backward()
    net.around = fail
    with pytest.raises(ValueError, match="in forward"), microbatch(net, is_first=False, is_last=True):
        loss_of(net, my_piece(1))
    assert_at_rest(net)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_memory_plan(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
