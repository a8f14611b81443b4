"""What users reach of a sharded model is theirs: parameters are sharded between passes, and gradients stay as they were kept.

The engine keeps weights unsharded and sums unreduced for reasons of its own. None of that may show.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import (
    FsdpModule,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from megatron.core.distributed.fsdp.flat_optimizer.flat_adamw import FlatAdamW
from tests.support.models import (
    STRATEGY_NAMES,
    assert_at_rest,
    assert_same_gradients,
    assert_same_weights,
    context_of,
    global_batch,
    loss_of,
    make_net,
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
        context_of(net).change_options(memory_budget_nbytes=budget_nbytes)
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


# ---- sums over microbatches that wait -------------------------------------------------------------------------------


def _accumulate(net: nn.Module, step: int, *, count: int = 3, is_last: bool = True) -> None:
    """A step's backwards, in scopes that say nothing but which one is the last."""
    for at, piece in enumerate(global_batch(step, count)):
        with _scope(net, is_last=is_last and at == count - 1):
            loss_of(net, piece).backward()


def _scope(net: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
    return microbatch(net, is_last=is_last) if isinstance(net, FsdpModule) else nullcontext()


def _no_sync(net: nn.Module) -> AbstractContextManager[None]:
    """What the adapter's ``no_sync`` is."""
    return context_of(net).state.accumulate() if isinstance(net, FsdpModule) else nullcontext()


@CHECKS.on(2)
def to_say_which_microbatch_is_the_last_is_enough() -> None:
    """Whether one is the first follows from what waits: nothing after a step, ``zero_grad``, or a last one."""
    for strategy, dtype in itertools.product(STRATEGY_NAMES, (torch.float32, torch.bfloat16)):
        unsharded, sharded = make_pair(2, strategy, dtype=dtype)
        optimizers = [_sgd(unsharded), _sgd(sharded)]
        for step in range(4):
            for net in (unsharded, sharded):
                if step == 2:
                    _accumulate(net, 7, is_last=False)
                    net.zero_grad()
                _accumulate(net, step, count=1 + step)
            assert_same_gradients(sharded, unsharded, tolerance=_TOLERANCE[dtype])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert_at_rest(sharded)
        assert_same_weights(sharded, unsharded, tolerance=_TOLERANCE[dtype])


# In bf16 the unsharded model sums in bf16, and the sharded one in fp32.
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-2}


@CHECKS.on(2)
def sums_that_wait_survive_a_forward_that_fails() -> None:
    for strategy in STRATEGY_NAMES:
        unsharded, sharded = make_pair(2, strategy)
        for net in (unsharded, sharded):
            _accumulate(net, 0, is_last=False)
            hook = net.blocks[1].register_forward_pre_hook(_trip)
            with pytest.raises(ValueError, match="trips"), _scope(net, is_last=False):
                loss_of(net, global_batch(1, 1)[0])
            hook.remove()
            _accumulate(net, 2)
        assert_same_gradients(sharded, unsharded)
        assert_at_rest(sharded)


def _trip(*_: object) -> None:
    raise ValueError("trips")


