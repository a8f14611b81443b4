"""The self-audit agrees with what is right, and names each of six planted faults by the first number that differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import AuditReport, FsdpModule, Placements, audit, fully_shard
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from tests.support import planted_faults
from tests.support.models import STRATEGY_NAMES, Net, global_batch, loss_of
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)

_STEPS = 4


class _Block(nn.Module):
    """A residual block of odd sizes, with dropout and a buffer that remembers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(width))
        self.remembers = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.remembers:
            with torch.no_grad():
                self.mean.lerp_(x.mean(dim=0), 0.1)
        out: torch.Tensor = x + self.dropout(self.outer(torch.tanh(self.inner(x))))
        return out


def _model(of: type[Net] = Net, *, remembers: bool = False, dtype: torch.dtype = torch.float32) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = of(0)
        net.blocks.extend(_Block(7) for _ in range(3))
    net.order = [0, 1, 2]
    for block in net.blocks:
        block.remembers = remembers
    return net.to(dtype)


def _shard(net: Any, placements: Placements | None = None) -> None:
    for block in net.blocks:
        fully_shard(block, placements=placements)
    fully_shard(net, placements=placements)


def _batches(steps: int = _STEPS, microbatches: int = 1) -> list[Any]:
    world, rank = dist.get_world_size(), dist.get_rank()
    return [global_batch(at, world)[rank] for at in range(steps * microbatches)]


def _audit(build: Callable[[], nn.Module] = _model, *, microbatches: int = 1, **options: Any) -> AuditReport:
    return audit(
        build,
        _batches(microbatches=microbatches),
        loss=options.pop("loss", loss_of),
        shard=options.pop("shard", _shard),
        num_microbatches=microbatches,
        **options,
    )


@CHECKS.on(2, 3)
def what_is_right_agrees() -> None:
    """Under each strategy, with dropout, microbatches and an optimizer that divides by the gradient's size."""
    for strategy in STRATEGY_NAMES:
        report = _audit(
            shard=lambda net, name=strategy: _shard(net, strategy_placements(name)),
            microbatches=2,
            build_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        )
        assert report.passed and report.num_steps == _STEPS, (strategy, str(report))
        assert report.largest["gradient"] < 2e-6, (strategy, report.largest)


@CHECKS.on(2)
def what_is_right_agrees_in_bf16() -> None:
    """Main weights are fp32, and gradients travel in bf16."""
    report = _audit(lambda: _model(dtype=torch.bfloat16), loss=_bf16_loss)
    assert report.passed, str(report)
    assert report.largest["loss"] < 1e-6 and report.largest["gradient"] < 1e-2, report.largest


@CHECKS.on(2)
def what_is_right_agrees_in_the_compute_dtypes_of_a_policy() -> None:
    """The reference computes in them too, so that losses agree closely."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    whole = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)

    def nested(net: Any) -> None:
        """One unit computes in fp32, and gets what its neighbours give."""
        fully_shard(net.blocks[0], mp_policy=policy)
        fully_shard(net.blocks[1], mp_policy=fsdp2.MixedPrecisionPolicy(param_dtype=torch.float32))
        fully_shard(net.blocks[2], mp_policy=policy)
        fully_shard(net, mp_policy=whole)

    for build, shard, loss in (
        (_model, lambda net: fully_shard(net, mp_policy=policy), _bf16_loss),
        (_model, nested, loss_of),
        (lambda: _model(of=_Frozen), nested, loss_of),
    ):
        report = _audit(build, shard=shard, loss=loss, build_optimizer=torch.optim.AdamW)
        assert report.passed, str(report)
        assert report.largest["loss"] < 1e-3 and report.largest["gradient"] < 1e-2, report.largest


class _Frozen(Net):
    """Some of its weights are not trained."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.entry.requires_grad_(False)


def _bf16_loss(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    features, classes = batch
    return nn.functional.cross_entropy(net(features.bfloat16()).float(), classes)


@CHECKS.on(2)
def what_each_rank_keeps_by_itself_can_be_left_out() -> None:
    report = _audit(lambda: _model(remembers=True), ignore=["blocks.*.mean"])
    assert report.passed and "buffer" not in report.largest, str(report)


@CHECKS.on(2)
def weights_that_are_random_on_each_rank_are_the_first_ranks() -> None:
    def build() -> nn.Module:
        torch.manual_seed(dist.get_rank())
        return Net(2)

    assert _audit(build).passed


@CHECKS.on(2)
def what_cannot_be_audited_is_refused() -> None:
    with pytest.raises(ValueError, match=r"whole steps of 2 microbatches, got \[3, 3\]"):
        audit(_model, _batches(3), loss=loss_of, shard=_shard, num_microbatches=2)
    with pytest.raises(ValueError, match=r"got \[4, 2\] batches by rank"):
        audit(_model, _batches(4 - 2 * dist.get_rank()), loss=loss_of, shard=_shard)

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Net(1)

    with pytest.raises(ValueError, match="build it on a device"):
        _audit(on_meta)


# ---- planted faults ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault in the engine, or in how a model calls it, and what an audit says of it first."""

    first: str
    """Words of the first line, in order."""

    plant: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    build: Callable[[], nn.Module] = _model
    shard: Callable[[nn.Module], None] = _shard


def _one_unit_over_this_rank_alone(net: Any) -> None:
    """A unit's process group has this rank alone: its gradients are not averaged."""
    world = dist.get_world_size()
    alone = init_device_mesh("cpu", (world, 1), mesh_dim_names=("apart", "alone"))["alone"]
    fully_shard(net.blocks[1], alone)
    for block in (net.blocks[0], net.blocks[2]):
        fully_shard(block)
    fully_shard(net)


class _OtherOrder(Net):
    """Runs two units of one size in another order on the last rank, so that ranks exchange other units' shards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_other = isinstance(self, FsdpModule) and dist.get_rank() == dist.get_world_size() - 1
        self.order = [1, 0, 2] if is_other else [0, 1, 2]
        return super().forward(x)


FAULTS = {
    "scale": Fault(
        "step 1 the gradient entry.weight differs rank 0: it is 2 times what it must be",
        planted_faults.averages_over_one_rank_fewer,
    ),
    "missed sync": Fault(
        "step 2 the loss",
        planted_faults.model_weights_stay_old,
        shard=lambda net: _shard(net, strategy_placements("optim_grads")),
    ),
    "dropped reduction": Fault("step 1 the gradient blocks.1.inner.weight", planted_faults.a_reduction_is_dropped),
    "unsynchronised buffers": Fault("step 1 the buffer blocks.0.mean ranks 0, 1", build=lambda: _model(remembers=True)),
    "wrong group": Fault("step 1 the gradient blocks.1.inner.weight", shard=_one_unit_over_this_rank_alone),
    "another order": Fault(
        "step 1 all ranks must run the same units in one order blocks.1. on ranks", build=lambda: _model(_OtherOrder)
    ),
}


def _finds(fault: Fault) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        report = _audit(fault.build, shard=fault.shard)
    assert not report.passed
    first = str(report).splitlines()[0]
    at = 0
    for word in fault.first.split():
        at = first.find(word, at)
        assert at >= 0, (word, str(report))


def _check(name: str) -> Callable[[], None]:
    def check() -> None:
        _finds(FAULTS[name])

    check.__name__ = name
    return check


for _name in FAULTS:
    CHECKS.on(2)(_check(_name))


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_self_audit(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
