"""Units of one context without a common root: each is prefetched once a pass, and its forward never uses weights from before a write.

Released memory is poisoned with NaN throughout.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.fsdp import (
    FsdpContext,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    hybrid_placements,
    microbatch,
)
from megatron.core.distributed.fsdp.config.placement import strategy_placements
from tests.support.agreement import warnings_of_the_engine
from tests.support.hybrid import hybrid_mesh
from tests.support.models import (
    STRATEGY_NAMES,
    Block,
    assert_at_rest,
    assert_same_gradients,
    assert_same_weights,
    difference,
    full,
    order_of,
    watch_collectives,
)
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)
NUM_ROOTS, WIDTH = 5, 7


class Siblings:
    """Blocks that are roots of one context, and an unsharded copy of them. All ranks get the same inputs."""

    def __init__(
        self, strategy: str = "optim_grads_params", dtype: torch.dtype = torch.float32, **options: Any
    ) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.plain = [Block(WIDTH).to(dtype) for _ in range(NUM_ROOTS)]
        self.dtype = dtype
        settings: dict[str, Any] = {
            "placements": strategy_placements(strategy),
            "mixed_precision_policy": MixedPrecisionPolicy(grad_comm_dtype=torch.float32),
            **options,
        }
        with fully_shard_context() as self.context:
            self.sharded = [fully_shard(copy.deepcopy(block), **settings) for block in self.plain]
        self.context.change_options(poisons=True)
        self.order: Sequence[int] = range(NUM_ROOTS)
        self.between: Callable[[Sequence[Any], int], None] = lambda blocks, at: None
        self.optimizers = [
            torch.optim.SGD([p for block in self.plain for p in block.parameters()], lr=0.1),
            fully_shard_optimizer(torch.optim.SGD([p for block in self.sharded for p in block.parameters()], lr=0.1)),
        ]

    @property
    def both(self) -> tuple[Sequence[Any], Sequence[Any]]:
        return self.plain, self.sharded

    def run(self, blocks: Sequence[Any], step: int) -> torch.Tensor:
        """Run the blocks in order and return the output; call ``between`` after each block."""
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(self.dtype)
        for at, index in enumerate(self.order):
            x = blocks[index](x)
            self.between(blocks, at)
        return x

    def check(self, step: int) -> torch.Tensor:
        """Run both copies, check that the outputs are equal, and return the sharded output."""
        expected, got = (self.run(blocks, step) for blocks in self.both)
        tolerance = 1e-6 if self.dtype == torch.float32 else 3e-2
        assert difference(got.float(), expected.float()) <= tolerance, difference(got.float(), expected.float())
        return got

    def step(self, step: int) -> None:
        """Run forward, backward and the optimizer's step of both copies, and compare gradients."""
        for blocks in self.both:
            self.run(blocks, step).float().square().mean().backward()
        assert_at_rest(self.context)
        self.compare_gradients()
        self.end_step()

    def compare_gradients(self) -> None:
        if self.dtype == torch.float32:
            for plain, sharded in zip(self.plain, self.sharded, strict=True):
                assert_same_gradients(sharded, plain)

    def end_step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def loss(self, step: int) -> torch.Tensor:
        return self.run(self.sharded, step).float().square().mean()

    def equalize(self) -> None:
        """Copy the sharded weights to the unsharded blocks. Ranks: all."""
        for plain, sharded in zip(self.plain, self.sharded, strict=True):
            plain.load_state_dict({name: full(value) for name, value in sharded.state_dict().items()})

    def evaluate(self, step: int) -> None:
        with torch.no_grad():
            self.check(step)

    def gathers(self, act: Callable[[int], Any], step: int) -> tuple[int, Any]:
        """Return the number of all-gathers in ``act(step)``, and its result."""
        before = order_of(self.context).num_gathers
        value = act(step)
        return order_of(self.context).num_gathers - before, value


