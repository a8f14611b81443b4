"""Any ``torch.optim`` optimizer trains a sharded model and no forward sees stale weights, also without the wrapper."""

from __future__ import annotations

import logging.handlers
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import MixedPrecisionPolicy, fully_shard_optimizer, microbatch
from tests.support.agreement import assert_same_parameters, assert_trains_alike, groups_of, shard
from tests.support.models import (
    STRATEGY_NAMES,
    Net,
    context_of,
    full,
    global_batch,
    loss_of,
    make_net,
    make_pair,
    mean_loss,
    my_piece,
    shard_net,
)
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


class DataSgd(torch.optim.Optimizer):
    """Writes through ``p.data``, which does not count as a write for autograd."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad.data, alpha=-0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    "momentum, foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=False),
    "adamw, foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "through p.data": DataSgd,
}


def _net_loss(net: Any, rank: int, step: int) -> torch.Tensor:
    return loss_of(net, global_batch(step, dist.get_world_size())[rank])


def _shard_units(strategy: str) -> Callable[[Net], Any]:
    return lambda net: shard(net, ("blocks.0", "blocks.1"), strategy)


@CHECKS.on(2)
def the_next_forward_sees_the_new_weights_whoever_wrote_them() -> None:
    for strategy in STRATEGY_NAMES:
        for make_optimizer in OPTIMIZERS.values():
            assert_trains_alike(lambda: make_net(2), _shard_units(strategy), _net_loss, make_optimizer=make_optimizer)


@CHECKS.on(2)
def bf16_model_weights_follow_their_fp32_main_weights() -> None:
    """Model weights in another dtype must be updated after each kind of write to the main weights."""
    for strategy in STRATEGY_NAMES:
        for make_optimizer in (OPTIMIZERS["through p.data"], OPTIMIZERS["adamw, fused"]):
            net = shard_net(make_net(2, dtype=torch.bfloat16), strategy)
            optimizer = make_optimizer(net.parameters())
            for step in range(3):
                optimizer.zero_grad()
                loss_of(net, my_piece(step)).backward()
                optimizer.step()
                copy = make_net(2, dtype=torch.bfloat16)
                copy.load_state_dict({name: full(parameter) for name, parameter in net.named_parameters()})
                features = my_piece(step)[0].bfloat16()
                with torch.no_grad():
                    assert torch.equal(net(features), copy(features)), strategy


@CHECKS.on(1, 2, 4)
def sharded_and_plain_optimizers_agree() -> None:
    """``fully_shard_optimizer`` changes no result."""
    assert_trains_alike(
        lambda: make_net(2),
        _shard_units("optim_grads_params"),
        _net_loss,
        make_optimizer=lambda parameters: _marked(torch.optim.AdamW(parameters, lr=0.01)),
    )


def _marked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Call ``fully_shard_optimizer``, which does nothing to the optimizer of the plain model."""
    return fully_shard_optimizer(optimizer)


@CHECKS.on(2)
def weights_gathered_ahead_of_a_watched_step_are_gathered_anew() -> None:
    plain, net = make_pair(2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, net)]
    fully_shard_optimizer(optimizers[1])
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        mean_loss(plain, global_batch(step, 2)).backward()
        loss_of(net, my_piece(step)).backward()
        context_of(net).prepare_forward()  # too early
        for optimizer in optimizers:
            optimizer.step()
        assert_same_parameters(net, plain)
        with torch.no_grad():
            torch.testing.assert_close(net(my_piece(step)[0]), plain(my_piece(step)[0]))


# ---- refusals -------------------------------------------------------------------------------------------------------


@CHECKS.on(2)
def an_optimizer_from_before_is_refused() -> None:
    net = make_net()
    before = torch.optim.SGD(net.parameters(), lr=0.1)
    shard_net(net)
    with pytest.raises(ValueError, match=r"must be built after fully_shard, got a parameter of shape \[7, 5\]"):
        fully_shard_optimizer(before)
    mixed = torch.optim.SGD(net.parameters(), lr=0.1)
    mixed.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    fully_shard_optimizer(mixed)  # parameters without a group are ignored


WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": torch.optim.Adafactor,
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=1),
    "Rprop": torch.optim.Rprop,
}


