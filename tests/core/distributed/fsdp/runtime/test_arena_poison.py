"""Released memory is really released: reads of it would be NaN. And the plan holds: few addresses, always the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.fsdp import FsdpContext, FsdpParameterGroup, fully_shard_optimizer, microbatch
from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatStorage
from tests.support.models import (
    assert_at_rest,
    context_of,
    full,
    loss_of,
    make_net,
    my_piece,
    shard_net,
)
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)

_ALIGNMENT = 512


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    loss = loss_of(net, my_piece(step))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))


@CHECKS.on(2)
def the_plan_is_adopted_after_the_first_step() -> None:
    net = shard_net(make_net(3))
    context, optimizer = context_of(net), _optimizer(net)
    assert context.planner.plan is None
    _step(net, optimizer, 0)
    assert context.planner.plan is None, "the first step is recorded"
    for step in range(1, 4):
        _step(net, optimizer, step)
        assert context.planner.plan is not None and context.planner.in_plan
        assert not context.planner.recorder.is_recording, "what is planned is not recorded again"
    assert_at_rest(net)


@CHECKS.on(2)
def what_is_released_is_poisoned() -> None:
    """Weights after forward, staging after its reduction: the arenas hold nothing but NaN at rest."""
    net = shard_net(make_net(3))
    context, optimizer = context_of(net), _optimizer(net)
    for step in range(3):
        _step(net, optimizer, step)
    for group in context.groups:
        assert group.weights.full.local.isnan().all()
        assert group.grads.input.storage.flat.isnan().all()


@CHECKS.on(2)
def a_read_after_release_is_seen() -> None:
    """That the poison works: a forward that keeps a weight's view and uses it outside of its unit computes NaN."""
    net = shard_net(make_net(3))
    context, optimizer = context_of(net), _optimizer(net)
    for step in range(2):
        _step(net, optimizer, step)
    kept: list[torch.Tensor] = []
    handle = net.blocks[0].register_forward_hook(lambda block, *_: kept.append(block.up.weight.detach()))
    with torch.no_grad():
        net(my_piece(0)[0])
    handle.remove()
    assert kept[0].isnan().all()
    context.change_options(poisons=False)
    assert not context.options.poisons


@CHECKS.on(2)
def addresses_are_the_same_in_forward_and_backward_and_in_every_step() -> None:
    net = shard_net(make_net(4))
    optimizer = _optimizer(net)
    for step in range(2):
        _step(net, optimizer, step)
    seen: dict[int, set[int]] = {}

    def look(block: Any, *_: object) -> None:
        seen.setdefault(id(block), set()).add(block.up.weight.data_ptr())

    forward, backward = [], []
    for block in net.blocks:
        forward.append(block.register_forward_pre_hook(look))
        backward.append(block.register_full_backward_hook(lambda block, *_: look(block)))
    for step in range(2, 6):
        _step(net, optimizer, step)
    assert [len(addresses) for addresses in seen.values()] == [1] * 4
    addresses = [next(iter(addresses)) for addresses in seen.values()]
    assert addresses[0] == addresses[2] and addresses[1] == addresses[3] and addresses[0] != addresses[1]


@CHECKS.on(2)
def a_chain_of_equal_units_takes_two_ranges_and_the_root() -> None:
    """However long the chain is: one unit computes while the next is gathered, or the one before is reduced."""
    for num_blocks in (2, 5):
        net = shard_net(make_net(num_blocks))
        context, optimizer = context_of(net), _optimizer(net)
        for step in range(3):
            _step(net, optimizer, step)
        plan = context.planner.plan
        assert plan is not None
        storages: list[tuple[Any, Callable[[Any], FlatStorage]]] = [
            (plan.weights, lambda group: group.weights.full_storage),
            (plan.inputs, lambda group: group.grads.input.storage),
        ]
        assert [index for index, unit in enumerate(context.units) if unit.origin.has_nested] == [0]
        for ranges, storage_of in storages:
            root, *blocks = [
                _aligned(sum(storage_of(group).nbytes for group in unit.own_groups)) for unit in context.units
            ]
            assert len(set(blocks)) == 1
            assert ranges.nbytes == root + 2 * blocks[0], (ranges.nbytes, root, blocks)