@contextmanager
def _most_ahead(context: FsdpContext, blocks: Sequence[Any]) -> Iterator[list[int]]:
    """Record, as each root runs, how many gathered roots have not run yet."""
    counts: list[int] = []
    owners = {id(block): at for at, block in enumerate(blocks)}
    ran: set[int] = set()

    def begin(block: nn.Module, *_: object) -> None:
        ran.add(owners[id(block)])
        unsharded = {at for at, b in enumerate(blocks) if all(g.weights.is_unsharded for g in b.parameter_groups)}
        counts.append(len(unsharded - ran))

    handles = [block.register_forward_pre_hook(begin) for block in blocks]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


@CHECKS.on(2)
def each_root_is_gathered_once_a_forward_and_ahead_of_it() -> None:
    """In training, evaluation and microbatches, with and without a scope; no step leaves the plan."""
    for dtype, scoped in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        roots = Siblings(dtype=dtype)
        with warnings_of_the_engine() as warnings:
            for step in range(5):
                for at in range(2):
                    scope = microbatch(roots.context, is_first=at == 0, is_last=at == 1) if scoped else nullcontext()
                    with scope, _most_ahead(roots.context, roots.sharded) as ahead:
                        count, loss = roots.gathers(roots.loss, step)
                        loss.backward()
                    roots.run(roots.plain, step).float().square().mean().backward()
                    assert count == NUM_ROOTS, (dtype, scoped, step, at, count)
                    assert step == 0 or ahead == [1] * (NUM_ROOTS - 1) + [0], (dtype, scoped, step, ahead)
                roots.compare_gradients()
                roots.end_step()
                with (
                    microbatch(roots.context) if scoped else nullcontext(),
                    _most_ahead(roots.context, roots.sharded) as ahead,
                ):
                    assert roots.gathers(roots.evaluate, step)[0] == NUM_ROOTS, (dtype, scoped, step)
                assert step == 0 or ahead == [1] * (NUM_ROOTS - 1) + [0], (dtype, scoped, step, ahead)
                assert not roots.context.unsharder.live
        assert warnings == []


@CHECKS.on(2)
def evaluations_alone_are_planned_as_one_pass() -> None:
    """Also before any training. A training step afterwards gives the right results and is planned as a whole."""
    roots = Siblings()
    with warnings_of_the_engine() as warnings:
        for step in range(4):
            with _most_ahead(roots.context, roots.sharded) as ahead:
                assert roots.gathers(roots.evaluate, step)[0] == NUM_ROOTS
            assert step == 0 or ahead == [1] * (NUM_ROOTS - 1) + [0], (step, ahead)
    assert warnings == []
    for step in range(4):
        roots.step(step)
        roots.evaluate(step)
    assert roots.gathers(roots.evaluate, 0)[0] == NUM_ROOTS
    assert roots.context.planner.plan is not None and len(roots.context.planner.plan.uses) == 2 * NUM_ROOTS


# ---- writes ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _in_place(block: nn.Module) -> None:
    for parameter in block.parameters():
        parameter.mul_(1.5)


def _data(block: nn.Module) -> None:
    for parameter in block.parameters():
        parameter.data.mul_(-1.5)


@torch.no_grad()
def _local(block: nn.Module) -> None:
    for parameter in block.parameters():
        (parameter.to_local() if hasattr(parameter, "to_local") else parameter).mul_(0.5)


def _data_of_local(block: nn.Module) -> None:
    for parameter in block.parameters():
        (parameter.to_local() if hasattr(parameter, "to_local") else parameter).data.mul_(-0.5)


def _by_step(block: nn.Module) -> None:
    """Step with a plain optimizer, without ``fully_shard_optimizer``."""
    grads = [parameter.grad for parameter in block.parameters()]
    for parameter in block.parameters():
        parameter.grad = parameter.detach() * 0.5
    torch.optim.SGD(block.parameters(), lr=0.5).step()
    for parameter, grad in zip(block.parameters(), grads, strict=True):
        parameter.grad = grad


WRITES = (_in_place, _data, _local, _data_of_local, _by_step)


