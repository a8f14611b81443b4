"""Gradients: written in place or copied, scaled right whatever the group, and seen to be infinite by all ranks alike."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import MixedPrecisionPolicy, Placements, fully_shard, microbatch
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from megatron.core.tensor_parallel.linear_function import linear_with_main_grad
from tests.support.agreement import (
    assert_same_gradients,
    assert_trains_alike,
    backward_plainly,
    groups_of,
    inputs,
    seeded,
    shard,
)
from tests.support.models import STRATEGY_NAMES, assert_at_rest, context_of, full
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


class InPlaceLinear(nn.Linear):
    """A linear layer as the framework's: its weight gradient goes into ``weight.get_main_grad()``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_with_main_grad(x, self.weight, self.bias)


class Layer(nn.Module):
    """One weight used once, one twice, one by a framework layer and a foreign one; a norm besides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.once, self.twice = InPlaceLinear(5, 5), InPlaceLinear(5, 5, bias=False)
        self.shared, self.foreign = InPlaceLinear(5, 5), nn.Linear(5, 5)
        self.foreign.weight = self.shared.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(self.once(self.norm(x)))))
        return x + self.foreign(torch.tanh(self.shared(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.last = InPlaceLinear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.second(self.first(x)))
        return out


UNITS = ("first", "second")


def _loss(model: Any, rank: int, step: int) -> torch.Tensor:
    out: torch.Tensor = model(inputs(rank, step, 4, 5))
    return out.square().mean()


# ---- written in place -----------------------------------------------------------------------------------------------


@CHECKS.on(1, 2, 4)
def gradients_written_in_place_are_those_that_autograd_would_give() -> None:
    for strategy in STRATEGY_NAMES if dist.get_world_size() == 2 else ("optim_grads_params",):
        for num_microbatches in (1, 3):
            assert_trains_alike(
                Model,
                lambda m, s=strategy: shard(m, UNITS, s),  # type: ignore[misc]
                _loss,
                num_microbatches=num_microbatches,
                steps=2,
            )


@CHECKS.on(2)
def the_layers_really_write_into_the_staging_buffer() -> None:
    """Otherwise the parity above would hold for copies too, and the copies would cost what the contract saves."""
    model = shard(seeded(Model), UNITS)
    group = next(g for g in model.first.parameter_groups if "once.weight" in [p.name for p in g.parameters])
    index = [p.name for p in group.parameters].index("once.weight")
    seen: list[Any] = []
    stage_grads = group.grads.copy_in

    def looking() -> None:
        seen.append((group.grads.input._written[index], group.unsharded[index].grad))
        stage_grads()

    group.grads.copy_in = looking
    _loss(model, dist.get_rank(), 0).backward()
    assert seen == [(True, None)]
    assert group.unsharded[index].grad_added_to_main_grad is True
    assert not any(parameter.grad is not None for g in groups_of(model) for parameter in g.unsharded)


@CHECKS.on(2)
def a_failed_backward_leaves_nothing_in_the_buffer() -> None:
    """What it wrote in place must not be added to the next step's gradient."""
    plain, model = seeded(Model), seeded(Model)
    shard(model, UNITS)
    context_of(model).change_options(poisons=True)

    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise ValueError("in the middle of backward")

    for step in range(4):
        model.zero_grad()
        if step in (1, 3):
            x = inputs(dist.get_rank(), 9, 4, 5)
            hidden = model.first(x) if step == 3 else None
            with pytest.raises(ValueError, match="in the middle of backward"):
                handle = next(g for g in model.first.parameter_groups).unsharded[0].register_hook(fail)
                (model(x).sum() if hidden is None else model(x).sum() + hidden.sum()).backward()
            handle.remove()
            model.zero_grad()
        plain.zero_grad()
        backward_plainly(plain, _loss, step)
        _loss(model, dist.get_rank(), step).backward()
        assert_at_rest(context_of(model))
        assert_same_gradients(model, plain)


@CHECKS.on(2)
def gradients_with_a_graph_of_their_own_are_left_to_autograd() -> None:
    """With create_graph a layer may not write in place; the engine takes what autograd delivers."""
    plain, model = seeded(Model), seeded(Model)
    shard(model, UNITS)
    for rank in range(2):
        (_loss(plain, rank, 0) / 2).backward()
    loss = _loss(model, dist.get_rank(), 0)
    with pytest.warns(UserWarning, match="create_graph=True"):
        loss.backward(create_graph=True)
    assert_same_gradients(model, plain)


@CHECKS.on(2)
def a_unit_that_only_an_earlier_microbatch_used_is_reduced_at_the_end() -> None:
    """Its gradients rest on each rank by itself; the last backward, in which it has no part, must not leave them there."""

    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = InPlaceLinear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            x = self.first(x)
            out: torch.Tensor = self.second(x) if both else x
            return out

    for strategy in STRATEGY_NAMES:
        plain, model = seeded(Early), seeded(Early)
        shard(model, ("first", "second"), strategy)
        for index in range(2):
            with microbatch(model, is_first=index == 0, is_last=index == 1):
                model(inputs(dist.get_rank(), index, 3, 5), index == 0).square().mean().backward()
            for rank in range(2):
                (plain(inputs(rank, index, 3, 5), index == 0).square().mean() / 2).backward()
        assert_same_gradients(model, plain)
        assert_at_rest(context_of(model))


