"""What only one rank can know (a tensor that it keeps, when its garbage is collected) never decides what ranks do together.

Ranks run the same code, but rank 0 keeps something. A wrong decision shows as a hang or an error about the order of units.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import fully_shard, fully_shard_context, fully_shard_optimizer, microbatch
from megatron.core.distributed.fsdp.matrices.replayed_work import no_garbage_collection
from tests.core.distributed.fsdp.runtime.test_order import Pair
from tests.support.models import assert_same_gradients, context_of, global_batch, loss_of, make_net, shard_net
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)

STRATEGIES = ("optim", "optim_grads_params")


def _is_first() -> bool:
    return dist.get_rank() == 0


def _train(
    disturb: Callable[[Pair, int, list[Any]], None], *, strategy: str = STRATEGIES[-1], num_steps: int = 10
) -> Pair:
    """Train with both nets, ``disturb`` each step; check gradients and weights after each."""
    pair, kept = Pair(3, strategy), list[Any]()
    for step in range(num_steps):
        disturb(pair, step, kept)
        pair.step()
    pair.steps(1)
    return pair


# ---- 1. graphs ----------------------------------------------------------------------------------------------------------


def _validate(pair: Pair, kept: list[Any]) -> None:
    """Validate without ``no_grad``; rank 0 keeps the predictions, which were not detached."""
    output = pair.sharded(pair.pieces(1)[0][0])
    if _is_first():
        kept.append(output)


def _validate_at(at: int, pair: Pair, step: int, kept: list[Any]) -> None:
    if step == at:
        _validate(pair, kept)


@CHECKS.on(2)
def an_output_that_one_rank_keeps_changes_no_order() -> None:
    """From each step, and from one step before there is a plan, while one is recorded, and after it was adopted."""
    for strategy in STRATEGIES:
        _train(lambda pair, step, kept: _validate(pair, kept), strategy=strategy)
        for at in (0, 1, 3):
            pair = _train(functools.partial(_validate_at, at), strategy=strategy)
            assert pair.context.planner.in_plan, (
                "weights were written since: no backward can come, and steps follow the plan again"
            )


@CHECKS.on(2)
def a_retained_loss_that_one_rank_keeps_changes_no_order() -> None:
    def retain(pair: Pair, step: int, kept: list[Any]) -> None:
        loss = loss_of(pair.sharded, pair.pieces(1)[0])
        loss.backward(retain_graph=True)
        pair.sharded.zero_grad()
        if _is_first():
            kept[:] = [loss]

    for strategy in STRATEGIES:
        assert _train(retain, strategy=strategy, num_steps=14).context.planner.in_plan


@CHECKS.on(2)
def an_exception_that_one_rank_keeps_changes_no_order() -> None:
    """Its traceback holds the forward's frames, and so the graph of what ran before."""

    def fail(pair: Pair, step: int, kept: list[Any]) -> None:
        if step != 3:
            return

        def trip(*_: object) -> None:
            raise ValueError("trips")

        handle = pair.sharded.blocks[2].register_forward_pre_hook(trip)
        try:
            pair.sharded(pair.pieces(1)[0][0])
        except ValueError as error:
            if _is_first():
                kept.append(error)
        handle.remove()

    assert _train(fail).context.planner.in_plan


@CHECKS.on(2)
def graphs_in_circles_change_no_order_whenever_they_are_collected() -> None:
    def leave_circle(pair: Pair, step: int, kept: list[Any]) -> None:
        if step == 3:
            circle: list[Any] = [pair.sharded(pair.pieces(1)[0][0])]
            circle.append(circle)
        if step == 5 and _is_first():
            gc.collect()

    with no_garbage_collection():
        assert _train(leave_circle).context.planner.in_plan


@CHECKS.on(2)
def a_graph_that_waits_on_all_ranks_is_still_waited_for() -> None:
    """Its weights have not been written since: its backward comes, and is right."""
    pair = Pair(3)
    pair.steps(3)
    for _ in range(2):
        first, second = pair.pieces(2)
        waiting = [loss_of(net, first) for net in pair.nets]
        for net, loss in zip(pair.nets, waiting, strict=True):
            loss_of(net, second).backward()
            loss.backward()
        del waiting, loss
        pair.finish_step()
    pair.steps(2)


@CHECKS.on(2)
def a_backward_through_a_graph_from_before_weights_moved_is_refused() -> None:
    """Frozen weights are never written, so that the version fence does not see it."""
    net = make_net()
    for block in net.blocks:
        block.requires_grad_(False)
    shard_net(net)
    optimizer = fully_shard_optimizer(torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1))
    piece = global_batch(0, 1)[0]
    kept = loss_of(net, piece)
    for _ in range(6):
        loss_of(net, piece).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert context_of(net).planner.in_plan
    with pytest.raises(RuntimeError, match="from an earlier step"):
        kept.backward()