@CHECKS.on(2)
def a_write_between_two_roots_is_seen_by_the_next_forward() -> None:
    """The write may be to the next root (being prefetched), a later root or an earlier one, with or without a version count."""
    for strategy, dtype in itertools.product(STRATEGY_NAMES, (torch.float32, torch.bfloat16)):
        roots = Siblings(strategy, dtype)
        for step in range(3):
            roots.step(step)
            roots.evaluate(step)
        for write, target in itertools.product(WRITES, (0, 2, 3, 4)):

            def between(blocks: Sequence[Any], at: int, write: Any = write, target: int = target) -> None:
                if at == 1:
                    write(blocks[target])

            roots.between = between
            roots.evaluate(3)
            if target > 1:  # weights of a root that has run must not be written before its backward
                roots.step(4)
            roots.between = lambda blocks, at: None
            roots.equalize()  # the unsharded bf16 weights drift from the fp32 main weights
            roots.evaluate(5)
            roots.step(6)
            roots.equalize()


@CHECKS.on(4)
def under_hybrid_sharding_roots_are_gathered_once_and_writes_are_seen() -> None:
    for (strategy, outer), dtype in itertools.product(
        (("optim_grads_params", "no_shard"), ("optim_grads_params", "optim"), ("optim", "optim")),
        (torch.float32, torch.bfloat16),
    ):
        placements = hybrid_placements(strategy, outer, ("outer", "inner"))
        roots = Siblings(dtype=dtype, mesh=hybrid_mesh(), placements=placements)
        for step in range(3):
            roots.step(step)
            roots.equalize()
        most = NUM_ROOTS if strategy == "optim_grads_params" else 0
        assert roots.gathers(roots.evaluate, 0)[0] == most
        for write in WRITES:

            def between(blocks: Sequence[Any], at: int, write: Any = write) -> None:
                if at == 1:
                    write(blocks[2])

            roots.between = between
            roots.evaluate(3)
            roots.between = lambda blocks, at: None
            roots.equalize()
            roots.evaluate(4)


@CHECKS.on(2)
def a_write_by_one_rank_alone_is_seen_by_all() -> None:
    """The rank writes to its own rows while other ranks prefetch them; no rank hangs."""
    for write in (_local, _data_of_local):
        roots = Siblings()
        for step in range(3):
            roots.step(step)

        def between(blocks: Sequence[Any], at: int, write: Any = write, roots: Siblings = roots) -> None:
            if at == 1 and blocks is roots.sharded and dist.get_rank() == 1:
                write(blocks[2])

        roots.between = between
        with torch.no_grad():
            got = roots.run(roots.sharded, 3)
        roots.between = lambda blocks, at: None
        roots.equalize()
        with torch.no_grad():
            assert difference(got, roots.run(roots.plain, 3)) <= 1e-6
        roots.step(4)


@CHECKS.on(2)
def a_write_to_a_root_on_its_way_within_a_scope_is_refused() -> None:
    """A scope uses the weights of its first forward without a check between ranks, so a late write must raise, not use stale weights."""
    for graph in (torch.no_grad(), nullcontext()):
        roots = Siblings()
        for step in range(3):
            with microbatch(roots.context):
                roots.run(roots.sharded, step).square().mean().backward()

        def between(blocks: Sequence[Any], at: int) -> None:
            if at == 1:
                _in_place(blocks[2])

        roots.between = between
        with graph, microbatch(roots.context), pytest.raises(RuntimeError, match="must not be written"):
            roots.run(roots.sharded, 3)
        roots.between = lambda blocks, at: None
        roots.optimizers[1].zero_grad()
        roots.equalize()
        for step in range(3):
            roots.step(step)


# ---- other orders ---------------------------------------------------------------------------------------------------


@CHECKS.on(2)
def an_optimizer_may_step_between_two_roots() -> None:
    """The engine's or a plain optimizer, on roots that are being prefetched; the next forward uses the new weights."""
    for plain in (True, False):
        roots = Siblings()
        for step in range(3):
            roots.step(step)
        for blocks in roots.both:
            roots.run(blocks, 3).square().mean().backward()

        def between(blocks: Sequence[Any], at: int, plain: bool = plain, roots: Siblings = roots) -> None:
            if at == 1:
                optimizer = roots.optimizers[blocks is roots.sharded]
                if plain:
                    optimizer = torch.optim.SGD([p for b in blocks for p in b.parameters()], lr=0.1)
                optimizer.step()

        roots.between = between
        roots.evaluate(4)
        roots.between = lambda blocks, at: None
        for optimizer in roots.optimizers:
            optimizer.zero_grad()
        for step in range(3):
            roots.step(step)


