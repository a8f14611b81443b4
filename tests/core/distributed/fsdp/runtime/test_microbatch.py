"""Accumulation over microbatches: each gradient counts once, weights are synchronised once, and no scope outlives its end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp import (
    FsdpModule,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.api.module import contexts_of
from megatron.core.distributed.fsdp.buffers.weights import Weights
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from tests.support.models import (
    STRATEGY_NAMES,
    Net,
    assert_at_rest,
    assert_same_gradients,
    assert_same_weights,
    context_of,
    difference,
    global_batch,
    loss_of,
    make_net,
    make_pair,
    order_of,
    shard_net,
)
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


@contextmanager
def _counted_syncs() -> Iterator[dict[Weights, int]]:
    """How often each group is synchronised from its main weights in the scope."""
    counts: dict[Weights, int] = {}
    original = Weights.sync

    def counted(weights: Weights, **options: Any) -> None:
        counts[weights] = counts.get(weights, 0) + 1
        original(weights, **options)

    Weights.sync = counted  # type: ignore[method-assign, assignment]
    try:
        yield counts
    finally:
        Weights.sync = original  # type: ignore[method-assign]


def _accumulate(net: nn.Module, step: int, count: int) -> None:
    """One step's gradients, in scopes where the net is sharded."""
    for at, piece in enumerate(global_batch(step, count)):
        if isinstance(net, FsdpModule):
            with microbatch(net, is_first=at == 0, is_last=at == count - 1):
                loss_of(net, piece).backward()
        else:
            loss_of(net, piece).backward()


@CHECKS.on(2)
def clearing_gradients_either_way_is_right() -> None:
    """With None the main gradient's memory goes; with zeros it stays and is added to."""
    for strategy, set_to_none, count in itertools.product(STRATEGY_NAMES, (True, False), (1, 2, 3)):
        unsharded, sharded = make_pair(2, strategy)
        optimizers = [
            torch.optim.SGD(unsharded.parameters(), lr=0.05, momentum=0.9),
            fully_shard_optimizer(torch.optim.SGD(sharded.parameters(), lr=0.05, momentum=0.9)),
        ]
        for step in range(3):
            for net in (unsharded, sharded):
                _accumulate(net, step, count)
            assert_same_gradients(sharded, unsharded)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
            for group in context_of(sharded).groups:
                assert group.grads.main.storage.allocated is not set_to_none
                assert all((parameter.grad is None) is set_to_none for parameter in group.sharded)
        assert_same_weights(sharded, unsharded)


