"""Training sharded equals training unsharded: bit for bit where sums have one order, to rounding elsewhere.

Two references are computed without any sharding, on the same global batch:

- *in order*: the gradient of each rank's piece by itself, summed in the order in which the engine sums (over microbatches
  first where gradients rest unreduced between them, over ranks first where they do not), in the dtypes of the policy.
  Against it everything is equal to the last bit, but for clipping: there the total norm is a sum over shards, so the
  factor may differ by rounding unless nothing is sharded.
- *at once*: one backward of the mean over the whole global batch. What is left is the order of sums over rows: 1e-6 of
  the largest element.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from megatron.core.distributed.fsdp import MixedPrecisionPolicy, fully_shard_optimizer, microbatch
from tests.support.models import (
    STRATEGY_NAMES,
    assert_at_rest,
    context_of,
    difference,
    full,
    global_batch,
    local_of,
    loss_of,
    make_net,
    shard_net,
)
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)

NUM_STEPS = 5
MAX_NORM = 0.1  # below every norm of these runs: clipping always acts


@dataclass(frozen=True)
class Setting:
    """One way to train the same net on the same data."""

    strategy: str
    num_microbatches: int = 1
    clips: bool = False
    optimizer: str = "sgd"
    compute: torch.dtype = torch.float32
    grad_comm: torch.dtype | None = None
    main_grads: torch.dtype = torch.float32

    @property
    def sums_microbatches_first(self) -> bool:
        """True if gradients rest unreduced between microbatches."""
        return self.strategy in ("no_shard", "optim")

    def make_optimizer(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        # A small epsilon would turn the rounding of gradients near zero into differences of the size of the step.
        return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1, eps=1e-3)


@dataclass
class Trace:
    """What a run computed, over all ranks: losses of pieces, norms and gradients of each step, and the last weights."""

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)


def _pieces(step: int, setting: Setting) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """[microbatches][ranks] of the step's global batch."""
    world = dist.get_world_size()
    flat = global_batch(step, setting.num_microbatches * world)
    return [flat[at : at + world] for at in range(0, len(flat), world)]


def train_sharded(setting: Setting, *, poisons: bool) -> Trace:
    """Ranks: all."""
    policy = MixedPrecisionPolicy(main_grads_dtype=setting.main_grads, grad_comm_dtype=setting.grad_comm)
    net = shard_net(make_net(2, dtype=setting.compute), setting.strategy, policy=policy, poisons=poisons)
    optimizer = fully_shard_optimizer(setting.make_optimizer(net.parameters()))
    mine = Trace()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        pieces = _pieces(step, setting)
        for at, of_ranks in enumerate(pieces):
            with microbatch(net, is_first=at == 0, is_last=at == len(pieces) - 1):
                loss = loss_of(net, of_ranks[dist.get_rank()])
                (loss / len(pieces)).backward()
            mine.losses.append(loss.detach())
        if setting.clips:
            mine.norms.append(full(nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)))
        mine.gradients += [local_of(p.grad).clone() for p in net.parameters()]
        optimizer.step()
    mine.weights = [local_of(p).clone() for p in net.parameters()]
    assert context_of(net).planner.plan is not None
    assert_at_rest(net)
    placed: list[Any] = list(net.parameters())
    return _whole(mine, [p.shape if isinstance(p.placements[0], Shard) else None for p in placed])


def _whole(mine: Trace, sharded: list[torch.Size | None]) -> Trace:
    """The trace over all ranks, from each rank's rows: one exchange for a run keeps this test fast. Ranks: all."""
    tensors = [*mine.losses, *mine.gradients, *mine.weights]
    everyone: list[Any] = [None] * dist.get_world_size()
    # As numbers: the pickle of a tensor takes long.
    dist.all_gather_object(everyone, [tensor.tolist() for tensor in tensors])
    of_ranks = [
        [torch.tensor(numbers, dtype=tensor.dtype) for numbers in rows]
        for tensor, rows in zip(tensors, zip(*everyone, strict=True), strict=True)
    ]
    num_losses, num_gradients = len(mine.losses), len(mine.gradients)
    rows = [
        ranks[0] if shape is None else torch.cat(ranks).view(shape)
        for ranks, shape in zip(of_ranks[num_losses:], itertools.cycle(sharded))
    ]
    losses = [torch.stack(ranks) for ranks in of_ranks[:num_losses]]
    return Trace(losses, mine.norms, rows[:num_gradients], rows[num_gradients:])


@functools.cache
def train_unsharded(setting: Setting, *, in_order: bool) -> Trace:
    """This process alone, on the whole global batch; model weights are cast from main weights after each step."""
    net = make_net(2, dtype=setting.compute)
    mains = [nn.Parameter(p.detach().float()) for p in net.parameters()]
    optimizer = setting.make_optimizer(iter(mains))
    trace = Trace()
    for step in range(NUM_STEPS):
        losses = [[loss_of(net, piece) for piece in of_ranks] for of_ranks in _pieces(step, setting)]
        trace.losses += [torch.stack(of_ranks).detach() for of_ranks in losses]
        gradients = _sums_in_order(net, losses, setting) if in_order else _at_once(net, losses)
        for main, gradient in zip(mains, gradients, strict=True):
            main.grad = gradient.float()
        if setting.clips:
            trace.norms.append(nn.utils.clip_grad_norm_(mains, MAX_NORM))
        trace.gradients += [main.grad.clone() for main in mains if main.grad is not None]
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_([*net.parameters()], [*mains])
    trace.weights = [main.detach() for main in mains]
    return trace


