"""Hybrid sharding by Megatron's names: instances, an outer strategy, and the collection's process groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp import FullyShardedDataParallel, fully_shard_optimizer
from megatron.core.distributed.fsdp.buffers.sharded_grad import PendingGradient
from megatron.core.process_group_builder import build_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_grid import RankGrid
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.hybrid import (
    KINDS,
    WORLD,
    assert_equal_rows,
    backward_in_order,
    backward_sharded,
    pieces_of,
)
from tests.support.models import assert_same_gradients, full, loss_of, make_net
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


def _groups(instances: int = 2, **options: Any) -> ProcessGroupCollection:
    return build_process_groups(RankGrid(world_size=WORLD, num_distributed_optimizer_instances=instances), **options)


def _wrap(net: nn.Module, groups: ProcessGroupCollection, *, sums: bool = False, **settings: Any) -> Any:
    settings = {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "num_distributed_optimizer_instances": 2,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        **settings,
    }
    config = DistributedDataParallelConfig(use_megatron_fsdp=True, **settings)
    transformer = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=sums)
    return FullyShardedDataParallel(transformer, config, net, ["Block"], pg_collection=groups)


@CHECKS.on(WORLD)
def both_outer_strategies_train_as_no_sharding_does() -> None:
    """All-gathers have a process group of their own, over the inner axis."""
    groups = _groups(create_all_gather_group=True)
    for outer in ("no_shard", "optim"):
        plain = make_net(2)
        model = _wrap(make_net(2), groups, outer_dp_sharding_strategy=outer)
        outermost, inner = model.parameter_groups[0].group_mesh.axes
        assert inner.gather_group is groups.dp_cp_ag and inner.ranks == dist.get_process_group_ranks(groups.intra_dp_cp)
        assert outermost.ranks == dist.get_process_group_ranks(groups.inter_dist_opt)
        assert model.dist_index.get_dp_group() is groups.dp_cp
        assert model.dist_index.hsdp_outer_dp_shard is (outer == "optim")
        shares = WORLD if outer == "optim" else 2
        assert all(group.layout.num_ranks == shares for group in model.parameter_groups)
        ours = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(3):
            losses = backward_sharded(model.module, step, 2)
            expected = backward_in_order(plain, step, 2, "optim_grads_params")
            assert all(map(torch.equal, losses, expected))
            model.finish_grad_sync()
            assert_equal_rows(model.module, plain, gradients=True)
            ours.step()
            theirs.step()
            model.zero_grad_buffer()
            model.start_param_sync()
        model.broadcast_params()
        assert_equal_rows(model.module, plain, gradients=False)


@CHECKS.on(WORLD)
def no_sync_leaves_the_outer_reduction_to_finish_grad_sync() -> None:
    groups = _groups()
    for strategy, outer in KINDS:
        plain = make_net(2)
        model = _wrap(make_net(2), groups, data_parallel_sharding_strategy=strategy, outer_dp_sharding_strategy=outer)
        for step in range(2):
            with model.no_sync():
                for of_ranks in pieces_of(step, 2):
                    (loss_of(model.module, of_ranks[dist.get_rank()]) / 2).backward()
            assert all(isinstance(parameter.grad, PendingGradient) for parameter in model.parameters())
            model.finish_grad_sync()
            backward_in_order(plain, step, 2, strategy)
            assert_equal_rows(model.module, plain, gradients=True)
            model.zero_grad_buffer()


@CHECKS.on(WORLD)
def per_token_losses_are_summed_over_both_axes() -> None:
    plain = make_net(2)
    model = _wrap(make_net(2), _groups(), sums=True)
    backward_sharded(model.module, 0, 1)
    torch.stack([loss_of(plain, piece) for piece in pieces_of(0, 1)[0]]).sum().backward()
    assert_same_gradients(model.module, plain)


@CHECKS.on(WORLD)
def a_group_of_one_rank_inside_is_data_parallelism() -> None:
    """With four instances of one rank each, nothing is sharded over the inner axis."""
    for outer in ("no_shard", "optim"):
        plain = make_net(2)
        settings: dict[str, Any] = {"num_distributed_optimizer_instances": 4, "outer_dp_sharding_strategy": outer}
        model = _wrap(make_net(2), _groups(4), **settings)
        backward_sharded(model.module, 0, 2)
        pieces = [piece for of_ranks in pieces_of(0, 2) for piece in of_ranks]
        torch.stack([loss_of(plain, piece) for piece in pieces]).mean().backward()
        assert_same_gradients(model.module, plain)
        assert all(map(torch.equal, map(full, model.module.parameters()), plain.parameters()))


@CHECKS.on(WORLD)
def groups_that_do_not_fit_are_refused() -> None:
    groups = _groups()
    with pytest.raises(
        ValueError, match=r"needs inter_dist_opt and intra_dp_cp in pg_collection, the first of 2 ranks"
    ):
        _wrap(make_net(1), replace(groups, inter_dist_opt=None))
    with pytest.raises(ValueError, match=r"the first of 2 ranks, got groups of 4 and 1 ranks"):
        _wrap(make_net(1), _groups(4))
    swapped = replace(groups, intra_dp_cp=groups.inter_dist_opt, inter_dist_opt=groups.intra_dp_cp)
    with pytest.raises(ValueError, match=r"must be the axes of a mesh over ranks \[0, 1, 2, 3\], got"):
        _wrap(make_net(1), swapped)
    with pytest.raises(ValueError, match=r"fsdp_group_ag must hold the ranks \[\d, \d\] of the sharding axis"):
        _wrap(make_net(1), replace(groups, dp_cp_ag=groups.dp_cp))


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_hybrid_adapter(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
