"""Hooks on sharded parameters: those that are called once a gradient is whole, and those that are refused."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input

from megatron.core.distributed.fsdp import microbatch
from tests.support.agreement import (
    ThreeLayers,
    assert_same_gradients,
    assert_same_parameters,
    backward_plainly,
    groups_of,
    inputs,
    seeded,
    shard,
)
from tests.support.models import STRATEGY_NAMES
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


UNITS = ThreeLayers.UNITS


def _loss(model: Any, rank: int, step: int) -> torch.Tensor:
    return model(inputs(rank, step, 3, 5)).square().mean()


def _steps_in_backward(model: nn.Module) -> None:
    """As torchtune does: an optimizer for each parameter, which steps as soon as its gradient is there."""
    optimizers = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)


@CHECKS.on(2)
def an_optimizer_in_backward_trains() -> None:
    for strategy in STRATEGY_NAMES:
        plain, model = seeded(ThreeLayers), seeded(ThreeLayers)
        shard(model, UNITS, strategy)
        _steps_in_backward(model)
        theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
        for step in range(4):
            theirs.zero_grad()
            backward_plainly(plain, _loss, step)
            theirs.step()
            _loss(model, dist.get_rank(), step).backward()
            assert_same_parameters(model, plain, f"{strategy}, step {step}")
            assert all(parameter.grad is None for parameter in model.parameters())
            assert not any(group.grads.main.storage.allocated for group in groups_of(model))


@CHECKS.on(2)
def hooks_see_the_whole_gradient_once_a_step() -> None:
    for strategy in STRATEGY_NAMES:
        plain, model = seeded(ThreeLayers), seeded(ThreeLayers)
        shard(model, UNITS, strategy)
        seen: list[str] = []
        handles = [
            parameter.register_post_accumulate_grad_hook(lambda _, n=name, s=seen: s.append(n))
            for name, parameter in model.named_parameters()
        ]
        for step in range(3):
            model.zero_grad()
            plain.zero_grad()
            backward_plainly(plain, _loss, step, num_microbatches=2)
            for index in range(2):
                with microbatch(model, is_first=index == 0, is_last=index == 1):
                    _loss(model, dist.get_rank(), 2 * step + index).backward()
                assert bool(seen) is (index == 1), "sums of earlier microbatches are no gradient yet"
            assert sorted(seen) == sorted(name for name, _ in model.named_parameters())
            assert_same_gradients(model, plain)
            seen.clear()
        handles[0].remove()
        _loss(model, dist.get_rank(), 9).backward()
        assert len(seen) == len(handles) - 1
        seen.clear()
        model.zero_grad()
        model(inputs(dist.get_rank(), 3, 3, 5), skips=True).sum().backward()
        assert not any(name.startswith("layers.1") for name in seen) and seen


@CHECKS.on(2)
def hooks_that_nobody_would_call_are_refused() -> None:
    model = shard(ThreeLayers(), UNITS)
    with pytest.raises(
        NotImplementedError, match=r"register_hook on the sharded parameter \S*weight .*post_accumulate"
    ):
        model.layers[0].weight.register_hook(lambda grad: grad)
    _loss(model, dist.get_rank(), 0).backward()
    for register, name in (("register_hook", "weight"), ("register_post_accumulate_grad_hook", "bias")):
        layer = nn.Linear(5, 5)
        getattr(getattr(layer, name), register)(lambda _: None)
        with pytest.raises(ValueError, match=rf"parameter {name} must have no hooks.*{register}.*after fully_shard"):
            shard(layer)


def _apply_in_backward(parameter: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch scripts optimizers when this is imported
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})


_ASKS: dict[str, Any] = {
    "a view": lambda p: p.view_as(p).grad_fn.next_functions[0][0].register_hook(print),
    "an expanded view": lambda p: p.expand_as(p).grad_fn.next_functions[0][0].register_prehook(print),
    "an edge": torch.autograd.graph.get_gradient_edge,
    "hooks on several": lambda p: torch.autograd.graph.register_multi_grad_hook([p], print),
    "an optimizer in backward": _apply_in_backward,
    "a schedule with a split backward": lambda p: stage_backward_input([p.detach()], None, [], iter([p])),
}


@CHECKS.on(2)
def the_accumulation_node_of_a_sharded_parameter_is_refused() -> None:
    """Hooks on it would never be called, and no graph has it."""
    for asked in (False, True):  # also after a step, and of a parameter that was unfrozen
        model = shard(ThreeLayers().requires_grad_(not asked), UNITS)
        if asked:
            model.requires_grad_()
            _loss(model, dist.get_rank(), 0).backward()
        for name, ask in _ASKS.items():
            with pytest.raises(
                NotImplementedError, match=r"accumulation node of the sharded parameter \S*weight .*register_post"
            ):
                ask(model.layers[0].weight)
                raise AssertionError(name)
        weight = model.layers[0].weight
        with torch.no_grad():
            assert torch.equal(weight.view_as(weight).full_tensor(), weight.full_tensor())
        assert weight.view_as(weight.detach()).shape == weight.shape
        for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight))):
            assert copied.view_as(copied).grad_fn is not None


@CHECKS.on(2)
def a_model_with_hooks_is_freed_with_its_last_reference() -> None:
    model = shard(ThreeLayers(), UNITS)
    _steps_in_backward(model)
    _loss(model, dist.get_rank(), 0).backward()
    groups = [weakref.ref(group) for group in groups_of(model)]
    gc.disable()
    try:
        del model
        assert not any(group() is not None for group in groups)
    finally:
        gc.enable()


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
