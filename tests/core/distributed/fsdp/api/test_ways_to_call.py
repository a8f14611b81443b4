"""Ways to call a sharded model that are not a plain forward and backward: right, or an error that says what to do."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp import fsdp2, fully_shard
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


@CHECKS.on(2)
def inference_mode_may_come_at_any_time() -> None:
    for strategy in STRATEGY_NAMES:
        for when in (0, 1, 2):
            plain, model = seeded(ThreeLayers), shard(seeded(ThreeLayers), UNITS, strategy)
            theirs, ours = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model))
            for step in range(4):
                if step == when:
                    for _ in range(2):
                        with torch.inference_mode():
                            assert torch.equal(_loss(model, 0, 7), _loss(plain, 0, 7)), (strategy, when)
                theirs.zero_grad()
                ours.zero_grad()
                backward_plainly(plain, _loss, step)
                _loss(model, dist.get_rank(), step).backward()
                assert_same_gradients(model, plain)
                theirs.step()
                ours.step()
                assert_same_parameters(model, plain, f"{strategy}, inference in step {when}")


def _jvp(model: Any, x: torch.Tensor, v: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch scripts its rules at the first call
        return torch.func.jvp(model, (x,), (v,))[1]


@CHECKS.on(2)
def transforms_of_torch_func_are_right_or_refused() -> None:
    x, v = inputs(0, 0, 5), inputs(0, 1, 5)
    transforms = {
        "grad": lambda m: torch.func.grad(lambda x: m(x).sum())(x),
        "vjp": lambda m: torch.func.vjp(m, x)[1](v)[0],
        "jvp": lambda m: _jvp(m, x, v),
        "vmap": lambda m: torch.func.vmap(m)(torch.stack([x, v])),
        "jacrev": lambda m: torch.func.jacrev(m)(x),
        "functional_call": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (x,)),
    }
    for steps in (0, 2):
        plain, model = seeded(ThreeLayers), shard(seeded(ThreeLayers), UNITS)
        for step in range(steps):
            _loss(model, dist.get_rank(), step).backward()
        for name, transform in transforms.items():
            if name in ("grad", "vjp", "jacrev"):
                with pytest.raises(NotImplementedError, match=r"torch\.func\.grad, vjp and jacrev .*use backward"):
                    transform(model)
            else:
                torch.testing.assert_close(transform(model), transform(plain), msg=name)
        _loss(model, dist.get_rank(), 9).backward()


@CHECKS.on(2)
def a_unit_may_run_within_jvp_alone() -> None:
    """A plan is made or left where the outermost forward begins: memory of a transform would not outlive it."""
    x, v = inputs(0, 0, 5), inputs(0, 1, 5)
    for dtype, steps, is_open in (
        (None, 0, True),
        (None, 3, False),
        (torch.bfloat16, 0, False),
        (torch.bfloat16, 2, True),
    ):
        plain, model = (nn.Sequential(*(seeded(lambda: nn.Linear(5, 5)) for _ in range(2))) for _ in range(2))
        for unit in model:
            fsdp2.fully_shard(unit, mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32))
        for step in range(steps):
            _loss(model, 0, step).backward()
            _loss(plain, 0, step).backward()
        kept = model(x) if is_open else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            own, expected = (
                torch.func.jvp(lambda u, m=m: m[1](m[0](x).detach()) * u, (x,), (v,)) for m in (model, plain)
            )
        tolerance: Any = {"rtol": 0.02, "atol": 0.02} if dtype else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(own, expected, **tolerance)
        del kept
        _loss(model, 0, 9).backward()
        _loss(plain, 0, 9).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, **tolerance)


@CHECKS.on(2)
def the_fast_path_of_an_encoder_layer() -> None:
    """With no gradients torch's layer hands its weights to one kernel, also those of parts that are units."""

    def build() -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    for units in ((), ("linear1", "linear2"), ("self_attn", "linear1", "norm1")):
        plain, model = seeded(build).eval(), shard(seeded(build), units).eval()
        for grad in (False, True, False):
            with torch.set_grad_enabled(grad):
                x = inputs(0, 0, 2, 3, 8)
                torch.testing.assert_close(model(x), plain(x))
    with pytest.raises(
        TypeError, match=r"got the out_proj of an nn\.MultiheadAttention.*call it on the MultiheadAttention"
    ):
        shard(build(), ("self_attn.out_proj",))


@CHECKS.on(2)
def gradient_penalty() -> None:
    def loss(model: Any, rank: int, step: int) -> torch.Tensor:
        x = inputs(rank, step, 3, 5).requires_grad_()
        out = model(x).sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        return (grad.norm(dim=1) - 1).square().mean() + out.square() / 100

    for units in ((), UNITS):
        for strategy in STRATEGY_NAMES:
            plain, model = seeded(ThreeLayers), shard(seeded(ThreeLayers), units, strategy)
            for step in range(3):
                plain.zero_grad()
                model.zero_grad()
                backward_plainly(plain, loss, step)
                loss(model, dist.get_rank(), step).backward()
                assert_same_gradients(model, plain)
                assert not any(group.weights.holders.backwards for group in groups_of(model))
                assert strategy != "optim_grads_params" or not any(g.weights.is_unsharded for g in groups_of(model))
            x = inputs(0, 9, 3, 5).requires_grad_()
            out = model(x)
            grads = torch.autograd.grad(out.sum(), x, create_graph=True)
            del out, grads  # a graph of second order that nobody differentiates
            model.zero_grad()
            plain.zero_grad()
            backward_plainly(plain, loss, 9)
            loss(model, dist.get_rank(), 9).backward()
            assert_same_gradients(model, plain)


def _shown(model: nn.Module) -> list[type[torch.Tensor]]:
    return [type(parameter.data) for parameter in model.parameters()]


@CHECKS.on(2)
def evaluation_before_the_backward_of_a_recorded_one() -> None:
    plain, model = seeded(ThreeLayers), shard(seeded(ThreeLayers), UNITS)
    sharded = _shown(model)
    x = inputs(dist.get_rank(), 0, 3, 5).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert _shown(model) == sharded
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
    assert _shown(model) == sharded
    grad.square().sum().backward()
    assert _shown(model) == sharded


@CHECKS.on(2)
def evaluation_after_a_reentrant_checkpoint_around_a_root() -> None:
    """The first hook of that backward runs with gradients enabled, but ``create_graph`` is unknown from that."""
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    fully_shard(model[1])
    sharded = _shown(model)
    kept = model[1](inputs(0, 0, 3, 5))
    checkpoint(model[1], model[0](inputs(0, 1, 3, 5)), use_reentrant=True).sum().backward()
    assert not any(group.weights.holders.backwards for group in groups_of(model))
    with torch.no_grad():
        model(inputs(0, 2, 3, 5))
    assert _shown(model) == sharded
    del kept


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