@CHECKS.on(2)
def graphs_may_be_kept() -> None:
    """Two forwards through all roots before either backward, and a second backward through a graph."""
    roots = Siblings()
    for step in range(5):
        for blocks in roots.both:
            losses = [roots.run(blocks, 2 * step + at).square().mean() for at in range(2)]
            for loss in losses:
                loss.backward(retain_graph=True)
            losses[1].backward()
        roots.compare_gradients()
        roots.end_step()
        roots.evaluate(step)
    for plain, sharded in zip(roots.plain, roots.sharded, strict=True):
        assert_same_weights(sharded, plain)


@CHECKS.on(2)
def roots_may_run_in_another_order_twice_or_not_at_all() -> None:
    orders = [range(5), (0, 2, 1, 4, 3), (0, 1, 0, 3, 4), (0, 1, 1, 2, 3, 4), (0, 3, 4), (1, 2), (4, 3, 2, 1, 0), (2,)]
    roots = Siblings()
    for step in range(3):
        roots.step(step)
    for order, num in itertools.product(orders, (1, 3)):
        for step in range(num):
            roots.order = order
            roots.evaluate(step)
            roots.step(step)
            roots.evaluate(step)
        roots.order = range(NUM_ROOTS)
        roots.evaluate(0)
        roots.step(num)
    for plain, sharded in zip(roots.plain, roots.sharded, strict=True):
        assert_same_weights(sharded, plain)


@CHECKS.on(2)
def a_root_that_runs_twice_is_planned() -> None:
    """Its second forward matches the plan, also in evaluation, where it is a separate use."""
    roots = Siblings()
    roots.order = (0, 1, 0, 2, 3, 4)
    with warnings_of_the_engine() as warnings:
        for step in range(5):
            roots.step(step)
            assert roots.gathers(roots.evaluate, step)[0] == 6
    assert warnings == []


@CHECKS.on(2)
def an_exception_in_a_root_leaves_the_next_pass_right() -> None:
    for at, graph in itertools.product((0, 1, 3), (True, False)):
        roots = Siblings()
        for step in range(3):
            roots.step(step)
        handle = roots.sharded[at].register_forward_pre_hook(_trip)
        with pytest.raises(ValueError, match="trips"), torch.set_grad_enabled(graph):
            roots.run(roots.sharded, 3)
        handle.remove()
        with warnings_of_the_engine() as warnings:
            for step in range(3):
                roots.step(step)
                assert roots.gathers(roots.evaluate, step)[0] == NUM_ROOTS
        assert warnings == []


def _trip(*_: object) -> None:
    raise ValueError("trips")


@CHECKS.on(2)
def roots_with_units_inside_and_prefetch_depths_are_gathered_once() -> None:
    for depth in (0, 1, 2, 3):
        with fully_shard_context() as context:
            sharded = []
            for _ in range(3):
                net = nn.Sequential(Block(WIDTH), Block(WIDTH), nn.Linear(WIDTH, WIDTH))
                for module in (net[0], net[1], net):
                    fully_shard(module, forward_prefetch_depth=depth)
                sharded.append(net)
        context.change_options(poisons=True)
        features = torch.randn(3, WIDTH)

        def run(sharded: Sequence[nn.Module] = sharded, features: torch.Tensor = features) -> torch.Tensor:
            x = features
            for net in sharded:
                x = net(x)
            return x

        issued: list[str] = []
        watch_collectives(context, lambda what, group, issued=issued: issued.append(what))  # type: ignore[misc]
        for step in range(4):
            issued.clear()
            loss = run().sum()
            # Do not count prefetches for backward by the last units of forward.
            assert issued.count("forward's all-gather") == 9, (depth, step, issued)
            loss.backward()
            issued.clear()
            with torch.no_grad():
                run()
            assert issued == ["forward's all-gather"] * 9, (depth, step, issued)
            assert not context.unsharder.live


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_sibling_roots(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
