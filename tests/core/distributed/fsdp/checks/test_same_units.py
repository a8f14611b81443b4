"""What one rank gives to ``fully_shard`` differently is named on all ranks, before anything is allocated or sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from megatron.core.distributed.fsdp.checks.order_errors import OrderDiffersError
from megatron.core.distributed.fsdp.config.placement import hybrid_placements, strategy_placements
from megatron.core.distributed.fsdp.layout.granule import Granule
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


class _Pair(nn.Module):
    def __init__(
        self, *, names: tuple[str, str] = ("a", "b"), rows: int = 4, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(rows, 4, dtype=dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Other(_Pair):
    pass


def _frozen() -> nn.Module:
    pair = _Pair()
    pair.b.requires_grad_(False)
    return pair


def _granular() -> nn.Module:
    pair = _Pair()
    pair.b.fsdp_granule = Granule.whole()
    return pair


_MODULES = {
    r"parameter c must be .*, got nothing on ranks \[0\] and \(\(4, 4\), torch.float32": _Pair(names=("a", "c")),
    r"the order of what is compared must .*, got parameter a, parameter b on ranks \[0\]": _Pair(names=("b", "a")),
    r"parameter a must be .*\(\(4, 4\), .* on ranks \[0\] and \(\(6, 4\), .* on ranks \[1\]": _Pair(rows=6),
    r"parameter b must be .* torch.float32, .* torch.bfloat16, ": _Pair(dtype=torch.bfloat16),
    r"parameter b must be .*'trained', .*'frozen', ": _frozen(),
    r"parameter b must be .*'rows'\) .*'whole": _granular(),
    r"class of the module given to fully_shard must be .*, got '_Pair' on ranks \[0\] and '_Other'": _Other(),
}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    r"placements of fully_shard must be": {"placements": strategy_placements("optim", 0)},
    r"mixed_precision_policy of .* must be": {
        "mixed_precision_policy": MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)
    },
    r"grad_divisor of .* got Fraction\(1, 1\) .* Fraction\(2, 1\)": {"grad_divisor": 2},
    r"forward_prefetch_depth of .* got None .* 2": {"forward_prefetch_depth": 2},
    r"backward_prefetch_depth of .* got None .* 0": {"backward_prefetch_depth": 0},
    r"transport of fully_shard must be": {"transport": "peer_copy"},
}


@CHECKS.on(2)
def a_difference_of_one_rank_is_named_on_all() -> None:
    mesh, is_other = init_device_mesh("cpu", (2,)), dist.get_rank() == 1
    for message, module in _MODULES.items():
        own = module if is_other else _Pair()
        before = {name: id(parameter) for name, parameter in own.named_parameters()}
        with pytest.raises(ValueError, match=rf"{message}.*this is fully_shard of a _\w+: build"):
            fully_shard(own, mesh)
        assert {name: id(parameter) for name, parameter in own.named_parameters()} == before, "nothing was touched"
    for message, arguments in _ARGUMENTS.items():
        with pytest.raises(ValueError, match=message):
            fully_shard(_Pair(), mesh, **(arguments if is_other else {}))
    assert isinstance(fully_shard(_Pair(), mesh), _Pair), "the mesh is as good as before"


@CHECKS.on(2)
def layers_that_look_alike_are_told_apart_by_their_order() -> None:
    """Each call would send its weights to what other ranks shard by theirs."""
    is_other = dist.get_rank() == 1
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    for layer in reversed(net) if is_other else net:
        fully_shard(layer)
    named = r"what call 1 of fully_shard inside of it was for must .*, got '0' on ranks \[0\] and '2' on ranks \[1\]; what call 3"
    with pytest.raises(ValueError, match=named):
        fully_shard(net)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    fully_shard([net[1], net[0]] if is_other else [net[0], net[1]])
    with pytest.raises(ValueError, match=r"got '0, 1' on ranks .* and '1, 0' on ranks"):
        fully_shard(net)
    net = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))  # without a unit around them
    for layer in reversed(net) if is_other else net:
        fully_shard(layer)
    with pytest.raises(OrderDiffersError, match=r"got units that run together as number \d+ on ranks \[0\] and \d+ on"):
        net(torch.ones(2, 3)).sum().backward()


@CHECKS.on(4)
def ranks_of_both_axes_hear_of_it() -> None:
    """A rank of another row of the mesh would go on alone, to a broadcast over the outer axis that never ends."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    placements = hybrid_placements("optim_grads_params", "no_shard", ("outer", "inner"))
    with pytest.raises(ValueError, match=r"got \(\(4, 4\), .* on ranks \[0-2\] and \(\(6, 4\), .* on ranks \[3\]"):
        fully_shard(_Pair(rows=6 if dist.get_rank() == 3 else 4), mesh, placements)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