def _at_once(net: nn.Module, losses: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    loss = torch.stack([torch.stack(of_ranks).mean() for of_ranks in losses]).mean()
    return [grad.float() for grad in torch.autograd.grad(loss, list(net.parameters()))]


def _sums_in_order(net: nn.Module, losses: list[list[torch.Tensor]], setting: Setting) -> list[torch.Tensor]:
    """The gradients as the engine promises to sum them, each rounding where it promises one."""
    parameters = list(net.parameters())
    comm = setting.grad_comm or setting.compute
    wide = torch.promote_types(comm, setting.main_grads)
    by_piece = [
        [[g.to(comm) for g in torch.autograd.grad(loss / len(losses), parameters)] for loss in of_ranks]
        for of_ranks in losses
    ]
    sums = []
    for index in range(len(parameters)):
        rounds = [[grads[index] for grads in of_ranks] for of_ranks in by_piece]
        if setting.sums_microbatches_first and len(rounds) > 1:
            # [ranks] sums over microbatches in the wider dtype of the two, which then travel in that of the wire.
            own = [functools.reduce(torch.add, (g.to(wide) for g in of)) for of in zip(*rounds, strict=True)]
            rounds = [[g.to(comm) for g in own]]
        scale = 1 / dist.get_world_size()
        means = [functools.reduce(torch.add, (g.float() for g in of_ranks)) * scale for of_ranks in rounds]
        total = means[0].to(wide)
        for mean in means[1:]:
            total = (total.float() + mean).to(wide)  # rounded once for each microbatch
        sums.append(total.to(setting.main_grads))
    return sums


def _same_bits(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def _assert_close(got: Trace, expected: Trace, tolerance: float) -> None:
    for kind in ("losses", "norms", "gradients", "weights"):
        pairs = list(zip(getattr(got, kind), getattr(expected, kind), strict=True))
        worst = max((difference(a, b) for a, b in pairs), default=0.0)
        assert worst <= tolerance, f"{kind} differ by {worst:.2e}"


def assert_same_bits(got: Trace, expected: Trace) -> None:
    for kind in ("losses", "norms", "gradients", "weights"):
        assert _same_bits(getattr(got, kind), getattr(expected, kind)), f"{kind} are not equal to the last bit"


def _settings() -> list[Setting]:
    """Each strategy, with each pair of values of the other three settings."""
    return [
        Setting(strategy, num_microbatches, clips, optimizer)
        for strategy in STRATEGY_NAMES
        for num_microbatches, clips, optimizer in (
            (1, False, "sgd"),
            (1, True, "adamw"),
            (3, False, "adamw"),
            (3, True, "sgd"),
        )
    ]


_train_once = functools.cache(train_sharded)


def _mine(setting: Setting) -> bool:
    """True if this rank compares the run, whose trace all ranks have; settings that share references go together."""
    same = [s for s in _settings() if s.strategy == setting.strategy]
    return same.index(setting) % dist.get_world_size() == dist.get_rank()


def _reference(setting: Setting, *, in_order: bool) -> Trace:
    # Strategies that sum in the same order share a reference.
    shared = "optim" if setting.sums_microbatches_first else "optim_grads"
    return train_unsharded(replace(setting, strategy=shared), in_order=in_order)


@CHECKS.on(1, 2, 4)
def sharded_equals_unsharded_to_the_last_bit() -> None:
    """Losses, gradients and weights of five steps, without clipping; and so strategies that sum alike equal each other."""
    for setting in _settings():
        got = _train_once(setting, poisons=True)
        if not setting.clips and _mine(setting):
            assert_same_bits(got, _reference(setting, in_order=True))


@CHECKS.on(1, 2, 4)
def clipping_equals_unsharded_but_for_the_rounding_of_the_norm() -> None:
    """Where nothing is sharded, there is no other order of the norm's sum, and every bit is the same."""
    for setting in _settings():
        if setting.clips and _mine(setting):
            got, expected = _train_once(setting, poisons=True), _reference(setting, in_order=True)
            assert all(norm > MAX_NORM for norm in got.norms)
            _assert_close(got, expected, 1e-6)
            if setting.strategy == "no_shard":
                assert_same_bits(got, expected)


@CHECKS.on(1, 2, 4)
def sharded_equals_one_backward_of_the_global_batch() -> None:
    """Sums of the batch in another order, by matrix products whose own order is the processor's: 1.2e-6 on some."""
    for setting in _settings():
        if _mine(setting):
            _assert_close(_train_once(setting, poisons=True), _reference(setting, in_order=False), 4e-6)


@CHECKS.on(1, 2, 4)
def two_runs_are_equal_to_the_last_bit() -> None:
    """Also poisoned against not: what released memory holds is in no result."""
    for setting in _settings():
        if setting.num_microbatches == 3 and setting.optimizer == "adamw":
            assert_same_bits(_train_once(setting, poisons=True), train_sharded(setting, poisons=False))


@CHECKS.on(2)
def bf16_rounds_only_where_the_policy_says() -> None:
    """bf16 compute with fp32 main weights, for each dtype on the wire and of main gradients."""
    for strategy in STRATEGY_NAMES:
        for grad_comm, main_grads in (
            (None, torch.float32),
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.bfloat16),
        ):
            setting = Setting(strategy, 3, False, "adamw", torch.bfloat16, grad_comm, main_grads)
            assert_same_bits(train_sharded(setting, poisons=True), _reference(setting, in_order=True))


@CHECKS.on(2)
def bf16_is_near_one_backward_of_the_global_batch() -> None:
    """5 % of the largest gradient: sums of bf16 terms, each within 0.4 %, that cancel in part, in both runs."""
    for strategy in STRATEGY_NAMES:
        setting = Setting(strategy, 3, False, "sgd", torch.bfloat16)
        _assert_close(train_sharded(setting, poisons=True), _reference(setting, in_order=False), 5e-2)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_parity(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