@CHECKS.on(1, 2)
def a_parameter_that_no_microbatch_gave_a_gradient_has_none() -> None:
    """Optimizers decay a weight whose gradient is zero, and leave one alone that has none. The last microbatch leaves the unit out."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.first_ranks = (nn.Parameter(torch.ones(5)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.used * (self.first_ranks if dist.get_rank() == 0 else 1)

    class Early(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Part(), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            out: torch.Tensor = self.second(self.first(x) if both else x)
            return out

    for strategy in STRATEGY_NAMES:
        model = seeded(Early)
        shard(model, ("first", "second"), strategy)
        for index in range(3):
            with microbatch(model, is_first=index == 0, is_last=index == 2):
                model(inputs(dist.get_rank(), index, 3, 5), index == 0).square().mean().backward()
        found = {name for name, parameter in model.named_parameters() if parameter.grad is None}
        assert found == {"first.unused"}, strategy


# ---- scale ----------------------------------------------------------------------------------------------------------


@CHECKS.on(1, 2, 4)
def gradients_are_divided_by_ranks_and_divisor() -> None:
    """The mean over ranks, then ``grad_divisor``; as a fraction it multiplies, which is how a sum is made of a mean."""
    world = dist.get_world_size()
    for divisor in (1, 2, 0.5, Fraction(1, world), Fraction(3, 2)):
        for strategy in ("no_shard", "optim_grads_params"):
            assert_trains_alike(
                Model,
                lambda m, d=divisor, s=strategy: shard(m, UNITS, s, grad_divisor=d),  # type: ignore[misc]
                _loss,
                steps=1,
                num_microbatches=2 if divisor == 2 else 1,
                divisor=float(divisor * world),
            )


@CHECKS.on(2, 4)
def partial_sums_are_not_averaged() -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    for optimizer in (Replicate(), Shard(0)):
        placements = Placements((0,), [Replicate()], [Partial("sum")], [optimizer])
        plain, model = seeded(Model), seeded(Model)
        fully_shard(model, placements=placements)
        _loss(model, dist.get_rank(), 0).backward()
        backward_plainly(plain, _loss, 0, divisor=1.0)
        assert_same_gradients(model, plain)


@CHECKS.on(2)
def a_group_frozen_when_sharded_is_summed_as_the_others_are() -> None:
    """Its placements while it is frozen say where the weight rests; trained later, it must still be summed."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    for optimizer in (Replicate(), Shard(0)):
        placements = Placements((0,), [Replicate()], [Partial("sum")], [optimizer])
        plain, model = seeded(Model), seeded(Model)
        model.first.requires_grad_(False)
        for name in (*UNITS, ""):
            fully_shard(model.get_submodule(name), placements=placements)
        model.first.requires_grad_(True)
        _loss(model, dist.get_rank(), 0).backward()
        backward_plainly(plain, _loss, 0, divisor=1.0)
        assert_same_gradients(model, plain)


@CHECKS.on(4)
def each_unit_averages_over_its_own_group() -> None:
    """As experts do, whose group is smaller: their gradients are means over it, scaled as its divisor says."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "edp"))
    plain, model = seeded(Model), seeded(Model)
    fully_shard(model.first, mesh, strategy_placements("optim_grads_params", "edp"), grad_divisor=2)
    fully_shard(model)
    _loss(model, dist.get_rank(), 0).backward()
    # Pairs of ranks (0, 1) and (2, 3) share the unit: a sum over two ranks, divided by two for the mean and by two again.
    pair = dist.get_rank() // 2 * 2
    for rank in (pair, pair + 1):
        (_loss(plain, rank, 0) / 4).backward()
    assert_same_gradients(model.first, plain.first)
    for parameter in plain.parameters():
        parameter.grad = None
    backward_plainly(plain, _loss, 0)
    assert_same_gradients(model.second, plain.second)
    assert_same_gradients(model.last, plain.last)


@CHECKS.on(1, 2)
def a_group_of_one_rank_needs_no_communication() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("other", "dp"))
    for strategy in STRATEGY_NAMES:
        plain, model = seeded(Model), seeded(Model)
        for name in (*UNITS, ""):
            fully_shard(model.get_submodule(name), mesh, strategy_placements(strategy, "dp"))
        for _ in range(2):
            for index in range(2):
                with microbatch(model, is_first=index == 0, is_last=index == 1):
                    _loss(model, dist.get_rank(), index).backward()
                _loss(plain, dist.get_rank(), index).backward()
        assert_same_gradients(model, plain)


# ---- not finite -----------------------------------------------------------------------------------------------------


@CHECKS.on(2, 4)
def an_infinity_on_one_rank_is_seen_by_all() -> None:
    """Every rank that looks at the norm of the reduced gradients decides alike; nobody's infinity is lost in a cast."""
    for comm_dtype in (None, torch.bfloat16):
        for bad in (float("inf"), float("nan")):
            for strategy in STRATEGY_NAMES:
                policy = MixedPrecisionPolicy(main_params_dtype=None, grad_comm_dtype=comm_dtype)
                model = shard(seeded(Model), UNITS, strategy, mixed_precision_policy=policy)
                x = inputs(dist.get_rank(), 0, 4, 5)
                scale = bad if dist.get_rank() == 1 else 1.0
                (model(x).square().mean() * scale).backward()
                for name, parameter in model.named_parameters():
                    assert not full(parameter.grad).isfinite().any(), f"{name} is finite with {strategy}"


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