@CHECKS.on(2)
def an_optimizer_that_needs_whole_tensors_is_refused_by_name() -> None:
    """It is served where parameters are whole, which is what the message proposes."""
    for name, make in WHOLE.items():
        for strategy in ("optim", "optim_grads_params"):
            net = shard_net(make_net(2), strategy)
            with pytest.raises(
                NotImplementedError,
                match=rf"^torch\.optim\.{name} needs .*, got entry\.weight.* in rows.*\(AdamW, SGD\), or .*'no_shard'",
            ):
                fully_shard_optimizer(make(net.parameters()))
        plain, net = make_pair(2, "no_shard")
        ours, theirs = fully_shard_optimizer(make(net.parameters())), make(plain.parameters())
        for step in range(3):
            losses = loss_of(net, my_piece(step)), mean_loss(plain, global_batch(step, 2))
            for optimizer, loss in zip((ours, theirs), losses, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step(loss.item)  # LBFGS wants a closure
        assert_same_parameters(net, plain)


@CHECKS.on(2)
def a_step_after_a_failed_backward_is_refused() -> None:
    plain, net = make_pair()
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))

    def fail(block: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = block(x)
        if block is net.blocks[1]:
            out.register_hook(lambda grad: 1 / 0)
        return out

    keep, net.around = net.around, fail
    with pytest.raises(ZeroDivisionError):
        loss_of(net, my_piece(0)).backward()
    with pytest.raises(RuntimeError, match="the last one did not finish; call zero_grad"):
        optimizer.step()
    net.around = keep
    optimizer.zero_grad()
    loss_of(net, my_piece(1)).backward()
    optimizer.step()
    mean_loss(plain, global_batch(1, 2)).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same_parameters(net, plain)


@CHECKS.on(2)
def a_step_before_the_last_microbatch_is_refused() -> None:
    """Under each strategy, also where gradients are reduced in each microbatch; not if they were given up."""
    for strategy in STRATEGY_NAMES:
        plain, net = make_pair(2, strategy)
        optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        with microbatch(net, is_first=True, is_last=False):
            loss_of(net, my_piece(7)).backward()
        optimizer.zero_grad()
        optimizer.step()
        with microbatch(net, is_first=True, is_last=False):
            loss_of(net, my_piece(0)).backward()
        with pytest.raises(RuntimeError, match=r"needs gradients reduced over the ranks.*is_last=True.*no_sync"):
            optimizer.step()
        with microbatch(net, is_first=False, is_last=True):
            loss_of(net, my_piece(1)).backward()
        optimizer.step()
        for step in range(2):
            mean_loss(plain, global_batch(step, 2)).backward()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        assert_same_parameters(net, plain)


@CHECKS.on(2)
def an_optimizer_may_be_watched_again() -> None:
    """The second call sees param groups that were added meanwhile, and adds no second check."""
    net = shard_net(make_net(2))
    first, second = list(net.blocks[0].parameters()), list(net.blocks[1].parameters())
    optimizer = fully_shard_optimizer(torch.optim.SGD(first, lr=0.1))
    num_hooks = len(optimizer._optimizer_step_pre_hooks)
    storages = [group.grads.main.storage for group in net.blocks[1].parameter_groups]
    optimizer.add_param_group({"params": second})
    assert fully_shard_optimizer(optimizer) is optimizer
    assert len(optimizer._optimizer_step_pre_hooks) == num_hooks
    loss_of(net, my_piece(0)).backward()
    assert all(storage.allocated for storage in storages)
    optimizer.zero_grad()
    assert not any(storage.allocated for storage in storages)


@CHECKS.on(1)
def what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"needs a torch\.optim\.Optimizer, got a object; pass the optimizer that it holds"
    ):
        fully_shard_optimizer(object())  # type: ignore[type-var]


@CHECKS.on(1)
def only_a_load_that_restored_nothing_is_told() -> None:
    """An SGD without momentum has no state to restore. ``pickle`` stands for DCP and files."""
    net = shard_net(make_net(2))
    for make, told in ((OPTIMIZERS["sgd"], 0), (OPTIMIZERS["momentum, foreach"], 1), (OPTIMIZERS["adam"], 1)):
        optimizer = fully_shard_optimizer(make(net.parameters()))
        with _records() as records:
            optimizer.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
        assert len(records) == told and all(
            "holds no state: the optimizer starts again" in r.getMessage() for r in records
        )
        optimizer.zero_grad()
        loss_of(net, my_piece(0)).backward()
        optimizer.step()
        with _records() as records:
            optimizer.load_state_dict(optimizer.state_dict())
        assert not records


