"""Orders of units that depart from the plan, and failures within a step."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.core.distributed.fsdp.situations.kinds import Kind, net, sgd, train, weights
from tests.core.distributed.fsdp.situations.table import situation


@situation()
def another_order_of_units_each_step(kind: Kind) -> Any:
    model = kind.shard(net())
    optimizer, losses = sgd(model), []
    for step, order in enumerate(([0, 1, 2], [2, 0], [1, 1, 0], [0, 1, 2], [2, 1, 0])):
        model.order = list(order)
        losses += train(kind, model, optimizer, range(step, step + 1))
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
