"""Ranks that start with different weights train with those of the mesh's first rank, not as they are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from tests.support.agreement import assert_same_parameters, groups_of
from tests.support.models import STRATEGY_NAMES, full, make_net, my_piece, shard_net
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


@CHECKS.on(1, 2, 4)
def every_rank_starts_with_the_first_ones_weights() -> None:
    for strategy in STRATEGY_NAMES:
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(main_params_dtype=torch.float64)):
            net = shard_net(make_net(seed=dist.get_rank()), strategy, policy=policy)
            plain = make_net(seed=0)
            with torch.no_grad():
                assert torch.equal(net(my_piece(0)[0]), plain(my_piece(0)[0])), strategy
            if policy.main_params_dtype is torch.float32:
                assert_same_parameters(net, plain)
            for parameter in net.parameters():
                whole = full(parameter)
                first = whole.clone()
                dist.broadcast(first, src=0)
                assert torch.equal(whole, first)


@CHECKS.on(2)
def frozen_weights_too() -> None:
    net = shard_net(make_net(seed=dist.get_rank()).requires_grad_(False))
    assert_same_parameters(net, make_net(seed=0))
    assert groups_of(net)


@CHECKS.on(4)
def the_first_rank_of_the_mesh_counts_not_of_the_world() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "dp"))
    net = make_net(seed=dist.get_rank())
    fully_shard(net, mesh, strategy_placements("optim_grads_params", "dp"))
    assert_same_parameters(net, make_net(seed=dist.get_rank() // 2 * 2))


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
