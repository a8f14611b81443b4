"""Parameters that are frozen, unfrozen or added after ``fully_shard``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer, microbatch
from megatron.core.distributed.fsdp.flat_optimizer.flat_adamw import FlatAdamW
from tests.support.agreement import (
    assert_same_parameters,
    backward_plainly,
    groups_of,
    inputs,
    seeded,
    shard,
)
from tests.support.models import STRATEGY_NAMES, context_of
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
Parameters = dict[str, nn.Parameter]


class Net(nn.Module):
    """Three layers; the model itself owns a gain."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.gain = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.gain


UNITS = ("layers.0", "layers.1", "layers.2")

# What is frozen in each step; a name is a prefix of parameters.
SCHEDULES: dict[str, Sequence[Sequence[str]]] = {
    "thawed from the top": (["layers"], ["layers"], ["layers.0", "layers.1"], ["layers.0"], [], [], []),
    "frozen from the bottom": ([], [], ["layers.0"], ["layers.0", "layers.1"], ["layers.0", "layers.1"]),
    "biases in turns": ([], ["layers.0.bias", "layers.1.weight"], [], ["layers.0.bias"], ["layers.1"], []),
    "in turns": ([], ["layers.1"], [], ["layers.1"], [], ["layers.1"], []),
    "but the gain": (["layers"], ["layers"], ["layers"], ["gain"], ["gain"], []),
}


def _freeze(model: nn.Module, frozen: Sequence[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(frozen)) if frozen else True)


def _loss(model: Any, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step, 3, 5)).square().mean()


Optimizer = Callable[[Any], torch.optim.Optimizer]


def _assert_follows(schedule: Sequence[Sequence[str]], strategy: str, make_optimizer: Optimizer) -> None:
    plain, model = seeded(Net), seeded(Net)
    _freeze(plain, schedule[0])
    _freeze(model, schedule[0])
    shard(model, UNITS, strategy)
    theirs, ours = make_optimizer(plain.parameters()), fully_shard_optimizer(make_optimizer(model.parameters()))
    for step, frozen in enumerate(schedule):
        _freeze(plain, frozen)
        _freeze(model, frozen)
        theirs.zero_grad()
        ours.zero_grad()
        backward_plainly(plain, _loss, step)
        _loss(model, dist.get_rank(), step).backward()
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (parameter.grad is None) is (other.grad is None), f"step {step}, {name}"
        theirs.step()
        ours.step()
        assert_same_parameters(model, plain, f"{strategy}, step {step}")


@CHECKS.on(2)
def weights_move_only_while_they_are_not_frozen() -> None:
    for strategy in STRATEGY_NAMES:
        for name, schedule in SCHEDULES.items():
            try:
                _assert_follows(schedule, strategy, lambda parameters: torch.optim.AdamW(parameters, lr=0.05))
            except Exception as error:
                raise AssertionError(f"{name}, {strategy}: {error}") from error


def _with_reference(model: Any, rank: int, step: int, *, records: bool) -> torch.Tensor:
    """Compare two forwards, one of which has weights frozen meanwhile, as ``disable_adapter`` of ``peft`` freezes adapters."""
    out = model(inputs(rank, step, 3, 5))
    _freeze(model, ["layers.1", "gain"])
    with torch.set_grad_enabled(records):
        reference = model(inputs(rank, step + 7, 3, 5)).detach()
    _freeze(model, [])
    return (out - reference).square().mean()


@CHECKS.on(2)
def a_reference_between_forward_and_backward_may_freeze_weights() -> None:
    """The backward is of the graph from before: its gradients were dropped in silence."""
    for strategy in STRATEGY_NAMES:
        for records in (False, True):
            plain, model = seeded(Net), shard(seeded(Net), UNITS, strategy)

            def loss(net: Any, rank: int, step: int, *, records: bool = records) -> torch.Tensor:
                return _with_reference(net, rank, step, records=records)

            for step in range(3):
                plain.zero_grad()
                backward_plainly(plain, loss, step)
                loss(model, dist.get_rank(), step).backward()
                for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                    where = f"{strategy}, {records}, step {step}, {name}"
                    assert parameter.grad is not None, where
                    torch.testing.assert_close(parameter.grad.full_tensor(), other.grad, msg=where)
                model.zero_grad()


@CHECKS.on(2)
def the_flat_optimizer_leaves_frozen_weights_alone() -> None:
    for name in ("frozen from the bottom", "biases in turns", "in turns"):
        plain, model = seeded(Net), shard(seeded(Net), UNITS)
        theirs, ours = torch.optim.AdamW(plain.parameters(), lr=0.05), FlatAdamW(model.parameters(), lr=0.05)
        for step, frozen in enumerate(SCHEDULES[name]):
            _freeze(plain, frozen)
            _freeze(model, frozen)
            theirs.zero_grad()
            ours.zero_grad()
            backward_plainly(plain, _loss, step)
            _loss(model, dist.get_rank(), step).backward()
            theirs.step()
            ours.step()
            assert_same_parameters(model, plain, f"{name}, step {step}")


