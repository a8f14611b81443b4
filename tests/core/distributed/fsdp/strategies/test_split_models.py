"""Parameters that are split between ranks besides data parallelism: gradients, sums over ranks, norms and clipping."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import fully_shard_optimizer, microbatch
from megatron.core.distributed.fsdp.api.module import contexts_of
from megatron.core.distributed.fsdp.dtensor.placements import local_rows
from megatron.core.distributed.fsdp.flat_optimizer.flat_adamw import FlatAdamW
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm, count_zeros, get_grad_norm, get_params_norm
from megatron.core.process_group_builder import build_process_groups
from tests.support.launch import run_ranks
from tests.support.models import STRATEGY_NAMES, difference, full, local_of
from tests.support.split_models import (
    Layout,
    backward,
    expected_gradient,
    full_value,
    named,
    specs,
    wrap,
)

# fp32 sums of a few terms in another order than the reference's, which is in fp64.
TOLERANCE = 2e-6
LAYOUTS = {
    "dp": Layout(),
    "tp2": Layout(tp=2),
    "tp2 ep2": Layout(tp=2, ep=2),
    "tp2 ep2 expt_tp1": Layout(tp=2, ep=2, expt_tp=1),
    "tp2 expt_tp1": Layout(tp=2, expt_tp=1),
    "ep2": Layout(ep=2),
    "ep4": Layout(ep=4),
    "ep2 sums": Layout(ep=2, sums=True),
    "ep4 sums": Layout(ep=4, sums=True),
    "pp2": Layout(pp=2),
    "pp2 tp2 sums": Layout(pp=2, tp=2, sums=True),
    "pp2 ep2": Layout(pp=2, ep=2),
    "hsdp": Layout(instances=2),
    "hfsdp": Layout(instances=2, outer="optim"),
    "hfsdp tp2": Layout(tp=2, instances=2, outer="optim"),
    "hsdp ep2": Layout(ep=2, instances=2),
}

IN_CI = ["tp2 ep2", "tp2 ep2 expt_tp1", "ep2 sums", "ep4 sums", "pp2 tp2 sums", "pp2 ep2", "hfsdp tp2", "hsdp ep2"]


def _step(model: object, num_microbatches: int) -> None:
    for index in range(num_microbatches):
        with microbatch(model, is_first=index == 0, is_last=index == num_microbatches - 1):  # type: ignore[arg-type]
            backward(model, index)  # type: ignore[arg-type]


def _assert_gradients(model: object, layout: Layout, num_microbatches: int, what: str) -> None:
    for spec, parameter in named(model, layout):  # type: ignore[arg-type]
        expected = expected_gradient(spec, layout, num_microbatches)
        assert parameter.grad is not None and parameter.grad.shape == expected.shape, spec.name
        got, expected = local_of(parameter.grad).double(), local_rows(parameter, expected)
        if not got.numel():
            continue
        error = float((got - expected).abs().max() / expected.abs().max().clamp(min=1.0))
        assert error < TOLERANCE, f"{what}: gradient of {spec.name} is off by {error}"


def a_step_is_the_whole_models(names: list[str], strategies: list[str]) -> None:
    for name in names:
        groups = build_process_groups(LAYOUTS[name].grid)
        for strategy in strategies:
            layout = replace(LAYOUTS[name], strategy=strategy)
            if layout.outer == "optim" and strategy == "no_shard":
                continue
            _check_layout(layout, groups, f"{name}, {strategy}")


def _check_layout(layout: Layout, groups: object, what: str) -> None:
    model = wrap(layout, groups)  # type: ignore[arg-type]
    for spec, parameter in named(model, layout):
        whole_value = full_value(spec.name, spec.shape)
        assert torch.equal(local_of(parameter), local_rows(parameter, whole_value)), f"{what}: {spec.name}"
    spec, parameter = next(item for item in named(model, layout) if item[0].stride > 1)
    assert torch.equal(full(parameter), full_value(spec.name, spec.shape)), f"{what}: {spec.name}"
    params = list(model.parameters())
    optimizer = FlatAdamW(params, lr=0.1)
    for num_microbatches in (2, 1):
        whole = {spec.name: expected_gradient(spec, layout, num_microbatches) for spec in specs(layout)}
        norm = torch.stack([gradient.norm() for gradient in whole.values()]).norm()
        zeros = sum(int((gradient == 0).sum()) for gradient in whole.values())
        weights = torch.stack([full_value(spec.name, spec.shape).norm() for spec in specs(layout)]).norm()
        _step(model, num_microbatches)
        # The flat norm first: gradients that wait for their use are summed by it.
        assert difference(optimizer.grad_norm().double(), norm) < TOLERANCE, (
            f"{what}: {optimizer.grad_norm()}, not {norm}"
        )
        _assert_gradients(model, layout, num_microbatches, what)
        assert difference(get_grad_norm(params).double(), norm) < TOLERANCE, what
        assert int(count_zeros(params)) == zeros, what
        assert difference(get_params_norm(params), weights) < TOLERANCE, what
        clip_grad_by_total_norm(params, 0.5, get_grad_norm(params))
        assert difference(get_grad_norm(params).double(), torch.tensor(0.5).double()) < 1e-5, what
        optimizer.zero_grad()
    _step(model, 1)
    optimizer.step()
    for spec, parameter in named(model, layout):
        # Adam's first step is the gradient's sign; decay is 0.01.
        gradient = expected_gradient(spec, layout, 1)
        expected = full_value(spec.name, spec.shape) * (1 - 0.1 * 0.01) - 0.1 * gradient / (gradient.abs() + 1e-8)
        moved = local_rows(parameter, gradient.abs() > 1e-4)
        got, expected = local_of(parameter)[moved], local_rows(parameter, expected)[moved]
        assert torch.allclose(got.double(), expected, atol=1e-4), f"{what}: {spec.name}"


def test_a_step_is_the_whole_models() -> None:
    """Ways to split a model, and gradients, norms, zeros, clipping and updates in each."""
    run_ranks(4, a_step_is_the_whole_models, IN_CI, ["optim_grads_params"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_a_step_is_the_whole_models_in_all_strategies(strategy: str) -> None:
    run_ranks(4, a_step_is_the_whole_models, list(LAYOUTS), [strategy])


def gradients_are_summed_once_however_microbatches_are_announced() -> None:
    """On two ranks none of them shares a weight, and backward writes main gradients, which are summands."""
    is_direct = dist.get_world_size() == 2
    for layout in (Layout(tp=2), *([] if is_direct else [Layout(tp=2, pp=2)]), Layout(tp=2, strategy="optim")):
        model = wrap(layout)
        assert is_direct is all(group.grads.is_direct for group in model.parameter_groups) or layout.pp == 2
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        backward(model, 0)  # each is a last one
        if layout.pp == 1:
            _assert_gradients(model, layout, 1, "a backward, no use")
        backward(model, 1)
        optimizer.step()  # gradients are summed before it, whoever asked for a norm
        _assert_gradients(model, layout, 2, "two backwards, no scope")
        optimizer.zero_grad()
        with model.no_sync():
            backward(model, 0)
        model.start_grad_sync()
        model.finish_grad_sync()
        _assert_gradients(model, layout, 1, "no_sync and its end")
        backward(model, 1)
        model.finish_grad_sync()
        model.finish_grad_sync()
        _assert_gradients(model, layout, 2, "finished, then one more")
        optimizer.zero_grad(set_to_none=False)
        backward(model, 0)
        model.finish_grad_sync()
        _assert_gradients(model, layout, 1, "after zeros")
        model.zero_grad_buffer()
        _step(model, 2)
        model.scale_gradients(1.0)
        model.finish_grad_sync()
        _assert_gradients(model, layout, 2, "microbatches")
        assert len(contexts_of(model.module)) == 1


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_are_summed_once_however_microbatches_are_announced(num_ranks: int) -> None:
    """A main gradient that was summed over tensor-parallel ranks must not be summed again with the next microbatch."""
    run_ranks(num_ranks, gradients_are_summed_once_however_microbatches_are_announced)


def a_bad_gradient_anywhere_stops_all_ranks() -> list[str]:
    messages = []
    for layout in (Layout(pp=2, tp=2), Layout(ep=2)):
        model = wrap(layout, check_for_nan_in_grad=True)
        backward(model, 0)
        _, parameter = list(named(model, layout))[-1]
        if dist.get_rank() == 3 and parameter.grad is not None:
            grad = parameter.grad.to_local()
            grad.fill_(float("inf"))
        with pytest.raises(RuntimeError, match="must be finite") as caught:
            model.finish_grad_sync()
        messages.append(str(caught.value).split(" (rank")[0])
    return messages


def test_a_bad_gradient_anywhere_stops_all_ranks() -> None:
    """Also ranks of other stages, which do not hold the parameter and hear its name."""
    results = run_ranks(4, a_bad_gradient_anywhere_stops_all_ranks)
    assert all(messages == results[0] for messages in results)
    assert "embedding.weight and 1 other" in results[0][0]  # summed over both stages
    assert "layers.1.experts.3.bias" in results[0][1]