@CHECKS.on(1)
def a_new_optimizer_that_accelerate_prepares_is_not_told() -> None:
    """It moves the state dict to the device, which makes containers anew, and loads it back; then a Trainer resumes."""

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(item) for key, item in value.items()}
        return type(value)(map(moved, value)) if isinstance(value, (list, tuple)) else value

    net = shard_net(make_net(2))
    for name in ("adam", "momentum, foreach"):
        optimizer = fully_shard_optimizer(OPTIMIZERS[name](net.parameters()))
        with _records() as records:
            optimizer.load_state_dict(moved(optimizer.state_dict()))
        assert not records
        # Another optimizer's is no longer that of this one.
        other = OPTIMIZERS[name](net.parameters())
        other.param_groups[0]["lr"] = float(str(other.param_groups[0]["lr"]))
        with _records() as records:
            optimizer.load_state_dict(other.state_dict())
        assert len(records) == 1


@contextmanager
def _records() -> Iterator[list[logging.LogRecord]]:
    """What the module of ``fully_shard_optimizer`` logs in this scope."""
    handler = logging.handlers.BufferingHandler(capacity=100)
    logger = logging.getLogger("megatron.core.distributed.fsdp.api.optimizer")
    logger.addHandler(handler)
    try:
        yield handler.buffer
    finally:
        logger.removeHandler(handler)


# ---- memory and dtype -----------------------------------------------------------------------------------------------


@CHECKS.on(2)
def zero_grad_gives_the_memory_of_gradients_back() -> None:
    net = shard_net(make_net())
    storages = [group.grads.main.storage for group in groups_of(net)]
    optimizer = fully_shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))

    def nbytes() -> int:
        return sum(storage.flat.untyped_storage().size() for storage in storages)

    assert nbytes() == 0
    loss_of(net, my_piece(0)).backward()
    held = nbytes()
    assert held == sum(storage.nbytes for storage in storages) > 0
    optimizer.zero_grad(set_to_none=False)
    assert nbytes() == held and not any(full(p.grad).any() for p in net.parameters())
    optimizer.zero_grad()
    assert nbytes() == 0 and all(p.grad is None for p in net.parameters())
    loss_of(net, my_piece(1)).backward()
    # Without the engine's zero_grad the memory is freed when the next forward begins.
    for parameter in net.parameters():
        parameter.grad = None
    assert nbytes() == held
    with torch.no_grad():
        net(my_piece(0)[0])
    assert nbytes() == 0


@CHECKS.on(2)
def gradients_in_another_dtype_are_cast_for_the_step() -> None:
    """bf16 main gradients of fp32 main weights are cast for the step alone, so any optimizer takes them."""
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)
    seen: list[torch.dtype] = []

    class Looking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.extend(parameter.grad.dtype for group in self.param_groups for parameter in group["params"])
            return super().step(closure)

    net, reference = shard_net(make_net(2), policy=policy), shard_net(make_net(2))
    optimizer = fully_shard_optimizer(Looking(net.parameters(), lr=0.1))
    loss_of(net, my_piece(0)).backward()
    loss_of(reference, my_piece(0)).backward()
    grads = [parameter.grad for parameter in net.parameters()]
    assert {grad.dtype for grad in grads if grad is not None} == {torch.bfloat16}
    with torch.no_grad():
        for parameter, exact in zip(net.parameters(), reference.parameters(), strict=True):
            assert parameter.grad is not None and exact.grad is not None
            assert torch.equal(parameter.grad.to_local(), exact.grad.to_local().bfloat16())  # type: ignore[attr-defined]
            exact.sub_(parameter.grad.float(), alpha=0.1)
    optimizer.step()
    assert set(seen) == {torch.float32}
    assert all(parameter.grad is grad for parameter, grad in zip(net.parameters(), grads, strict=True))
    for parameter, exact in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.to_local(), exact.to_local())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