@CHECKS.on(2)
def microbatches_run_in_one_order_whatever_one_rank_keeps() -> None:
    pair, kept = Pair(3), list[Any]()
    for step in range(6):
        pieces = pair.pieces(2)
        for at, piece in enumerate(pieces):
            with microbatch(pair.sharded, is_first=at == 0, is_last=at == 1):
                loss = loss_of(pair.sharded, piece)
                loss.backward(retain_graph=_is_first() and step == 2)
                output = pair.sharded(piece[0])
                if _is_first():
                    kept.append(output)
            loss_of(pair.unsharded, piece).backward()
        pair.finish_step()


# ---- 2. units -----------------------------------------------------------------------------------------------------------


def _remove_block(pair: Pair, kept: list[Any], *, in_circle: bool) -> weakref.ref[Any]:
    block = pair.sharded.blocks[1]
    if in_circle:
        block.itself = [block]
    elif _is_first():
        kept.append(block)
    for net in pair.nets:
        del net.blocks[1]
        net.order = [0, 1]
    return weakref.ref(block)


@CHECKS.on(2)
def a_removed_unit_is_gathered_on_all_ranks_or_on_none() -> None:
    """It lives on where somebody keeps it, or until the garbage collector comes."""
    for in_circle in (False, True):
        for num_steps in (1, 2, 4):
            with no_garbage_collection():
                pair, kept = Pair(3), list[Any]()
                pair.steps(num_steps)
                _remove_block(pair, kept, in_circle=in_circle)
                if not _is_first():
                    gc.collect()
                pair.steps(5)
                assert pair.context.planner.in_plan


@CHECKS.on(2)
def a_removed_unit_is_freed_on_all_ranks_once_a_plan_goes_without_it() -> None:
    with no_garbage_collection():
        pair = Pair(3)
        pair.steps(3)
        block = _remove_block(pair, [], in_circle=False)
        if not _is_first():
            assert block() is None
        weights = {name: weakref.ref(group.weights) for group in pair.context.groups if (name := group.name_of(0))}
        pair.steps(4)
        assert sorted(name for name, ref in weights.items() if name.startswith("blocks.1.") and ref() is not None) == []
        assert len(pair.context.units) == 3


@CHECKS.on(2)
def a_sibling_that_one_rank_keeps_is_gathered_on_all_ranks_or_on_none() -> None:
    with fully_shard_context() as context:
        nets: list[Any] = [fully_shard(make_net(seed=seed)) for seed in range(3)]
    reference = [make_net(seed=seed) for seed in range(3)]

    def step(number: int) -> None:
        piece = global_batch(number, 1)[0]
        for own in (nets, reference):
            with microbatch(context):
                torch.stack([loss_of(net, piece) for net in own]).sum().backward()
        for net, plain in zip(nets, reference, strict=True):
            assert_same_gradients(net, plain)
            net.zero_grad()
            plain.zero_grad()

    for number in range(3):
        step(number)
    kept = [nets.pop(1), reference.pop(1)]
    if not _is_first():
        kept.clear()
    for number in range(5):
        step(number)
    assert context.planner.in_plan


# ---- 3. weights that the user unsharded -----------------------------------------------------------------------------------


@CHECKS.on(2)
def a_write_that_one_rank_makes_is_followed_by_all() -> None:
    """Rank 0 writes its own numbers again: no rank computes otherwise, and none gathers alone."""
    pair = Pair(3)
    pair.steps(3)
    pair.sharded.blocks[1].unshard()
    if _is_first():
        with torch.no_grad():
            for group in pair.context.groups:
                for parameter in group.sharded:
                    parameter.mul_(1.0)
    pair.steps(3)


@CHECKS.on(2)
def a_load_that_one_rank_makes_before_the_first_forward_is_an_error() -> None:
    net = shard_net(make_net())
    if _is_first():
        net.load_state_dict(make_net(seed=1).state_dict())
    with pytest.raises(ValueError, match=r"number of loads of .* Call load_state_dict on all ranks"), torch.no_grad():
        net(global_batch(0, 1)[0][0])


@CHECKS.on(2)
def a_load_that_one_rank_makes_between_steps_is_an_error() -> None:
    pair = Pair(3)
    pair.steps(3)
    if _is_first():
        pair.sharded.load_state_dict(make_net(seed=1).state_dict())
    with pytest.raises(
        RuntimeError, match=r"all ranks must load the same weights, .* Call load_state_dict on all ranks"
    ):
        loss_of(pair.sharded, pair.pieces(1)[0]).backward()


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_what_one_rank_knows(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