@CHECKS.on(2)
def nothing_is_allocated_in_a_steady_step_but_main_gradients() -> None:
    """Storages are moved or taken outside of steps alone; main gradients come with backward and go when cleared."""
    net = shard_net(make_net(3))
    context, optimizer = context_of(net), _optimizer(net)
    for step in range(3):
        _step(net, optimizer, step)
    main_gradients = {id(group.grads.main.storage) for group in context.groups}
    allocated: list[int] = []
    moved: list[FlatStorage] = []
    allocate, move = FlatStorage.allocate, FlatStorage.move

    def watched_allocate(storage: FlatStorage) -> None:
        if not storage.allocated:
            allocated.append(id(storage))
        allocate(storage)

    FlatStorage.allocate = watched_allocate  # type: ignore[method-assign,assignment]
    FlatStorage.move = lambda storage, flat: moved.append(storage)  # type: ignore[method-assign,assignment]
    try:
        for step in range(3, 6):
            _step(net, optimizer, step)
    finally:
        FlatStorage.allocate, FlatStorage.move = allocate, move  # type: ignore[method-assign]
    assert not moved
    assert set(allocated) == main_gradients and len(allocated) == 3 * len(main_gradients)


@CHECKS.on(2)
def no_main_gradient_is_resident_during_forward() -> None:
    """With one microbatch, forward fills memory with activations while there are no gradients."""
    net = shard_net(make_net(3))
    context, optimizer = context_of(net), _optimizer(net)
    for step in range(3):
        loss = loss_of(net, my_piece(step))
        assert not any(group.grads.main.storage.allocated for group in context.groups)
        loss.backward()
        assert all(group.grads.main.storage.allocated for group in context.groups)
        optimizer.step()
        optimizer.zero_grad()
        assert not any(group.grads.main.storage.allocated for group in context.groups)


@CHECKS.on(2)
def several_microbatches_have_one_plan() -> None:
    """A microbatch is a page of the plan: the second does not depart from what the first recorded."""
    for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
        net = shard_net(make_net(3), strategy)
        context, optimizer = context_of(net), _optimizer(net)
        for step in range(3):
            for at in range(3):
                with microbatch(net, is_first=at == 0, is_last=at == 2):
                    loss = loss_of(net, my_piece(3 * step + at))
                    loss.backward()
                    assert not loss.isnan()
            assert context.planner.in_plan
            optimizer.step()
            optimizer.zero_grad()
        assert context.planner.plan is not None and len(context.planner.plan.uses) == 8
        assert_at_rest(net)


@CHECKS.on(2)
def units_that_need_a_shared_range_together_are_right() -> None:
    """Backward still holds a unit (used twice) when another comes that lies at its addresses: one gives way.

    The one that gave way is gathered again when backward comes back to it.
    """
    net, twin = shard_net(make_net(3)), make_net(3)
    context = context_of(net)
    for order in ([0, 1, 2], [0, 1, 2], [2, 0, 2], [0, 2, 0, 2], [0, 1, 2], [2, 0, 0, 2]):
        for model in (net, twin):
            model.order = order
            model.zero_grad()
            loss = loss_of(model, my_piece(0))
            loss.backward()
            assert not loss.isnan()
        before = _overlaps(context)
        gradients = [full(p.grad) for p in net.parameters() if p.grad is not None]
        assert gradients and not any(gradient.isnan().any() for gradient in gradients)
        assert_at_rest(net)
    assert before, "the plan of the chain shares addresses between units"


def _overlaps(context: FsdpContext) -> list[FsdpParameterGroup]:
    return [group for groups in context.unsharder.overlapping.values() for group in groups]


@CHECKS.on(2)
def a_unit_that_the_user_unshards_keeps_its_weights_while_others_run() -> None:
    """Its range belongs to others too in the plan, so it leaves it."""
    net, twin = shard_net(make_net(3)), make_net(3)
    optimizer = _optimizer(net)
    for step in range(2):
        _step(net, optimizer, step)
    twin.load_state_dict({key: value.full_tensor() for key, value in net.state_dict().items()})
    expected = twin.blocks[0].up.weight
    for order in ([1, 2], [1, 2], [0, 1, 2]):
        net.order = twin.order = order
        net.blocks[0].unshard()
        assert torch.equal(net.blocks[0].up.weight, expected)
        got = loss_of(net, my_piece(3))
        assert torch.equal(got, loss_of(twin, my_piece(3)))
        assert 0 in order or torch.equal(net.blocks[0].up.weight, expected)
        got.backward()
        assert_at_rest(net)
    net.zero_grad()
    for step in range(2):
        assert not _step(net, optimizer, step).isnan()
    assert_at_rest(net)


@CHECKS.on(2)
def a_unit_that_a_forward_left_whole_may_be_unsharded_by_hand() -> None:
    """Without a backward, the last unit still occupies its range, which the first unit needs in the next forward."""
    net = shard_net(make_net(3))
    optimizer = _optimizer(net)
    for step in range(2):
        _step(net, optimizer, step)
    loss_of(net, my_piece(2))
    net.blocks[2].unshard()
    assert not _step(net, optimizer, 3).isnan()
    assert_at_rest(net)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_arena_poison(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
