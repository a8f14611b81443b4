"""What autograd saved of weights is refused after their release, and after a write: an error, never gradients of whatever lies there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import (
    FlatAdamW,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.runtime import unsharder
from tests.support.models import (
    STRATEGY_NAMES,
    Net,
    context_of,
    full,
    loss_of,
    make_net,
    my_piece,
    shard_net,
)
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


@CHECKS.on(2)
def a_backward_through_released_weights_is_refused() -> None:
    """A hook keeps a tensor that is no output of its unit: backward from there does not gather the unit's weights.

    Without poison, so that the fence is all there is; before there is a plan, and with the weights in an arena.
    """
    net = shard_net(make_net(3), poisons=False)
    aside: list[torch.Tensor] = []

    def keep(block: Any, args: tuple[torch.Tensor], out: torch.Tensor) -> None:
        aside.append(nn.functional.linear(args[0], block.up.weight).square().sum())

    for _ in range(3):
        handle = net.blocks[0].register_forward_hook(keep)
        loss = loss_of(net, my_piece(0))
        handle.remove()
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|from an earlier step"):
            aside.pop().backward()
        del loss
        net.zero_grad()
        loss_of(net, my_piece(0)).backward()  # the next step is right again, and records or confirms a plan
        net.zero_grad()
    assert context_of(net).planner.plan is not None


@torch.no_grad()
def _double(net: Net) -> None:
    for parameter in net.parameters():
        parameter.mul_(2)


def _load(net: Net) -> None:
    net.load_state_dict({name: 2 * full(weight) for name, weight in net.state_dict().items()})


# What writes to weights between a forward and its backward.
_WRITES: tuple[Callable[[Net], Any], ...] = (
    _double,
    _load,
    lambda net: torch.optim.SGD(net.parameters(), lr=0.1).step(),
    lambda net: fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1)).step(),
    lambda net: FlatAdamW(net.parameters(), lr=0.1).step(),
)
_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def _assert_refused(loss: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|from an earlier step"):
        loss.backward()


@CHECKS.on(2)
def a_backward_after_a_write_to_what_forward_used_is_refused() -> None:
    """As without sharding. It would gather the new weights."""
    for strategy in STRATEGY_NAMES:
        net = shard_net(make_net(2), strategy)
        for write in _WRITES:
            old = loss_of(net, my_piece(0))
            loss_of(net, my_piece(1)).backward()
            write(net)
            _assert_refused(old)
            net.zero_grad()
            loss_of(net, my_piece(1)).backward()  # the next one is right again
            net.zero_grad()


@CHECKS.on(1, 2)
def such_a_backward_is_refused_by_whatever_way_it_comes_to_weights_that_stay_whole() -> None:
    """Autograd sees no write to sharded parameters, and no unit's backward begins that would tell it of them."""
    strategies = [name for name in STRATEGY_NAMES if dist.get_world_size() == 1 or name != "optim_grads_params"]
    for strategy in strategies:
        net = shard_net(make_net(2), strategy)
        for write in _WRITES:
            aside: list[torch.Tensor] = []
            block = net.blocks[0]
            handle = block.up.register_forward_hook(lambda _, args, out, aside=aside: aside.append(out.square().sum()))
            for writes in (False, True):
                loss_of(net, my_piece(0)).backward(retain_graph=True)
                if writes:
                    write(net)
                    with pytest.raises(RuntimeError, match="by another way than its unit's outputs after its weights"):
                        aside.pop().backward()
                else:
                    aside.pop().backward()
            handle.remove()
            net.zero_grad()
            loss_of(net, my_piece(1)).backward()  # the next one is right again
            net.zero_grad()


@CHECKS.on(2)
def where_the_model_weight_is_a_buffer_of_its_own_it_changes_with_the_next_forward() -> None:
    """Until then a backward gathers, and reads, what forward used."""
    for strategy in STRATEGY_NAMES:
        written, left = (shard_net(make_net(2), strategy, policy=_BF16) for _ in range(2))
        losses = [loss_of(net, my_piece(0)) for net in (written, left)]
        _double(written)
        for loss in losses:
            loss.backward()
        for got, expected in zip(written.parameters(), left.parameters(), strict=True):
            assert torch.equal(full(got.grad), full(expected.grad))
        for write in _WRITES:
            old = loss_of(written, my_piece(0))
            loss_of(written, my_piece(1)).backward()
            write(written)
            loss_of(written, my_piece(1))
            _assert_refused(old)
            written.zero_grad()


@CHECKS.on(2)
def a_discriminators_step_before_the_generators_backward_is_refused_and_named() -> None:
    generator, discriminator = (shard_net(make_net(2, seed=seed)) for seed in range(2))
    fake = nn.functional.pad(generator(my_piece(0)[0]), (0, 2))
    score = discriminator(fake).mean()
    discriminator(fake.detach()).mean().backward()
    torch.optim.SGD(discriminator.parameters(), lr=1.0).step()
    with mock.patch.object(unsharder.logger, "warning") as said:
        _assert_refused(score)
    (call,) = said.call_args_list
    assert str(call.args[1]) == "entry.weight and 3 more" and "optimizer.step()" in call.args[0]


@CHECKS.on(2)
def writes_to_what_no_backward_needs_are_no_error() -> None:
    """Of a unit whose backward reads no weights; of another unit; in a forward, before the unit's."""
    for strategy in STRATEGY_NAMES:
        results = []
        for shards in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
            other = nn.Linear(5, 5)
            if shards:
                for module in (*model, model, other):
                    fully_shard(module, placements=strategy)
            x = torch.ones(4, 5)
            for _ in range(3):
                loss = other(model(x)).square().sum()
                with torch.no_grad():
                    for parameter in model[0].parameters():
                        parameter.mul_(2)
                loss.backward()
                handle = model.register_forward_pre_hook(lambda own, _: _halve(own[1]))
                model(x).square().sum().backward()
                handle.remove()
            results.append([full(parameter.grad) for parameter in (*model.parameters(), *other.parameters())])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)


@CHECKS.on(2)
def weights_that_stay_whole_are_synced_beside_a_backward() -> None:
    """During the root's backward the plan prefetches the next forward with a new weight version; the entry still needs its weight."""
    for strategy in ("optim", "optim_grads", "optim_grads_params"):
        net = shard_net(make_net(2), strategy)
        features, classes = my_piece(0)
        features.requires_grad_()
        for _ in range(4):  # each is a step of 1F1B, which the plan covers as a whole
            losses: list[torch.Tensor] = []
            for at in range(3):
                with microbatch(net, is_last=False):
                    losses.append(loss_of(net, (features, classes)))
                if at > 0:
                    with microbatch(net, is_last=False):
                        losses.pop(0).backward()
            with microbatch(net, is_last=True):
                losses.pop().backward()
            net.zero_grad()


@torch.no_grad()
def _halve(layer: nn.Module) -> None:
    for parameter in layer.parameters():
        parameter.mul_(0.5)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_version_fence(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