def _by_hand(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in net.parameters():
        parameter.grad = None


def _some_by_hand(net: Any, optimizer: torch.optim.Optimizer) -> None:
    net.blocks[0].up.weight.grad = None
    net.head.bias.grad = None
    net.blocks[1].norm.bias.grad.zero_()


def _by_buffer(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(net, FsdpModule):
        for group in context_of(net).groups:
            group.grads.clear()  # the adapter's zero_grad_buffer
    else:
        net.zero_grad()


_CLEARS: list[Callable[[Any, torch.optim.Optimizer], Any]] = [
    lambda net, optimizer: net.zero_grad(),
    lambda net, optimizer: net.zero_grad(set_to_none=False),
    lambda net, optimizer: optimizer.zero_grad(),
    lambda net, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda net, optimizer: torch.optim.AdamW(net.parameters(), foreach=True).zero_grad(set_to_none=False),
    lambda net, optimizer: [parameter.grad.data.zero_() for parameter in net.parameters()],
    _by_hand,
    _some_by_hand,
    _by_buffer,
]


@CHECKS.on(2)
def zero_grad_ends_an_accumulation_that_was_given_up() -> None:
    """Of all parameters or of some; over a gradient that was complete or none; before a forward or between it and backward."""
    for strategy, clear in itertools.product(STRATEGY_NAMES, _CLEARS):
        unsharded, sharded = make_pair(2, strategy)
        ours = torch.optim.SGD(sharded.parameters(), lr=0.1)
        if clear is _CLEARS[2]:
            ours = fully_shard_optimizer(ours)
        optimizers = {unsharded: torch.optim.SGD(unsharded.parameters(), lr=0.1), sharded: ours}
        for step, (complete, between) in enumerate(itertools.product((False, True), (False, True))):
            for net in (unsharded, sharded):
                net.zero_grad()
                if complete:
                    _accumulate(net, step)
                with _no_sync(net):
                    loss_of(net, global_batch(5, 1)[0]).backward()
                _accumulate(net, 10 + step, is_last=False)
                if between:
                    loss = loss_of(net, global_batch(20 + step, 1)[0])
                clear(net, optimizers[net])
                if between:
                    with _scope(net, is_last=True):
                        loss.backward()
                else:
                    _accumulate(net, 20 + step)
            assert_same_gradients(sharded, unsharded)
            assert_at_rest(sharded)
        for net, optimizer in optimizers.items():  # a step after nothing but an accumulation that was given up
            _accumulate(net, 30, is_last=False)
            clear(net, optimizer)
            net.zero_grad()
            optimizer.step()
        assert_same_weights(sharded, unsharded)


@CHECKS.on(2)
def a_sum_that_waits_is_refused_to_whoever_uses_it() -> None:
    """An optimizer that knows nothing of us would skip the parameters without a word."""
    for strategy in ("no_shard", "optim"):
        _, net = make_pair(2, strategy)
        _accumulate(net, 0, is_last=False)
        for use in (
            _sgd(net).step,
            torch.optim.AdamW(net.parameters()).step,
            lambda net=net: torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0),
            lambda net=net: net.head.weight.grad.full_tensor(),
            lambda net=net: net.head.weight.grad + 1,
        ):
            with pytest.raises(
                RuntimeError, match=r"gradient of \S+ must not be used before the step's last microbatch"
            ):
                use()
        with pytest.raises(RuntimeError, match=r"gradient of head\.weight .* got 'to_local'"):
            net.head.weight.grad.to_local()
        assert "head.weight" in repr(net.head.weight.grad)


# ---- gradients that the user keeps ----------------------------------------------------------------------------------


_KEEPS: list[Callable[[Any], torch.Tensor]] = [
    lambda grad: grad,
    lambda grad: grad.detach(),
    lambda grad: grad.to_local() if isinstance(grad, DTensor) else grad,
    lambda grad: grad.to_local()[:1] if isinstance(grad, DTensor) else grad[:1],
]


@CHECKS.on(2)
def a_gradient_that_the_user_keeps_stays_as_it_was() -> None:
    """Over ``zero_grad``, which frees gradients, and later backwards, which reuse their memory: of all weights, or of one."""
    for strategy, keep in itertools.product(STRATEGY_NAMES, _KEEPS):
        nets = unsharded, sharded = make_pair(2, strategy)
        optimizers = [_sgd(unsharded), fully_shard_optimizer(_sgd(sharded))]
        for step, num_kept in enumerate((100, 1, 0, 0)):
            flats = _flats(sharded)
            _backward(nets, step)
            kept = _Kept([keep(parameter.grad) for parameter in [*sharded.parameters()][:num_kept]])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            kept.check()
            _backward(nets, step + 1)
            kept.check()
            assert_same_gradients(sharded, unsharded)
            losses = [loss_of(net, global_batch(step + 2, 1)[0]) for net in nets]
            kept = _Kept([keep(parameter.grad) for parameter in [*sharded.parameters()][:num_kept]])
            for net, loss in zip(nets, losses, strict=True):
                net.zero_grad()  # between forward and backward
                loss.backward()
            kept.check()
            assert_same_gradients(sharded, unsharded)
            kept = _Kept([keep(parameter.grad) for parameter in [*sharded.head.parameters()][:num_kept]])
            for net in nets:
                net.head.zero_grad()  # a part; the rest is added to
            _backward(nets, step + 3)
            kept.check()
            assert_same_gradients(sharded, unsharded)
            for net in nets:
                net.zero_grad()
        assert all(map(operator.is_, flats, _flats(sharded))), "nothing was kept, so memory is used again"
        assert_same_weights(sharded, unsharded)


def _backward(nets: Iterable[nn.Module], step: int) -> None:
    for net in nets:
        loss_of(net, global_batch(step, 1)[0]).backward()


def _flats(net: nn.Module) -> list[torch.Tensor]:
    return [group.grads.main.storage.flat for group in context_of(net).groups]


class _Kept:
    """Tensors, and a copy of their values."""

    def __init__(self, grads: list[torch.Tensor]) -> None:
        self.grads = grads
        self.values = [_values(grad).clone() for grad in grads]

    def check(self) -> None:
        assert all(torch.equal(_values(grad), value) for grad, value in zip(self.grads, self.values, strict=True))


def _values(grad: torch.Tensor) -> torch.Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


# ---- parameters without a gradient ----------------------------------------------------------------------------------


class Optional(nn.Module):
    """A layer of which a part is used if asked, and a part never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.uses = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.always(x)
        return out + self.sometimes(x) if self.uses else out


def _optional_nets(strategy: str) -> tuple[nn.Sequential, nn.Sequential]:
    nets = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            nets.append(nn.Sequential(nn.Linear(5, 7), Optional(), Optional(), nn.Linear(7, 3)))
    for module in (nets[1][1], nets[1][2], nets[1]):
        fully_shard(module, placements=strategy_placements(strategy))
    return nets[0], nets[1]


def _names_without(net: nn.Module) -> list[str]:
    return [name for name, parameter in net.named_parameters() if parameter.grad is None]


@CHECKS.on(2)
def a_parameter_without_a_gradient_on_any_rank_has_none() -> None:
    """So AdamW neither decays nor moves it, nor counts a step: in a step or all, in some microbatches or all, cleared either way."""
    for strategy, count, flat, set_to_none in itertools.product(STRATEGY_NAMES, (1, 2), (False, True), (True, False)):
        nets = unsharded, sharded = _optional_nets(strategy)
        make = FlatAdamW if flat else torch.optim.AdamW
        optimizers = [
            torch.optim.AdamW(unsharded.parameters(), lr=0.05, weight_decay=0.5),
            make(sharded.parameters(), lr=0.05, weight_decay=0.5),
        ]
        # By step and microbatch: which of the two layers use their optional part.
        for step, uses in enumerate(["11 11", "10 10", "00 01", "11 10", "00 00", "00 00", "01 00", "11 11"]):
            for net in nets:
                for at, which in enumerate(uses.split()[:count]):
                    for layer, use in zip([*net][1:3], which, strict=True):
                        layer.uses = use == "1"
                    with _scope(net, is_last=at == count - 1):
                        net(global_batch(step, 2)[at][0]).square().mean().backward()
            assert _names_without(sharded) == _names_without(unsharded), (strategy, count, step)
            assert "1.never.weight" in _names_without(sharded)
            assert_same_gradients(sharded, unsharded)
            if step % 2 and count == 1 and set_to_none:
                norms = [
                    torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
                    for net in nets
                ]
                ours = norms[1].full_tensor() if isinstance(norms[1], DTensor) else norms[1]
                assert torch.allclose(ours, norms[0])
                assert not flat or torch.allclose(optimizers[1].grad_norm(), norms[0])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
            assert_same_weights(sharded, unsharded, tolerance=1e-5)  # Adam divides by small numbers
        assert_at_rest(sharded)


@CHECKS.on(2)
def where_ranks_differ_zeros_count_and_it_is_said_once() -> None:
    unsharded, sharded = _optional_nets("optim_grads_params")
    rank = dist.get_rank()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron.core.distributed.fsdp.runtime.grad_reducer")
    logger.addHandler(handler)
    for step in range(4):
        for net in (unsharded, sharded):
            net.zero_grad()
        for of_rank in range(2):
            unsharded[1].uses = of_rank == 0  # type: ignore[assignment]
            (unsharded(global_batch(step, 2)[of_rank][0]).square().mean() / 2).backward()
        sharded[1].uses = rank == 0  # type: ignore[assignment]
        sharded(global_batch(step, 2)[rank][0]).square().mean().backward()
        assert_same_gradients(sharded, unsharded)
        assert _names_without(sharded) == _names_without(unsharded)
    logger.removeHandler(handler)
    assert len(said) == rank, said
    assert all("1.sometimes.weight got no gradient on this rank and one on 1 others" in message for message in said)


# ---- weights that the user unsharded --------------------------------------------------------------------------------


def _assert_unsharded_like(unit: Any, twin: Any) -> None:
    for (name, ours), theirs in zip(unit.named_parameters(recurse=False), twin.parameters(recurse=False), strict=True):
        assert torch.equal(ours.detach(), theirs.detach()), name


@CHECKS.on(2)
def weights_that_the_user_unsharded_stay_where_a_plan_is_adopted_or_left() -> None:
    """While a block is used alone, twice, as for generation; and while all are trained."""
    for budget_nbytes in (0, 10**6):
        unsharded, sharded = make_pair(3)
        context_of(sharded).change_options(memory_budget_nbytes=budget_nbytes)
        features = torch.randn(4, 7, generator=torch.Generator().manual_seed(3))
        optimizer = _sgd(sharded)
        units = (*sharded.blocks, sharded)
        for unit in units:
            unit.unshard()
        loss_of(sharded, global_batch(0, 1)[0]).backward()  # the plan, with ranges that units share
        assert_at_rest(sharded)
        optimizer.zero_grad()
        for step in range(4):
            for unit in units:
                unit.unshard()
            for net in (unsharded, sharded):
                out = torch.nn.functional.linear(net.blocks[1](features), net.head.weight.detach())
                out.square().mean().backward()
                if step == 2:
                    loss_of(net, global_batch(step, 1)[0]).backward()
            assert_at_rest(sharded)
            for unit in units:
                unit.unshard()
            for ours, theirs in zip(sharded.modules(), unsharded.modules(), strict=True):
                _assert_unsharded_like(ours, theirs)
            for unit in units:
                unit.reshard()
        assert_at_rest(sharded)
        assert_same_gradients(sharded, unsharded)
        for net in (unsharded, sharded):
            net.zero_grad()
            _train(net, _sgd(net), 3)
        assert_same_weights(sharded, unsharded)


@CHECKS.on(2)
def units_may_be_unsharded_before_their_root_has_run() -> None:
    """Some or all of them, in bf16 too, where model weights are casts; an optimizer from before trains all of them."""
    for dtype, whole in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        unsharded, sharded = make_pair(3, dtype=dtype, adopts=False)
        fresh = make_pair(3, dtype=dtype)[1]
        for net in (sharded, fresh):
            optimizer = _sgd(net)
            if net is sharded:
                for unit in (*net.blocks, net) if whole else net.blocks[:2]:
                    unit.unshard()
                for unit, twin in zip(net.blocks[:2], unsharded.blocks, strict=False):
                    _assert_unsharded_like(unit.up, twin.up)
            for step in range(4):
                _train(net, optimizer, 1, first=step)
                assert_at_rest(net)
        for ours, theirs in zip(sharded.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(ours.to_local(), theirs.to_local())  # type: ignore[attr-defined]


@CHECKS.on(2)
def a_unit_that_ran_alone_forgets_its_former_root() -> None:
    """Its weights were cast for a version of another context, whose count says nothing in this one."""
    for strategy in STRATEGY_NAMES:
        unsharded, sharded = make_pair(2, strategy, dtype=torch.bfloat16, adopts=False)
        features = torch.randn(4, 7, generator=torch.Generator().manual_seed(3)).bfloat16()
        losses = []
        for net in (unsharded, sharded):
            with torch.no_grad():
                net.blocks[0](features)
                for parameter in net.blocks[0].parameters():
                    parameter.data.mul_(2)
                losses.append(loss_of(net, global_batch(0, 1)[0]))
        assert abs(losses[0] - losses[1]) <= 1e-2 * abs(losses[0]), (strategy, losses)


# ---- the debug mode -------------------------------------------------------------------------------------------------


@CHECKS.on(2)
def a_detached_weight_is_refused_after_its_unit_was_left_under_the_debug_mode() -> None:
    """In any step, between forward and backward and after it; training itself is as it was, and the cost is said once."""
    unsharded = make_net(2)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron.core.distributed.fsdp.checks.debug_mode")
    with fully_shard_context(debug=True) as context:
        sharded = make_net(2)
        for unit in (*sharded.blocks, sharded):
            fully_shard(unit)
    kept: list[torch.Tensor] = []
    sharded.blocks[0].register_forward_hook(
        lambda block, *_: kept.extend(
            [block.up.weight.detach(), block.up.weight[:1], block.up.weight.data, block.up.weight.t()]
        )
    )
    copies: list[torch.Tensor] = []
    sharded.blocks[0].register_forward_hook(lambda block, *_: copies.append(block.up.weight.detach().clone()))
    logger.addHandler(handler)
    optimizers = [_sgd(unsharded), _sgd(sharded)]
    for step in range(3):
        kept.clear()
        copies.clear()
        losses = [loss_of(net, global_batch(step, 1)[0]) for net in (unsharded, sharded)]
        for when in ("between", "after"):
            for tensor in kept:
                with pytest.raises(
                    RuntimeError, match=r"unsharded weight \S*up\.weight must be read within .* got 'sum'"
                ):
                    tensor.sum()
                with pytest.raises(RuntimeError, match=r"up\.weight must be read within"):
                    torch.add(torch.ones(1), tensor)
            assert copies[0].isfinite().all()
            if when == "between":
                for loss in losses:
                    loss.backward()
        assert_same_gradients(sharded, unsharded)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    logger.removeHandler(handler)
    assert len([message for message in said if message.startswith("debug mode: the first step looked at ")]) == 1
    assert context.debug and context.options.poisons
    with pytest.raises(ValueError, match="must stay on"):
        context.debug = False


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_public_state(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
