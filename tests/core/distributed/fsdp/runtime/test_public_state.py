"""What users reach of a sharded model is theirs: parameters are sharded between passes, and gradients stay as they were kept.

The engine keeps weights unsharded and sums unreduced for reasons of its own. None of that may show.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.models import (
    assert_at_rest,
    assert_same_gradients,
    assert_same_weights,
    context_of,
    global_batch,
    loss_of,
    make_pair,
)
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, first: int = 0) -> None:
    for step in range(first, first + steps):
        loss_of(net, global_batch(step, 1)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()


def _sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)


# ---- parameters between forward and backward -------------------------------------------------------------------------


@CHECKS.on(2)
def parameters_are_sharded_when_forward_is_left() -> None:
    """Also those of the unit that stays unsharded where forward turns into backward, and with a memory budget."""
    for budget_nbytes in (0, 10**6):
        _, net = make_pair(3)
        optimizer = _sgd(net)
        context_of(net).planner.memory_budget_nbytes = budget_nbytes
        for step in range(4):
            loss = loss_of(net, global_batch(step, 1)[0])
            assert step < 2 or context_of(net).unsharder.live, "weights stay unsharded for backward"
            assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
            assert all(isinstance(value, DTensor) for value in net.state_dict().values())
            loss.backward()
            assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
            optimizer.step()
            optimizer.zero_grad()


@CHECKS.on(2)
def what_users_do_between_forward_and_backward_is_in_effect() -> None:
    """``zero_grad`` clears the gradients of all units, norms count all, and an optimizer built there trains all."""
    unsharded, sharded = make_pair(3)
    for net in (unsharded, sharded):
        _train(net, _sgd(net), 2)
    norms, optimizers = [], []
    for net in (unsharded, sharded):
        loss_of(net, global_batch(2, 1)[0]).backward()  # the gradient that zero_grad is to clear
        loss = loss_of(net, global_batch(3, 1)[0])
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        net.zero_grad()
        optimizers.append(_sgd(net))
        loss.backward()
    assert torch.allclose(norms[0], norms[1], rtol=1e-5), norms
    assert_same_gradients(sharded, unsharded)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(sharded, unsharded)
    for net, optimizer in zip((unsharded, sharded), optimizers, strict=True):
        loss = loss_of(net, global_batch(4, 1)[0])
        del loss
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.5)
        _train(net, optimizer, 1, first=5)
    assert_same_weights(sharded, unsharded)


@CHECKS.on(2)
def parameters_are_sharded_after_a_backward_that_failed() -> None:
    _, net = make_pair(3)
    optimizer = _sgd(net)
    _train(net, optimizer, 2)

    def trip(grad: torch.Tensor) -> None:
        raise ValueError("trips")

    inner = net.blocks[1]
    hook = inner.register_forward_hook(lambda _module, _args, output: output.register_hook(trip) and None)
    loss = loss_of(net, global_batch(2, 1)[0])
    with pytest.raises(ValueError, match="trips"):
        loss.backward()
    hook.remove()
    del loss
    assert all(isinstance(parameter, DTensor) for parameter in net.parameters())
    optimizer.zero_grad()
    _train(net, optimizer, 1, first=3)
    assert_at_rest(net)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_public_state(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
