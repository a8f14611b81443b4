"""The debug mode names the first gradient or weight that is not finite, on all ranks, whatever rank has it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import fully_shard, fully_shard_context, hybrid_placements, microbatch
from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from tests.support.models import STRATEGY_NAMES, Net, context_of, global_batch, loss_of, make_net
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
_NAN, _INFINITY = float("nan"), float("inf")


def _sharded(strategy: str = "optim_grads_params", **settings: Any) -> Net:
    model = make_net(2)
    with fully_shard_context(debug=True):
        for unit in (*model.blocks, model):
            fully_shard(unit, placements=strategy, **settings)
    return model


def _loss(model: Net, step: int = 0) -> torch.Tensor:
    return loss_of(model, global_batch(step, dist.get_world_size())[dist.get_rank()])


def _spoil(value: float) -> Any:
    """Return a forward hook that gives the gradient of the output this value, on rank 1 alone."""

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if dist.get_rank() == 1:
            output.register_hook(lambda grad: torch.full_like(grad, value))

    return hook


def _largest(grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient whose sum over rows has room in fp32, and whose sum over two ranks has none."""
    return torch.full_like(grad, torch.finfo(torch.float32).max / 1.5 / len(grad))


@CHECKS.on(2)
def the_first_gradient_that_is_not_finite_is_an_error_on_all_ranks() -> None:
    for strategy in STRATEGY_NAMES:
        model = _sharded(strategy)
        for step in range(2):
            _loss(model, step).backward()
        # The weights of the last block's second layer get it, and all before it.
        handle = model.blocks[1].down.register_forward_hook(_spoil(_NAN))
        with pytest.raises(
            RuntimeError,
            match=r"gradients must be finite, got the first that is not in step 3 since the start: \S*blocks\.1\.down\.weight of unit "
            r"\S*blocks\.1 and 4 more of it, before its reduction: NaN on ranks \[1\]",
        ):
            _loss(model).backward()
        handle.remove()
        model.zero_grad()
        _loss(model).backward()  # what raised leaves nothing behind


@CHECKS.on(2)
def a_gradient_of_an_earlier_microbatch_is_found_by_the_end_of_its_step() -> None:
    for strategy in STRATEGY_NAMES:
        model = _sharded(strategy)

        def spoilt_step(model: Net = model) -> None:
            handle = model.blocks[0].up.register_forward_hook(_spoil(_NAN))
            with microbatch(model, is_last=False):
                _loss(model).backward()
            handle.remove()
            _loss(model).backward()

        with pytest.raises(RuntimeError, match=r"step 1 since .*: \S*blocks\.0\..* NaN on ranks \[1\]"):
            spoilt_step()


@CHECKS.on(2)
def a_sum_over_ranks_that_overflows_is_named_after_its_reduction() -> None:
    """Each rank's own is finite."""
    outer = hybrid_placements("optim_grads_params", "no_shard", ("outer", "inner"))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    every: list[dict[str, Any]] = [{}, {"strategy": outer, "mesh": mesh}]
    for settings in every:
        model = _sharded(**settings)
        model.head.register_forward_pre_hook(
            lambda module, args: args[0].detach() * 0
        )  # the bias alone gets a gradient
        model.head.register_forward_hook(lambda module, args, output: output.register_hook(_largest) and None)
        with pytest.raises(RuntimeError, match=r"step 1 since .*head\.bias.*after its reduction: infinity on ranks"):
            _loss(model).backward()


@CHECKS.on(2)
def a_weight_that_is_not_finite_is_an_error_before_it_is_used() -> None:
    for strategy in STRATEGY_NAMES:
        for prepares in (False, True):
            model = _sharded(strategy)
            _loss(model).backward()
            with torch.no_grad():
                local = model.blocks[1].up.bias.to_local()
                if dist.get_rank() == 1:
                    local.view(-1)[:1].fill_(_NAN)
            with pytest.raises(
                RuntimeError,
                match=r"weights must be finite, got the first that is not in step 2 since the start: \S*blocks\.1\.up\.bias of "
                r"unit \S*blocks\.1, before its all-gather in forward: NaN on ranks \[1\]",
            ):
                if prepares:
                    context_of(model).prepare_forward()
                _loss(model)


@CHECKS.on(2)
def overflow_of_gradients_in_fp16_is_said_once() -> None:
    """Loss scaling means it to happen, and skips the step."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron.core.distributed.fsdp.checks.debug_mode")
    logger.addHandler(handler)
    policy = MixedPrecisionPolicy(grad_comm_dtype=torch.float16)
    model = _sharded(mixed_precision_policy=policy)
    for step in range(2):
        model.blocks[0].up.register_forward_hook(_spoil(_INFINITY))
        _loss(model, step).backward()
        model.zero_grad()
    logger.removeHandler(handler)
    named = [message for message in said if "must be finite" in message]
    assert len(named) == 1 and "step 1" in named[0] and "loss scaling" in named[0], said


@CHECKS.on(2)
def a_write_through_data_in_forward_is_an_error() -> None:
    """No version counter sees it."""
    for write in (lambda weight: weight.data.clamp_(-0.1, 0.1), lambda weight: weight.data.__setitem__(0, 0.0)):
        model = _sharded()
        model.blocks[0].up.register_forward_pre_hook(lambda layer, _, write=write: write(layer.weight))
        with pytest.raises(RuntimeError, match=r"forward must not write .* of \S*up\.weight"):
            _loss(model)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
