"""The bytes of a report are those that the strategy sends: each all-gather, reduction and sync of the step, once."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.fsdp import MixedPrecisionPolicy, fully_shard_optimizer, microbatch
from megatron.core.distributed.fsdp.overlap_report.facts import counting_bytes
from megatron.core.distributed.fsdp.overlap_report.trace import BACKWARD, FORWARD
from tests.support.models import context_of, global_batch, loss_of, make_net, shard_net
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


def _of_one_block(strategy: str, num_microbatches: int) -> tuple[list[int], int]:
    """Return bytes of a middle block (gathered in forward, in backward, reduced), and of its whole weights."""
    net = shard_net(make_net(3, dtype=torch.bfloat16), strategy, policy=MixedPrecisionPolicy())
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))

    def step() -> None:
        for at, piece in enumerate(global_batch(0, num_microbatches)):
            with microbatch(net, is_first=at == 0, is_last=at == num_microbatches - 1):
                loss_of(net, piece).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with counting_bytes([context_of(net)]) as nbytes:
        step()
    (group,) = (each for each in context_of(net).groups if each.prefix == "blocks.1.")
    assert group.grads.input.storage.nbytes == group.weights.full.local_nbytes, "both are bf16"
    acts = (("gather", FORWARD), ("gather", BACKWARD), ("reduce", BACKWARD))
    return [nbytes[act, "blocks.1", direction] for act, direction in acts], group.weights.full.local_nbytes


@CHECKS.on(2)
def weights_are_gathered_for_each_pass_and_gradients_reduced_after_each_backward() -> None:
    (forward, backward, reduced), whole = _of_one_block("optim_grads_params", 2)
    assert forward == backward == reduced == 2 * whole // 2


@CHECKS.on(2)
def replicated_weights_are_brought_up_to_date_once_a_step() -> None:
    (forward, backward, reduced), whole = _of_one_block("optim_grads", 2)
    assert (forward, backward, reduced) == (whole // 2, 0, 2 * whole // 2)


@CHECKS.on(2)
def an_all_reduce_brings_the_sums_back() -> None:
    (forward, backward, reduced), whole = _of_one_block("no_shard", 1)
    assert (forward, backward, reduced) == (0, 0, whole)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_bytes(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