@CHECKS.on(2)
def a_change_costs_one_recorded_step() -> None:
    model = seeded(Net)
    _freeze(model, ["layers.1"])
    shard(model, UNITS)
    context = context_of(model)
    planned: list[bool] = []
    for step, frozen in enumerate((["layers.1"], ["layers.1"], [], [], [], ["layers.1"], [])):
        _freeze(model, frozen)
        _loss(model, dist.get_rank(), step).backward()
        planned.append(context.planner.in_plan)
        if step > 3:
            held = [group.grads.input.storage.in_arena for group in groups_of(model) if group.trainable]
            assert all(held), "gradients that come anew have their place in the arena"
    # Recorded; planned; unfrozen and recorded; planned from then on, since the plan has room for what comes back.
    assert planned == [False, True, False, True, True, True, True]


@CHECKS.on(2)
def weights_of_two_bytes_get_main_weights_when_they_are_unfrozen() -> None:
    """As if they had been trainable from the start, and seen by an optimizer that was there before."""
    for units in (UNITS, ()):
        models = [seeded(Net).bfloat16() for _ in range(2)]
        _freeze(models[0], ["layers.1"])
        for model in models:
            shard(model, units, mixed_precision_policy=MixedPrecisionPolicy())
        optimizers = [fully_shard_optimizer(torch.optim.AdamW(m.parameters(), lr=1e-3)) for m in models]
        assert models[0].layers[1].weight.dtype == torch.bfloat16
        kept = models[0].layers[1].weight
        for step in range(6):
            _freeze(models[0], ["layers.1"] if step < 3 else [])
            if step < 3:
                _freeze(models[1], ["layers.1"])
            else:
                _freeze(models[1], [])
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(inputs(dist.get_rank(), step, 3, 5).bfloat16()).float().square().mean().backward()
                optimizer.step()
        assert models[0].layers[1].weight is kept and kept.dtype == torch.float32
        for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert one.dtype == other.dtype, name
            assert torch.equal(one.to_local(), other.to_local()), name


@CHECKS.on(2)
def two_models_that_train_in_turns_are_right() -> None:
    """A GAN: the discriminator is frozen while the generator learns from it."""

    def play(models: Sequence[nn.Module], ranks: Sequence[int], step: int, optimizers: Any) -> None:
        generator, discriminator = models
        for trained, turn in ((discriminator, 0), (generator, 1)):
            discriminator.requires_grad_(turn == 0)
            optimizers[turn].zero_grad()
            for rank in ranks:
                fake = generator(inputs(rank, step, 3, 5))
                loss = discriminator(fake.detach() if turn == 0 else fake).mean()
                if turn == 0:
                    loss = discriminator(inputs(rank, step + 50, 3, 5)).square().mean() - loss
                (loss / len(ranks)).backward()
            optimizers[turn].step()
            assert all(p.grad is not None for p in trained.parameters())
        discriminator.requires_grad_(True)

    plain, sharded = [seeded(Net) for _ in range(2)], [shard(seeded(Net), UNITS) for _ in range(2)]
    theirs, ours = ([torch.optim.AdamW(m.parameters(), lr=0.05) for m in reversed(ms)] for ms in (plain, sharded))
    for step in range(5):
        play(plain, range(2), step, theirs)
        play(sharded, [dist.get_rank()], step, ours)
        for mine, other in zip(sharded, plain, strict=True):
            assert_same_parameters(mine, other, f"step {step}")


@CHECKS.on(2)
def what_is_frozen_between_microbatches_is_refused() -> None:
    model = shard(Net(), UNITS, "optim")
    with microbatch(model, is_first=True, is_last=False):
        _loss(model, dist.get_rank(), 0).backward()
    model.layers[1].bias.requires_grad_(False)
    with (
        pytest.raises(RuntimeError, match=r"requires_grad of layers\.1\.bias must not change between the microbatches"),
        microbatch(model, is_first=False, is_last=True),
    ):
        _loss(model, dist.get_rank(), 1)


class _Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(5, 2)


