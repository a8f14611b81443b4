"""Orders of units that depart from the plan, and failures within a step."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.core.distributed.fsdp.situations.kinds import Kind, grads, net, seeded, sgd, train, weights
from tests.core.distributed.fsdp.situations.table import situation
from tests.support.models import Block


@situation()
def another_order_of_units_each_step(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer, losses = sgd(model), []
    for step, order in enumerate(([0, 1, 2], [2, 0], [1, 1, 0], [0, 1, 2], [2, 1, 0])):
        model.order = list(order)
        losses += train(kind, model, optimizer, range(step, step + 1))
    return losses, weights(model)


def _change_blocks(kind: Kind, num_steps: int, change: Any) -> Any:
    """Train, change which blocks there are, and train on."""
    model = kind.shard(net(4))
    losses = train(kind, model, sgd(model), range(num_steps))
    change(model)
    model.order = list(range(len(model.blocks)))
    return losses, train(kind, model, sgd(model), range(num_steps, num_steps + 4)), weights(model), grads(model)


def _remove(model: Any) -> None:
    del model.blocks[1]


@situation()
def a_unit_is_removed_after_the_recorded_step(kind: Kind) -> Any:
    return _change_blocks(kind, 1, _remove)


@situation()
def a_unit_is_removed_while_the_plan_is_in_use(kind: Kind) -> Any:
    return _change_blocks(kind, 3, _remove)


@situation()
def a_unit_is_replaced_after_the_recorded_step(kind: Kind) -> Any:
    def replace(model: Any) -> None:
        model.blocks[1] = kind.shard_one(seeded(lambda: Block(7), 5))

    return _change_blocks(kind, 1, replace)


@situation()
def a_unit_is_added_after_the_recorded_step(kind: Kind) -> Any:
    return _change_blocks(kind, 1, lambda model: model.blocks.append(kind.shard_one(seeded(lambda: Block(7), 5))))


@situation()
def a_unit_is_removed_between_forward_and_backward(kind: Kind) -> Any:
    model = kind.shard(net(4))
    optimizer, losses = sgd(model), []
    for step in range(4):
        optimizer.zero_grad()
        loss = kind.loss(model, step)
        losses.append(kind.mean(loss))
        if step == 0:
            del model.blocks[1]
            model.order = [0, 1, 2]
        loss.backward()
        optimizer.step()
        del loss
    return losses, weights(model)


@situation()
def a_slice_of_a_sharded_sequential(kind: Kind) -> Any:
    """It is not sharded itself; its layers are."""
    model = seeded(lambda: nn.Sequential(*[nn.Linear(5, 5) for _ in range(4)]))
    kind.shard(model, list(model))
    optimizer, losses = sgd(model), []
    for part in (model, model[:2], model[1:]):
        for step in range(3):
            optimizer.zero_grad()
            loss = part(kind.tensor(step, 4, 5)).square().mean()
            losses.append(kind.mean(loss))
            loss.backward()
            optimizer.step()
    return losses, weights(model)


@situation()
def two_forwards_before_two_backwards(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = sgd(model)
    for step in range(3):
        optimizer.zero_grad()
        losses = [kind.loss(model, 2 * step + index) for index in range(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
    return weights(model)


@situation()
def recomputed_units(kind: Kind) -> Any:
    model = net()
    model.around = lambda block, x: checkpoint(block, x, use_reentrant=False)
    kind.shard(model)
    return train(kind, model, sgd(model), range(3)), weights(model)


@situation()
def a_forward_that_raises_is_tried_again(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer = sgd(model)
    train(kind, model, optimizer, range(2))
    with contextlib.suppress(RuntimeError):
        model(torch.ones(4, 99))
    return train(kind, model, optimizer, range(2, 4)), weights(model)
