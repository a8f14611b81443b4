"""``start_param_sync`` gathers the first unit's weights before forward; if off, nothing is gathered between steps."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.measure.host_counts import Tally
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import FullyShardedDataParallel, fully_shard, fully_shard_optimizer, microbatch
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.rank_checks import RankChecks
from tests.support.tiny_gpt import VOCAB_SIZE, build_gpt

CHECKS = RankChecks(__name__)


def _wrap(*, on: bool) -> FullyShardedDataParallel:
    model = build_gpt()
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        overlap_param_gather=True,
        overlap_grad_reduce=True,
        fsdp_all_gather_in_start_param_sync=on,
    )
    return FullyShardedDataParallel(model.config, config, model)


def _loss(model: FullyShardedDataParallel, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    tokens = torch.randint(VOCAB_SIZE, (2, 8), generator=generator)
    losses: torch.Tensor = model(tokens[:, :-1], None, None, labels=tokens[:, 1:])
    return losses.mean()


def _collectives(*, on: bool, num_microbatches: int) -> tuple[Counter[str], list[float], int]:
    """Return the collectives of one step by phase, all losses, and the number of gathers of the first unit."""
    tally, losses = Tally(), []
    wrapped = _wrap(on=on)
    optimizer = fully_shard_optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
    for step in range(4):
        with tally.operators():
            for at in range(num_microbatches):
                with microbatch(wrapped.module, is_first=at == 0, is_last=at == num_microbatches - 1):
                    tally.begin("forward")
                    loss = _loss(wrapped, num_microbatches * step + at)
                    tally.begin("backward")
                    loss.backward()
                losses.append(loss.item())
                tally.begin("between microbatches")
            tally.begin("step")
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:  # what is counted begins and ends where forward might
                tally.counts.collectives.clear()
            tally.begin("start_param_sync")
            if step != 3:
                wrapped.start_param_sync()
    (context,) = wrapped._contexts()
    assert context.planner.plan is not None
    first = context.units[context.planner.plan.uses[0].unit]
    return tally.counts.collectives, losses, sum(group.weights.needs_gather for group in first.groups)


@CHECKS.on(2)
def the_first_units_gather_is_moved_before_the_forward_and_nothing_else_is() -> None:
    for num_microbatches in (1, 3):
        on, losses_on, first = _collectives(on=True, num_microbatches=num_microbatches)
        off, losses_off, _ = _collectives(on=False, num_microbatches=num_microbatches)
        assert first > 0
        ahead = on["start_param_sync"]
        assert ahead >= first, "what the first unit needs"
        assert ahead <= off["forward"] // 2, "and by far not all"
        assert set(off) == {"forward", "backward"}, "nothing is launched outside of forward and backward"
        assert on == off + Counter({"start_param_sync": ahead}) - Counter({"forward": ahead})
        assert losses_on == losses_off


@CHECKS.on(2)
def a_root_without_weights_of_its_own_does_not_hide_the_first_unit() -> None:
    """The first unit of the plan then gathers nothing."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)))
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params", overlap_param_gather=True
    )
    settings = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    for child in model:
        fully_shard(child)
    wrapped = FullyShardedDataParallel(settings, config, model, [])
    for _ in range(3):
        wrapped(torch.ones(2, 4)).sum().backward()
        wrapped.zero_grad_buffer()
    wrapped.start_param_sync()
    (context,) = wrapped._contexts()
    assert [group.prefix for group in context.unsharder.live] == ["0."]


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_start_param_sync(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
