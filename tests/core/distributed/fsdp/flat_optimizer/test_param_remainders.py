"""bf16 main weights with remainders are bitwise fp32 main weights: in training, in checkpoints, after writes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from megatron.core.distributed.fsdp import (
    FlatAdamW,
    MixedPrecisionPolicy,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.flat_optimizer.adamw_update import join, split
from megatron.core.distributed.fsdp.layout.granule import Granule
from tests.support.agreement import groups_of, seeded, shard
from tests.support.models import (
    STRATEGY_NAMES,
    Net,
    full,
    local_of,
    loss_of,
    make_net,
    my_piece,
    shard_net,
)
from tests.support.rank_checks import RankChecks
from tests.support.shared_folder import shared_folder

CHECKS = RankChecks(__name__)
BF16 = torch.bfloat16
OWN_DTYPE = MixedPrecisionPolicy(main_params_dtype=None)


def _split_net(strategy: str = "optim_grads_params", *, seed: int = 0, lr: float = 0.01) -> tuple[Net, FlatAdamW]:
    net = shard_net(make_net(2, seed=seed, dtype=BF16), strategy, policy=OWN_DTYPE)
    return net, FlatAdamW(net.parameters(), lr=lr, weight_decay=0.1, store_param_remainders=True)


def _whole_net(strategy: str = "optim_grads_params", *, seed: int = 0, lr: float = 0.01) -> tuple[Net, FlatAdamW]:
    net = shard_net(make_net(2, seed=seed, dtype=BF16), strategy)
    return net, FlatAdamW(net.parameters(), lr=lr, weight_decay=0.1)


def _train(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(net, my_piece(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


def _masters(net: nn.Module, optimizer: FlatAdamW) -> list[torch.Tensor]:
    return [optimizer.main_weights(parameter).to_local().clone() for parameter in net.parameters()]


def _assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype == torch.float32 and torch.equal(mine, other)


def _halves(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high, remainder = torch.empty_like(whole, dtype=BF16), torch.empty_like(whole, dtype=torch.int16)
    split(whole, high, remainder)
    return high, remainder


def test_two_halves_are_the_number_and_the_upper_one_is_it_rounded() -> None:
    """All bf16 numbers with lower halves around a tie, and numbers at the ends of the range."""
    upper = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper + lower).flatten()
    whole = (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)
    high, remainder = _halves(whole)
    number = ~whole.isnan()
    assert torch.equal(join(high, remainder)[number].view(torch.int32), whole[number].view(torch.int32))
    assert high[~number].isnan().all() and join(high, remainder)[~number].isnan().all()
    tie = (whole.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(high[number & ~tie], whole.to(BF16)[number & ~tie])
    at_tie = number & tie & whole.isfinite()
    assert (high[at_tie].float().abs() > whole[at_tie].abs()).all(), "a tie goes away from zero"


def test_not_a_number_of_all_ones_stays_one() -> None:
    """CUDA's arithmetic yields it; rounded like a number it would become minus zero."""
    whole = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    high, remainder = _halves(whole)
    assert high.isnan().all() and join(high, remainder).isnan().all()