@CHECKS.on(2)
def gradients_are_freed_by_the_next_forward_without_our_optimizer() -> None:
    net = shard_net(make_net(2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(2):
        _accumulate(net, step, 1)
        optimizer.step()
        optimizer.zero_grad()
    net(global_batch(0, 1)[0][0])
    assert not any(group.grads.main.storage.allocated for group in context_of(net).groups)


@CHECKS.on(2)
def some_gradients_may_be_set_to_none() -> None:
    """Those that the user cleared one by one start from zero; the others go on."""
    unsharded, sharded = make_pair(2)
    for net in (unsharded, sharded):
        _accumulate(net, 0, 1)
        net.blocks[0].up.weight.grad = None
        net.head.bias.grad = None
        _accumulate(net, 1, 1)
    assert_same_gradients(sharded, unsharded)


@CHECKS.on(2)
def weights_are_synchronised_once_a_step_in_scopes_and_each_forward_without() -> None:
    """Without scopes, which a user may forget, it is slower and just as right."""
    for strategy in STRATEGY_NAMES:
        traces = []
        for scoped in (True, False):
            policy = MixedPrecisionPolicy(grad_comm_dtype=torch.float32)
            net = shard_net(make_net(2, dtype=torch.bfloat16), strategy, policy=policy)
            optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
            for step in range(3):
                with _counted_syncs() as counts:
                    if scoped:
                        _accumulate(net, step, 3)
                    else:
                        for piece in global_batch(step, 3):
                            loss_of(net, piece).backward()
                expected = dict.fromkeys((group.weights for group in context_of(net).groups), 1 if scoped else 3)
                assert counts == expected, (strategy, scoped, list(counts.values()))
                optimizer.step()
                optimizer.zero_grad()
            traces.append(net)
        assert_same_weights(
            traces[1], _unsharded_like(traces[0]), tolerance=2e-2
        )  # a sum in another order may round a weight to the next bf16


@CHECKS.on(2)
def the_first_microbatch_synchronises_and_later_ones_only_gather() -> None:
    """Also where scopes lie in one another, as in a schedule that wraps another's steps."""
    for strategy, nested in itertools.product(STRATEGY_NAMES, (False, True)):
        net = shard_net(make_net(2, dtype=torch.bfloat16), strategy, policy=MixedPrecisionPolicy())
        context = context_of(net)
        optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        for step in range(4):
            syncs, gathers = [], []
            for at, piece in enumerate(global_batch(step, 3)):
                before = order_of(context).num_gathers
                with _counted_syncs() as counts, ExitStack() as scopes:
                    if nested:
                        scopes.enter_context(microbatch(net, is_first=at == 0, is_last=False))
                    scopes.enter_context(microbatch(net, is_first=at == 0 and not nested, is_last=at == 2))
                    loss_of(net, piece).backward()
                syncs.append(sorted(counts.values()))
                gathers.append(order_of(context).num_gathers - before)
            optimizer.step()
            optimizer.zero_grad()
            num_groups, num_sharded = len(context.groups), sum(group.weights.needs_gather for group in context.groups)
            assert syncs == [[1] * num_groups, [], []], (strategy, nested, step)
            if step > 0:  # the very first one has no plan, and gathers more
                assert gathers[0] == gathers[1] == gathers[2] >= num_sharded, (strategy, nested, gathers)


@CHECKS.on(2)
def an_exception_restores_every_context_below_an_unwrapped_parent() -> None:
    """Raised in the forward of one child, after another had run; the step that follows is right."""
    parents = [nn.Sequential(make_net(2, seed=1).entry, *make_net(2, seed=1).blocks) for _ in range(2)]
    for child in parents[1]:
        fully_shard(child, placements=strategy_placements("optim"))
    contexts = contexts_of(parents[1])
    features = global_batch(0, 1)[0][0]
    with microbatch(parents[1], is_first=True, is_last=False):
        tripping = parents[1][2].register_forward_pre_hook(_trip)
        with pytest.raises(ValueError, match="trips"), microbatch(parents[1], is_first=False, is_last=True):
            parents[1](features)
        tripping.remove()
        assert not any(context.state.is_last for context in contexts)
        assert all(context.state.num_scopes == 1 for context in contexts)
    assert all(context.state.is_last and context.state.num_scopes == 0 for context in contexts)
    for at in range(2):
        with microbatch(parents[1], is_first=at == 0, is_last=at == 1):
            parents[1](features).square().mean().backward()
        parents[0](features).square().mean().backward()
    assert_same_gradients(parents[1], parents[0])
    for context in contexts:
        assert_at_rest(context)


def _trip(*_: object) -> None:
    raise ValueError("trips")


def _unsharded_like(net: Net) -> Net:
    """An unsharded net with the same main weights. Ranks: all."""
    twin = make_net(2)
    twin.load_state_dict({key: value.full_tensor() for key, value in net.state_dict().items()})
    return twin


@CHECKS.on(2)
def scopes_nest_and_restore_what_they_change() -> None:
    net = shard_net(make_net(2), "optim")
    context = context_of(net)
    piece = global_batch(0, 1)[0]
    with microbatch(net, is_last=False):
        assert not context.state.is_last
        with microbatch(net, is_first=False, is_last=True):
            assert context.state.is_last
        assert not context.state.is_last
        with pytest.raises(ValueError, match="trips"), microbatch(net, is_first=False, is_last=True):
            raise ValueError("trips")
        assert not context.state.is_last
        with context.state.accumulate():
            assert not context.state.is_last
        loss_of(net, piece).backward()
    assert context.state.is_last and context.state.num_scopes == 0
    with pytest.raises(ValueError, match="trips"), microbatch(net, is_first=False, is_last=False):
        raise ValueError("trips")
    assert context.state.is_last and context.state.num_scopes == 0
    with _counted_syncs() as counts:
        loss_of(net, piece).backward()
    assert set(counts.values()) == {1}, "a forward outside of scopes synchronises again"
    unsharded = make_net(2)
    for _ in range(2):
        loss_of(unsharded, piece).backward()
    assert_same_gradients(net, unsharded)


@CHECKS.on(2)
def accumulating_without_scopes_is_right() -> None:
    """``accumulate``, which the adapter's ``no_sync`` uses: the first backward outside of it reduces the sum."""
    for strategy in STRATEGY_NAMES:
        unsharded, sharded = make_pair(2, strategy)
        context = context_of(sharded)
        for step in range(2):
            *first, last = global_batch(step, 3)
            with context.state.accumulate():
                for piece in first:
                    loss_of(sharded, piece).backward()
            assert any(group.grads.refresh_pending() for group in context.groups) is (strategy in ("no_shard", "optim"))
            loss_of(sharded, last).backward()
            for piece in (*first, last):
                loss_of(unsharded, piece).backward()
            assert_at_rest(sharded)
            assert_same_gradients(sharded, unsharded)


@CHECKS.on(2)
def partial_sums_may_be_reduced_without_another_backward() -> None:
    for strategy in STRATEGY_NAMES:
        unsharded, sharded = make_pair(2, strategy)
        with context_of(sharded).state.accumulate():
            for piece in global_batch(0, 2):
                loss_of(sharded, piece).backward()
                loss_of(unsharded, piece).backward()
        context_of(sharded).reduce_partial()
        assert_at_rest(sharded)
        assert_same_gradients(sharded, unsharded)


@CHECKS.on(2)
def a_step_before_the_last_microbatch_is_refused() -> None:
    net = shard_net(make_net(2), "optim")
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    with microbatch(net, is_last=False):
        loss_of(net, global_batch(0, 1)[0]).backward()
    with pytest.raises(RuntimeError, match="the last microbatch has not come"):
        optimizer.step()


@CHECKS.on(2)
def a_step_that_is_given_up_leaves_nothing_in_the_next() -> None:
    """Its last microbatch never comes; the next step's first one drops what was summed."""
    for strategy in STRATEGY_NAMES:
        unsharded, sharded = make_pair(2, strategy)
        optimizer = fully_shard_optimizer(torch.optim.SGD(sharded.parameters(), lr=0.1))
        for num_before in (0, 2):
            for step in range(num_before):
                _accumulate(sharded, step, 2)
                sharded.zero_grad()
            with microbatch(sharded, is_last=False):
                loss_of(sharded, global_batch(7, 1)[0]).backward()
            optimizer.zero_grad()
            unsharded.zero_grad()
            for net in (unsharded, sharded):
                _accumulate(net, 0, 2)
            assert_at_rest(sharded)
            assert_same_gradients(sharded, unsharded)
            sharded.zero_grad()


@CHECKS.on(2)
def an_unwrapped_parent_scopes_all_the_units_below_it() -> None:
    """Its children are roots of contexts of their own."""
    for strategy in ("optim", "optim_grads_params"):
        parents = [nn.Sequential(make_net(2, seed=1).entry, *make_net(2, seed=1).blocks) for _ in range(2)]
        for child in parents[1]:
            fully_shard(child, placements=strategy_placements(strategy))
        contexts = contexts_of(parents[1])
        assert len(contexts) == 3
        for step in range(3):
            for at, (features, _) in enumerate(global_batch(step, 3)):
                with microbatch(parents[1], is_first=at == 0, is_last=at == 2):
                    assert all(context.state.is_last is (at == 2) for context in contexts)
                    parents[1](features).square().mean().backward()
                parents[0](features).square().mean().backward()
            assert_same_gradients(parents[1], parents[0])
        assert all(context.state.is_last for context in contexts)
    with pytest.raises(ValueError, match="must hold sharded modules"), microbatch(nn.Linear(2, 2)):
        pass


@CHECKS.on(2)
def siblings_of_a_shared_context_have_one_scope_and_one_plan() -> None:
    nets = [make_net(2, seed=seed) for seed in range(2)]
    with fully_shard_context() as context:
        sharded = [fully_shard(make_net(2, seed=seed)) for seed in range(2)]
    context.change_options(poisons=True)
    for step in range(4):
        for at, piece in enumerate(global_batch(step, 3)):
            with microbatch(context, is_first=at == 0, is_last=at == 2):
                (loss_of(sharded[0], piece) * loss_of(sharded[1], piece)).backward()
            (loss_of(nets[0], piece) * loss_of(nets[1], piece)).backward()
        assert_at_rest(context)
        for ours, theirs in zip(sharded, nets, strict=True):
            assert_same_gradients(ours, theirs)
    assert context.planner.plan is not None and len({use.unit for use in context.planner.plan.uses}) == 2
    assert context_of(sharded[0]) is context_of(sharded[1]) is context


@CHECKS.on(2)
def weights_written_by_hand_are_seen_by_the_next_forward() -> None:
    """Outside of scopes, and in a scope that is a step's first; in bf16 too, where model weights are copies."""
    piece = global_batch(0, 1)[0]
    for strategy, dtype in itertools.product(STRATEGY_NAMES, (torch.float32, torch.bfloat16)):
        net = shard_net(make_net(2, dtype=dtype), strategy, policy=MixedPrecisionPolicy())
        twin = make_net(2, dtype=dtype)
        for scoped in (True, False):
            for write in (_write_in_place, _write_data, _write_local, _write_by_step):
                for net_or_twin in (net, twin):
                    write(net_or_twin)
                with torch.no_grad():
                    if scoped:
                        with microbatch(net, is_first=True, is_last=False):
                            got = loss_of(net, piece)
                    else:
                        got = loss_of(net, piece)
                    expected = loss_of(twin, piece)
                assert difference(got, expected) <= (1e-6 if dtype == torch.float32 else 2e-2), (write, strategy)


@torch.no_grad()
def _write_in_place(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.mul_(1.5)


def _write_data(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data.mul_(-1.0)


@torch.no_grad()
def _write_local(net: nn.Module) -> None:
    for parameter in net.parameters():
        (parameter.to_local() if hasattr(parameter, "to_local") else parameter).mul_(0.5)


def _write_by_step(net: nn.Module) -> None:
    """A plain optimizer that knows nothing of us."""
    for parameter in net.parameters():
        parameter.grad = parameter.detach() * 0.5
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()


@CHECKS.on(2)
def a_step_of_our_optimizer_is_seen_also_where_the_scope_says_it_is_not_a_first_one() -> None:
    """``is_first=False`` by mistake never trains on stale weights."""
    piece = global_batch(0, 1)[0]
    for strategy, dtype in itertools.product(STRATEGY_NAMES, (torch.float32, torch.bfloat16)):
        net = shard_net(make_net(2, dtype=dtype), strategy, policy=MixedPrecisionPolicy())
        optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        losses = []
        for _ in range(3):
            with microbatch(net, is_first=False):
                loss = loss_of(net, piece)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            with torch.no_grad(), microbatch(net, is_first=False):
                mistaken = loss_of(net, piece)
            with torch.no_grad():
                assert torch.equal(mistaken, loss_of(net, piece))
        assert losses[2] < losses[0]


@CHECKS.on(2)
def weights_gathered_ahead_of_a_step_are_not_used_after_it() -> None:
    for strategy in STRATEGY_NAMES:
        unsharded, sharded = make_pair(2, strategy)
        optimizers = [
            torch.optim.SGD(unsharded.parameters(), lr=0.5),
            fully_shard_optimizer(torch.optim.SGD(sharded.parameters(), lr=0.5)),
        ]
        for step in range(4):
            for net in (unsharded, sharded):
                _accumulate(net, step, 2)
            assert_same_gradients(sharded, unsharded)
            context_of(sharded).prepare_forward()  # too early: the optimizer has not stepped
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step % 2:
                context_of(sharded).prepare_forward()
        assert_same_weights(sharded, unsharded)


@CHECKS.on(2)
def a_parameter_put_in_the_place_of_a_sharded_one_is_refused() -> None:
    """Units gather into parameters of their own: another one would be ignored without a word."""
    net = shard_net(make_net(2))
    piece = global_batch(0, 1)[0]
    kept = net.blocks[1].up.weight
    for _ in range(2):
        net.blocks[1].up.weight = nn.Parameter(torch.zeros(11, 7))
        with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight must stay"):
            loss_of(net, piece)
        net.blocks[1].up.weight = kept
        loss_of(net, piece).backward()
    assert_at_rest(net)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, takes: bool) -> torch.Tensor:
        return self.always(x) + (self.sometimes(x) if takes else 0)


def _have_gradients(model: nn.Module) -> list[bool]:
    return [parameter.grad is not None for parameter in model.parameters()]


@CHECKS.on(2)
def zeroed_sums_leave_no_gradient_where_there_was_none() -> None:
    for strategy in ("no_shard", "optim"):
        for zeroes_all in (True, False):
            plain, model = _Branches(), fully_shard(_Branches(), placements=strategy)
            for each in (plain, model):
                with nullcontext() if each is plain else microbatch(each, is_last=False):
                    each(torch.ones(2, 4), True).sum().backward()
                (each if zeroes_all else each.sometimes).zero_grad(set_to_none=False)
            for each in (plain, model):
                each(torch.ones(2, 4), False).sum().backward()
            assert _have_gradients(plain) == _have_gradients(model) == [True] * 4 + [False] * 2
            assert not model.sometimes.weight.grad.full_tensor().any()


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_microbatch(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