@CHECKS.on(2)
def parameters_that_come_later_are_refused_by_name() -> None:
    additions: dict[str, Callable[[Any], None]] = {
        "layers.1.scale": lambda m: setattr(m.layers[1], "scale", nn.Parameter(torch.ones(5))),
        "shift": lambda m: m.register_parameter("shift", nn.Parameter(torch.ones(5))),
        "layers.2.adapter.down.weight": lambda m: setattr(m.layers[2], "adapter", _Adapter()),
        "layers.3.weight": lambda m: m.layers.append(nn.Linear(5, 5)),
    }
    for name, add in additions.items():
        for steps in (0, 3):
            model = shard(Net(), UNITS)
            for step in range(steps):
                _loss(model, dist.get_rank(), step).backward()
            add(model)
            for _ in range(2):  # whoever goes on after the error is told again
                with pytest.raises(
                    RuntimeError, match=rf"{name.replace('.', '[.]')} .*after fully_shard.*before fully_shard"
                ):
                    _loss(model, dist.get_rank(), 9)


@CHECKS.on(2)
def buffers_and_sharded_units_may_come_later() -> None:
    model = shard(Net(), UNITS)
    _loss(model, dist.get_rank(), 0).backward()
    model.layers[1].register_buffer("table", torch.ones(5))
    model.later = shard(nn.Linear(5, 5))
    model.layers[0].activation = nn.Tanh()
    _loss(model, dist.get_rank(), 0).backward()


@CHECKS.on(2)
def zeroing_sums_that_wait_gives_frozen_parameters_no_gradient() -> None:
    """A gradient of zeros would let weight decay move them."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), placements="no_shard")
    model[0].requires_grad_(False)
    with microbatch(model, is_last=False):
        model(torch.ones(2, 4)).sum().backward()
    model.zero_grad(set_to_none=False)
    model(torch.ones(2, 4)).sum().backward()
    assert [parameter.grad is None for parameter in model.parameters()] == [True, True, False, False]


@CHECKS.on(2)
def what_is_frozen_between_forward_and_backward_gets_no_gradient() -> None:
    for units in (UNITS, ()):
        for names in (("layers.1.weight",), ("layers.1.weight", "layers.1.bias"), ("gain",)):
            plain, model = seeded(Net), shard(seeded(Net), units)
            for _ in range(3):
                for net in (plain, model):
                    loss = _loss(net, 0, 0)
                    for name in names:
                        net.get_parameter(name).requires_grad_(False)
                    loss.backward()
                assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in plain.parameters()]
                for net in (plain, model):
                    net.zero_grad()
                    net.requires_grad_(True)


def _frozen_first() -> Net:
    net = seeded(Net)
    net.layers[0].requires_grad_(False)
    return net


@CHECKS.on(2)
def the_flat_optimizer_updates_what_was_unfrozen_before_it_was_built() -> None:
    for runs_before in (False, True):
        plain, model = _frozen_first(), shard(_frozen_first(), UNITS)
        for net in (plain, model):
            if runs_before:
                _loss(net, 0, 0).backward()
                net.zero_grad()
            net.layers[0].requires_grad_(True)
        optimizers = torch.optim.AdamW(plain.parameters(), lr=0.1), FlatAdamW(model.parameters(), lr=0.1)
        for net, optimizer in zip((plain, model), optimizers, strict=True):
            _loss(net, 0, 0).backward()
            optimizer.step()
        assert_same_parameters(model, plain)


@CHECKS.on(2)
def the_flat_optimizer_refuses_what_was_frozen_when_it_was_built() -> None:
    model = shard(_frozen_first(), UNITS)
    optimizer = FlatAdamW(model.parameters(), lr=0.1)
    _loss(model, 0, 0).backward()
    optimizer.step()
    model.layers[0].requires_grad_(True)
    _loss(model, 0, 0).backward()
    with pytest.raises(
        RuntimeError, match=r"got layers\.0\.weight and 1 more, which was frozen then.*build the optimizer again"
    ):
        optimizer.step()


class _Growing(nn.Module):
    """Later layers are in reentrant checkpoints, whose forwards run without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


@CHECKS.on(2)
def a_unit_that_comes_later_is_trained_from_where_it_is_unfrozen() -> None:
    """It is a separate root, and none of its forwards have gradients enabled."""
    for runs_frozen in (False, True):
        model = _Growing()
        fully_shard(model.layers[0])
        fully_shard(model)
        model(torch.ones(2, 4)).sum().backward()
        model.layers.append(fully_shard(nn.Linear(4, 4).requires_grad_(False)))
        if runs_frozen:
            model(torch.ones(2, 4)).sum().backward()
        model.layers[1].requires_grad_(True)
        model.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


class _OnOneRank(nn.Module):
    """Its weight gets a gradient only on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight if dist.get_rank() == 0 else x


@CHECKS.on(2)
def a_unit_that_is_unfrozen_later_may_miss_gradients_on_some_ranks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), _OnOneRank().requires_grad_(False))
    fully_shard(model[1])
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    model[1].requires_grad_(True)
    model(torch.ones(2, 4)).sum().backward()
    assert model[1].weight.grad is not None and model[1].weight.grad.full_tensor().any()  # type: ignore[operator]


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
