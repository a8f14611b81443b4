"""Hybrid sharding trains as no sharding does: over the inner axis each microbatch, over the outer one once a step."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.fsdp import fully_shard_optimizer
from tests.core.distributed.fsdp.hybrid import (
    HYBRIDS,
    WORLD,
    assert_equal_whole,
    backward_in_order,
    backward_sharded,
    make_hybrid_net,
)
from tests.core.distributed.fsdp.models import assert_at_rest, context_of, make_net
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


@CHECKS.on(WORLD)
def hybrid_sharding_equals_no_sharding_to_the_last_bit() -> None:
    """Losses, gradients and weights of each step, for all strategies inside and outside, with overlap and without."""
    for strategy, outer in HYBRIDS:
        for num_microbatches, overlaps in ((1, True), (1, False), (3, True), (3, False)):
            net, plain = make_hybrid_net(strategy, outer, overlaps=overlaps), make_net(2)
            ours = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
            theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
            for step in range(3):
                losses = backward_sharded(net, step, num_microbatches)
                expected = backward_in_order(plain, step, num_microbatches, strategy)
                what = f"{strategy}, {outer} outside, {num_microbatches} microbatches, step {step}"
                assert all(map(torch.equal, losses, expected)), what
                assert_equal_whole(net, plain, gradients=True)
                ours.step()
                theirs.step()
                assert_equal_whole(net, plain, gradients=False)
                ours.zero_grad()
            assert context_of(net).plan is not None
            assert_at_rest(net)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_hybrid(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