@CHECKS.on(2)
def a_full_state_is_broadcast_from_the_first_rank() -> None:
    """int16 remainders travel, and parts of rows and blocks of rows are placed as they are."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    granules = (None, Granule.row_parts(2), Granule.rows(4), Granule.whole())
    for granule in granules:
        for make in (_remainders, torch.optim.AdamW):
            model: Any = seeded(lambda: nn.Linear(6, 7)).to(BF16)
            model.weight.fsdp_granule = granule or Granule()
            shard(model)
            optimizer = make(model.parameters())
            model(torch.ones(2, 6, dtype=BF16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            before: Any = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=whole))
            given = copy.deepcopy(before) if dist.get_rank() == 0 else {}
            for _, state in optimizer.state.items():
                for value in state.values():
                    local_of(value).zero_()
            broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_optimizer_state_dict(model, optimizer, given, options=broadcast)
            after: Any = get_optimizer_state_dict(model, optimizer, options=whole)
            for name, state in before["state"].items() if dist.get_rank() == 0 else ():
                assert any(value.any() for value in state.values())
                for key, value in state.items():
                    assert after["state"][name][key].dtype == value.dtype, (granule, key)
                    assert torch.equal(after["state"][name][key], value), (granule, name, key)


def _remainders(parameters: Any) -> FlatAdamW:
    return FlatAdamW(parameters, store_param_remainders=True)


@CHECKS.on(1, 2)
def given_the_same_gradients_masters_are_fp32_main_weights_to_the_last_bit() -> None:
    """With given gradients, so that a tie in one weight does not change the others."""
    for strategy in STRATEGY_NAMES:
        (ours, split_), (theirs, whole) = _split_net(strategy), _whole_net(strategy)
        generator = torch.Generator().manual_seed(3)
        for _ in range(20):
            for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                other.grad = torch.zeros_like(other)
                local_of(other.grad).copy_(torch.randn(local_of(other).shape, generator=generator).bfloat16())
                mine.grad = torch.zeros_like(mine)
                local_of(mine.grad).copy_(local_of(other.grad))
            split_.step()
            whole.step()
        masters = _masters(ours, split_)
        _assert_equal(masters, _masters(theirs, whole))
        for parameter, master in zip(ours.parameters(), masters, strict=True):
            tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
            assert torch.equal(local_of(parameter)[~tie], master.to(BF16)[~tie])
        assert all(
            torch.equal(local_of(split_.state[p]["exp_avg"]), local_of(whole.state[q]["exp_avg"]))
            for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)
        )


@CHECKS.on(2)
def training_is_that_of_fp32_main_weights() -> None:
    """Both optimizers get gradients in bf16; no main weight of these steps is a tie."""
    for strategy in STRATEGY_NAMES:
        ours, split_ = _split_net(strategy)
        theirs = shard_net(make_net(2, dtype=BF16), strategy, policy=MixedPrecisionPolicy(main_grads_dtype=BF16))
        whole = FlatAdamW(theirs.parameters(), lr=0.01, weight_decay=0.1)
        assert _train(ours, split_, range(6)) == _train(theirs, whole, range(6)), strategy
        _assert_equal(_masters(ours, split_), _masters(theirs, whole))


@CHECKS.on(2)
def small_updates_are_not_lost() -> None:
    """Each is far below the distance of two bf16 numbers; together they must change the weight."""
    net, optimizer = _split_net(lr=1e-5)
    before = [local_of(p).clone() for p in net.parameters()]
    for _ in range(300):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    moved = [(local_of(p) != old)[old.abs() > 0.05] for p, old in zip(net.parameters(), before, strict=True)]
    assert torch.cat([part.flatten() for part in moved]).all()


@CHECKS.on(2)
def writes_from_outside_reset_remainders() -> None:
    """After an in-place write or a loaded state_dict, lower halves belong to other weights."""
    net, optimizer = _split_net()
    _train(net, optimizer, range(2))
    assert any(local_of(optimizer.state[p]["param_remainder"]).any() for p in net.parameters())
    group = groups_of(net)[0]
    with torch.no_grad():
        group.sharded[0].mul_(2.0)
    for index, parameter in enumerate(net.parameters()):
        if index == 0:
            kept = [local_of(optimizer.state[p]["param_remainder"]).clone() for p in net.parameters()]
        parameter.grad = torch.zeros_like(parameter)
    for param_group in optimizer.param_groups:
        param_group["lr"] = 0.0
    optimizer.step()  # changes nothing else
    for parameter, before in zip(net.parameters(), kept, strict=True):
        now = local_of(optimizer.state[parameter]["param_remainder"])
        is_written = any(parameter is sharded for sharded in group.sharded)
        assert not now.any() if is_written else torch.equal(now, before)
    net.load_state_dict(shard_net(make_net(2, seed=5, dtype=BF16), policy=OWN_DTYPE).state_dict())
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, master in zip(net.parameters(), _masters(net, optimizer), strict=True):
        assert torch.equal(local_of(parameter).float(), master)


@CHECKS.on(2)
def state_that_users_clear_keeps_the_main_weights() -> None:
    """The remainders are lower halves of weights, which no clearing of moments changes."""
    net, optimizer = _split_net()
    _train(net, optimizer, range(2))
    before = [master.clone() for master in _masters(net, optimizer)]
    optimizer.state.clear()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for param_group in optimizer.param_groups:
        param_group["lr"] = 0.0
    optimizer.step()
    _assert_equal(_masters(net, optimizer), before)
    assert all(not local_of(own["exp_avg"]).any() and own["step"] == 1 for own in optimizer.state.values())


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def _torch_net(strategy: str, *, seed: int) -> tuple[Net, Any]:
    net = shard_net(make_net(2, seed=seed, dtype=BF16), strategy)
    return net, fully_shard_optimizer(torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1))


@CHECKS.on(2)
def checkpoints_of_whole_and_split_main_weights_load_into_each_other() -> None:
    """fp32 weights are restored exactly, whichever kind saved and loads them, also under another strategy."""
    makers = (_split_net, _whole_net, _torch_net)
    with shared_folder() as folder:
        for at, make in enumerate(makers):
            net, optimizer = make("optim_grads_params", seed=at)
            _train(net, optimizer, range(2))
            save_checkpoint(net, optimizer, f"{folder}/{at}")
            masters = [_full_master(optimizer, parameter) for parameter in net.parameters()]
            moments = [full(optimizer.state[parameter]["exp_avg"]) for parameter in net.parameters()]
            for other_make in makers:
                other, continued = other_make("optim", seed=7)
                _train(other, continued, range(1))
                load_checkpoint(other, continued, f"{folder}/{at}")
                _assert_equal([_full_master(continued, parameter) for parameter in other.parameters()], masters)
                for parameter, moment in zip(other.parameters(), moments, strict=True):
                    assert torch.equal(full(continued.state[parameter]["exp_avg"]), moment)
                    assert ("param_remainder" in continued.state[parameter]) == (other_make is _split_net)
                _train(other, continued, range(2, 3))


def _full_master(optimizer: Any, parameter: torch.Tensor) -> torch.Tensor:
    return full(optimizer.main_weights(parameter) if isinstance(optimizer, FlatAdamW) else parameter).clone()


@CHECKS.on(2)
def training_continues_bit_for_bit_from_a_checkpoint_and_from_a_state_dict() -> None:
    with shared_folder() as folder:
        net, optimizer = _split_net()
        _train(net, optimizer, range(3))
        save_checkpoint(net, optimizer, f"{folder}/a")
        others = [_split_net("no_shard", seed=1), _split_net(seed=2)]
        load_checkpoint(*others[0], f"{folder}/a")
        others[1][0].load_state_dict(net.state_dict())
        others[1][1].load_state_dict(optimizer.state_dict())
        losses = _train(net, optimizer, range(3, 6))
        for other, continued in others:
            assert _train(other, continued, range(3, 6)) == losses
        _assert_equal(_masters(net, optimizer), _masters(*others[1]))


@CHECKS.on(1)
def lower_halves_alone_are_refused_where_they_have_no_place() -> None:
    (_, optimizer), (net, whole) = _split_net(), _whole_net()
    before = {p: {key: value.clone() for key, value in entries.items()} for p, entries in whole.state.items()}
    with pytest.raises(
        ValueError, match=r"must not hold param_remainder, .* build it with store_param_remainders=True"
    ):
        whole.load_state_dict(optimizer.state_dict())
    assert before.keys() == {*net.parameters()}


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
