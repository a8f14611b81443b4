"""``fully_shard`` as FSDP2's users call it, and units of one context without a root."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn

from megatron.core.distributed.fsdp import fully_shard, fully_shard_context
from tests.support.agreement import assert_trains_alike, inputs
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))


def _loss(model: Any, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step, 3, 5)).square().mean()


@CHECKS.on(2)
def keywords_of_fsdp2_mean_the_same() -> None:
    reduce_wide = fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float32)
    flat = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    deep = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 1))
    calls: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
        ({"mesh": flat}, ("S", "S", "S")),
        ({"mesh": flat, "reshard_after_forward": True}, ("S", "S", "S")),
        ({"mesh": flat, "reshard_after_forward": False}, ("R", "S", "S")),
        ({"mesh": flat, "placements": "optim"}, ("R", "P", "S")),
        ({"placements": "optim_grads_params", "mp_policy": reduce_wide}, ("S", "S", "S")),
        ({"mixed_precision_policy": reduce_wide, "offload_policy": fsdp2.OffloadPolicy()}, ("S", "S", "S")),
        ({"ignored_params": set(), "shard_placement_fn": None}, ("S", "S", "S")),
    )
    for arguments, kinds in calls:

        def wrap(model: Any, arguments: dict[str, Any] = arguments) -> Any:
            fully_shard(model[0], **arguments)
            return fully_shard(model, **arguments)

        model = assert_trains_alike(_net, wrap, _loss)
        (group,) = model[0].parameter_groups
        placed = (group.placements.parameter, group.placements.gradient, group.placements.optimizer)
        assert tuple(type(of_kind[0]).__name__[0] for of_kind in placed) == kinds, arguments
    model = assert_trains_alike(_net, lambda m: fully_shard(m, mesh=deep, reshard_after_forward=False), _loss)
    assert [type(p).__name__ for p in model.parameter_groups[0].placements.parameter] == ["Replicate", "Replicate"]


@CHECKS.on(2)
def units_of_a_shared_context_have_names_of_their_own() -> None:
    model = _net()
    with fully_shard_context() as context:
        fully_shard(model[0])
        fully_shard(model[2])
        whole = _net()
        fully_shard(whole[2])
        fully_shard(whole)
    names = ["Linear_0", "Linear_1", "Sequential_3.2", "Sequential_3"]
    assert [unit.name for unit in context.units] == names
    assert [unit.forward_range for unit in context.units] == [f"fsdp.forward {name}" for name in names]
    assert [group.name_of(0) for group in context.groups] == [
        "Linear_0.weight",
        "Linear_1.weight",
        "Sequential_3.2.weight",
        "Sequential_3.0.weight",
    ]
    for step in range(3):
        (_loss(model, dist.get_rank(), step) + _loss(whole, dist.get_rank(), step)).backward()
    model[0].weight = nn.Parameter(torch.ones(5, 5))
    with pytest.raises(RuntimeError, match=r"Linear_0\.weight must stay the parameter"):
        _loss(model, 0, 0)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
