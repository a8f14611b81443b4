"""Units run as they please: out of order, twice, not at all, interleaved, recomputed. Right each time, nothing stays gathered.

Released memory is poisoned with NaN throughout, so that weights read after their release would show in the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp import fully_shard, fully_shard_optimizer, microbatch
from megatron.core.transformer.moe.alternating_passes import AlternatingPasses
from tests.support.agreement import warnings_of_the_engine
from tests.support.models import (
    NUM_INPUTS,
    STRATEGY_NAMES,
    Net,
    assert_at_rest,
    assert_same_gradients,
    assert_same_weights,
    context_of,
    difference,
    full,
    global_batch,
    loss_of,
    make_net,
    make_pair,
    order_of,
    shard_net,
)
from tests.support.rank_checks import RankChecks
from tests.support.turns import Turn

CHECKS = RankChecks(__name__)


class Pair:
    """A sharded net and the same net unsharded, which are trained side by side on the same data.

    Every rank gets the same pieces, so that the mean over ranks is what one process computes.
    """

    def __init__(self, num_blocks: int = 3, strategy: str = "optim_grads_params") -> None:
        self.unsharded, self.sharded = make_pair(num_blocks, strategy)
        self.nets = (self.unsharded, self.sharded)
        self.optimizers = [
            torch.optim.SGD(self.unsharded.parameters(), lr=0.1, momentum=0.9),
            fully_shard_optimizer(torch.optim.SGD(self.sharded.parameters(), lr=0.1, momentum=0.9)),
        ]
        self.context = context_of(self.sharded)
        self.num_steps = 0

    def set(self, **attributes: object) -> None:
        """Set these attributes on both nets."""
        for net in self.nets:
            for key, value in attributes.items():
                setattr(net, key, value)

    def pieces(self, count: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return global_batch(self.num_steps, count)

    def both(self, act: Callable[[Net], torch.Tensor]) -> torch.Tensor:
        """Run the same on both nets, and check that they return equal tensors."""
        expected, got = (act(net) for net in self.nets)
        assert difference(got, expected) <= 1e-6, (got, expected)
        return got

    def check_gradients(self) -> None:
        assert_at_rest(self.sharded)
        assert_same_gradients(self.sharded, self.unsharded)

    def finish_step(self) -> None:
        """Check that gradients are equal, step both optimizers and clear gradients."""
        self.check_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.num_steps += 1

    def step(self) -> None:
        """Take an ordinary step with both."""
        for piece in self.pieces(1):
            self.both(lambda net, piece=piece: _forward_backward(net, piece))  # type: ignore[misc]
        self.finish_step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
        assert_same_weights(self.sharded, self.unsharded)


def _forward_backward(net: nn.Module, piece: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss = loss_of(net, piece)
    loss.backward()
    return loss.detach()


def _uses(pair: Pair) -> list[str]:
    """The planned uses, as names: ``f`` or ``b`` and the block's number, or ``r`` for the root."""
    assert pair.context.planner.plan is not None
    names = {unit.index: unit.name.removeprefix("blocks.") for unit in pair.context.units}
    return [
        ("b" if use.backward else "f") + (names[use.unit] if names[use.unit].isdigit() else "r")
        for use in pair.context.planner.plan.uses
    ]


# ---- 1. order ---------------------------------------------------------------------------------------------------------


@CHECKS.on(2)
def the_order_of_running_counts_not_that_of_registration() -> None:
    pair = Pair(4)
    pair.set(order=[2, 0, 3, 1])
    pair.steps(3)
    assert _uses(pair) == ["fr", "f2", "f0", "f3", "f1", "br", "b1", "b3", "b0", "b2"]
    assert pair.context.planner.in_plan


@CHECKS.on(2)
def an_order_that_changes_is_right_told_once_and_learned() -> None:
    pair = Pair(4)
    pair.steps(2)
    with warnings_of_the_engine() as messages:
        pair.set(order=[3, 2, 1, 0])
        pair.step()
        assert pair.context.planner.plan is not None and not pair.context.planner.in_plan
        pair.steps(3)
    assert len(messages) == 1 and "blocks.3 ran forward out of the planned order" in messages[0]
    assert _uses(pair)[:5] == ["fr", "f3", "f2", "f1", "f0"]
    assert pair.context.planner.in_plan


@CHECKS.on(2)
def orders_that_alternate_are_right() -> None:
    pair = Pair(4)
    for order in ([0, 1, 2, 3], [3, 1, 2, 0], [0, 1, 2, 3], [1, 0], [0, 1, 2, 3], [3, 1, 2, 0], [3, 1, 2, 0], [2]):
        pair.set(order=order)
        pair.steps(1)


@CHECKS.on(2)
def units_that_are_left_out_at_random_are_told_once() -> None:
    """Stochastic depth, alike on all ranks."""
    pair = Pair(4)
    with warnings_of_the_engine() as messages:
        for order in ([0, 1, 2, 3], [0, 2], [1, 3], [0, 2, 3], [0, 2, 3], [1], [3], [0, 1, 2, 3], [2], [2], [0, 3]):
            pair.set(order=order)
            pair.step()
    told = [message for message in messages if "out of the planned order" in message]
    assert len(told) == 1, messages


@CHECKS.on(2)
def a_unit_may_run_alone_between_backward_and_step() -> None:
    pair = Pair()
    x = torch.linspace(-1, 1, 7).view(1, 7)
    for _ in range(3):
        _both_forward_backward(pair)
        with torch.no_grad():
            pair.both(lambda net: net.blocks[1](x))
        pair.finish_step()
    # With gradients: they add to those of the step.
    for _ in range(2):
        _both_forward_backward(pair)
        pair.both(lambda net: _backward_of(net.blocks[1](x)))
        pair.finish_step()
    pair.steps(2)


def _both_forward_backward(pair: Pair) -> None:
    (piece,) = pair.pieces(1)
    pair.both(lambda net: _forward_backward(net, piece))


def _backward_of(out: torch.Tensor) -> torch.Tensor:
    out.square().sum().backward()
    return out.detach()


@CHECKS.on(2)
def a_unit_may_run_alone_before_the_root_ever_ran() -> None:
    """It is its own root then, and joins the root's context later, without losing its gradient."""
    pair_of_nets = make_net(), make_net()
    unsharded, sharded = pair_of_nets
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded)
    x = torch.linspace(-1, 1, 7).view(1, 7)
    for _ in range(3):  # its own context has a plan by then
        for net in pair_of_nets:
            _backward_of(net.blocks[1](x))
    alone = context_of(sharded.blocks[1])
    assert alone.planner.plan is not None and len(alone.units) == 1
    assert_at_rest(alone)
    for step in range(3):
        (piece,) = global_batch(step, 1)
        for net in pair_of_nets:
            _forward_backward(net, piece)
        assert_same_gradients(sharded, unsharded)
    assert context_of(sharded.blocks[1]) is context_of(sharded) is not alone
    assert_at_rest(sharded)


@CHECKS.on(2)
def a_unit_used_alone_while_its_graph_waits_keeps_a_context_of_its_own() -> None:
    """The root's first forward comes between the unit's forward and its backward; both are right."""
    nets = make_net(), make_net()
    for block in nets[1].blocks:
        fully_shard(block)
    fully_shard(nets[1])
    x = torch.linspace(-1, 1, 7).view(1, 7)
    (piece,) = global_batch(0, 1)
    for net in nets:
        early = net.blocks[1](x).square().sum()
        late = loss_of(net, piece)
        late.backward()
        early.backward()
    assert_same_gradients(nets[1], nets[0])
    for context in {context_of(module) for module in (nets[1], *nets[1].blocks)}:
        assert_at_rest(context)


# ---- 2. prefetched, not used --------------------------------------------------------------------------------------------


@CHECKS.on(2)
def a_unit_that_is_prefetched_and_not_used_does_not_stay_gathered() -> None:
    """Branches change between steps: a skipped unit's weights were on their way; and its gradient is none."""
    pair = Pair(4)
    for order in ([0, 1, 2, 3], [0, 1, 2, 3], [0, 2, 3], [0, 1, 2], [0, 1], [], [0, 1, 2, 3], [1], [0, 1, 2, 3]):
        pair.set(order=order)
        gathers = order_of(pair.context).num_gathers
        pair.steps(1)
        assert order_of(pair.context).num_gathers > gathers
    # The same under no_grad, where no backward comes that would clean up.
    pair.steps(2)
    pair.set(order=[0, 2])
    (piece,) = pair.pieces(1)
    with torch.no_grad():
        pair.both(lambda net: loss_of(net, piece))
    assert_at_rest(pair.sharded)


@CHECKS.on(2)
def a_loss_that_is_deleted_without_backward_leaves_nothing_to_wait_for() -> None:
    pair = Pair()
    for _ in range(3):
        for piece in pair.pieces(1):
            pair.both(lambda net, piece=piece: loss_of(net, piece).detach())  # type: ignore[misc]
        pair.step()
    assert pair.context.planner.in_plan


# ---- 3. twice -----------------------------------------------------------------------------------------------------------


@CHECKS.on(2)
def a_unit_may_run_twice_in_one_forward() -> None:
    for strategy in STRATEGY_NAMES:
        for order in ([0, 1, 0], [1, 1, 1], [0, 1, 2, 1, 0]):
            pair = Pair(3, strategy)
            pair.set(order=order)
            pair.steps(3)


@CHECKS.on(2)
def a_unit_that_ran_twice_once_is_right_when_it_runs_once() -> None:
    pair = Pair()
    for order in ([0, 1, 2], [0, 1, 1, 2], [0, 1, 2], [0, 1, 2], [2, 0, 2], [0, 1, 2]):
        pair.set(order=order)
        pair.steps(1)


@CHECKS.on(2)
def a_unit_that_runs_twice_is_reduced_once_and_early_again_when_it_runs_once() -> None:
    """Its gradient is whole at backward's end; that it once ran twice does not make it late for ever."""
    pair = Pair()
    for order in ([0, 1, 1, 2], [1, 0, 1], [0, 1, 2]):
        pair.set(order=order)
        for _ in range(4):
            before = order_of(pair.context).num_reductions
            pair.step()
            used = len(set(order)) + 1
            assert order_of(pair.context).num_reductions - before == used, order
    assert [unit.name for unit in pair.context.units if unit.is_deferred] == ["Net"]
    assert pair.context.planner.in_plan


class _Told(torch.autograd.Function):
    """Passes a tensor on, and calls ``forward``'s second argument when its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tell: Callable[[], None]) -> torch.Tensor:
        ctx.tell = tell
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.tell()
        return grad, None


@CHECKS.on(2)
def the_first_unit_is_reduced_before_the_root_goes_on() -> None:
    """What the root computed before its units, such as an embedding, may be large; nothing of theirs lies there meanwhile."""
    for strategy in STRATEGY_NAMES:
        pair = Pair(strategy=strategy)
        open_units: list[list[str]] = []

        def tell(open_units: list[list[str]] = open_units, pair: Pair = pair) -> None:
            backward = pair.context.backward
            units = [u for u in pair.context.units if u in backward._open or backward.uses(u) or u.forward_depth]
            open_units.append([unit.name for unit in units])

        def watched(block: nn.Module, x: torch.Tensor, pair: Pair = pair, tell: Callable[[], None] = tell) -> Any:
            return block(_Told.apply(x, tell) if block is pair.sharded.blocks[0] else x)

        def run_twice(block: nn.Module, x: torch.Tensor, pair: Pair = pair, tell: Callable[[], None] = tell) -> Any:
            x = _Told.apply(x, tell) if block is pair.sharded.blocks[0] else x
            block(x)  # used for nothing: backward comes to the input by the second one alone
            return block(x)

        for around in (watched, run_twice, watched):
            pair.sharded.around = around
            pair.steps(4)
            assert open_units == [["Net"]] * 4, strategy
            open_units.clear()
        pair.set(order=[0, 1, 0, 2])  # it comes back: its gradient is whole at the end alone
        pair.steps(2)
        assert [set(names) for names in open_units] == [{"Net", "blocks.0"}] * 4, strategy
        pair.set(order=[0, 1, 2])
        pair.steps(1)
        (piece,) = pair.pieces(1)
        for net in pair.nets:  # two graphs, of which the one that began first comes back first
            losses = [loss_of(net, piece) for _ in range(2)]
            for loss in losses:
                loss.backward()
        pair.finish_step()
        for net in pair.nets:
            net.entry.requires_grad_(False)
        pair.steps(2)
        assert pair.context.planner.in_plan


class _Fed(Net):
    """A net that gets its features on some ranks, on the others what the blocks are to take, which needs no gradient."""

    is_fed = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.entry(x) if self.is_fed else x @ torch.ones(NUM_INPUTS, 7)
        for index in self.order:
            h = self.blocks[index](h)
        out: torch.Tensor = self.head(h)
        return out


@CHECKS.on(2)
def ranks_reduce_in_one_order_though_the_first_input_gets_a_gradient_on_some_alone() -> None:
    """A unit that comes back or holds others waits for backward's end, where the first one is on ranks that did not finish it.

    So it is with a graph of the first unit alone, whose backward comes last.
    """
    for order, has_nested in (([0, 1, 2, 1], False), ([0, 1, 2], True)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = _Fed()
        unsharded = copy.deepcopy(net)
        if has_nested:
            fully_shard(net.blocks[1].up)
        shard_net(net)
        for each in (net, unsharded):
            each.order = order
        for step in range(4):
            ((features, classes),) = global_batch(step, 1)
            net.is_fed = dist.get_rank() == 0 or step == 0
            alone = [each.blocks[0](torch.ones(2, 7)).square().sum() * (step == 3) for each in (net, unsharded)]
            (loss_of(net, (features, classes)) + alone[0]).backward()
            for is_fed in (True, step == 0):
                unsharded.is_fed = is_fed
                (loss_of(unsharded, (features, classes)) / 2).backward()
            alone[1].backward()
            assert_same_gradients(net, unsharded)
            assert_at_rest(net)
            for each in (net, unsharded):
                each.zero_grad()


class _Gate(nn.Module):
    """A block whose weights get gradients by a way beside that of its input's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x * torch.sigmoid(self.down(torch.tanh(self.up(self.place))))
        return out


@CHECKS.on(2)
def the_first_units_input_may_come_from_another_thread() -> None:
    """Autograd knows by a thread's own numbers what was recorded later: by those of a busy thread the input's gradient goes on first."""
    net = Net(2, 7, _Gate)
    shard_net(net)
    unsharded = Net(2, 7, _Gate)
    unsharded.load_state_dict({name: full(value) for name, value in net.state_dict().items()})

    def threaded(block: nn.Module, x: torch.Tensor) -> Any:
        def scale() -> torch.Tensor:
            busy = x
            while torch.autograd._get_sequence_nr() < first + 1000:
                busy = busy * 1.0
            return busy

        first = torch.autograd._get_sequence_nr()
        if block is not net.blocks[0]:
            return block(x)
        with ThreadPoolExecutor(1) as pool:
            return block(pool.submit(scale).result())

    net.around = threaded
    for step in range(3):
        ((features, classes),) = global_batch(step, 1)
        for each in (net, unsharded):
            each.zero_grad()
            loss_of(each, (features, classes)).backward()
        assert_same_gradients(net, unsharded)
        assert_at_rest(net)


class TwoNames(nn.Module):
    """One module under two names, and in a list besides."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.first = block
        self.second = block
        self.listed = nn.ModuleList([block])
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.listed[0](self.second(self.first(x) * self.scale)).sum()


@CHECKS.on(2)
def a_module_may_be_reached_under_two_names() -> None:
    for wraps_block in (True, False):
        nets = [TwoNames(make_net().blocks[0]) for _ in range(2)]
        if wraps_block:
            fully_shard(nets[1].first)
        fully_shard(nets[1])
        assert [name for name, _ in nets[0].named_parameters()] == [name for name, _ in nets[1].named_parameters()]
        assert list(nets[0].state_dict()) == list(nets[1].state_dict())
        context_of(nets[1]).change_options(poisons=True)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        for step in range(3):
            x = global_batch(step, 1)[0][0] @ torch.ones(5, 7)
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad()
                net(x).backward()
            assert_same_gradients(nets[1], nets[0])
            for optimizer in optimizers:
                optimizer.step()
        assert_same_weights(nets[1], nets[0])
        assert_at_rest(nets[1])


# ---- 4. several graphs ------------------------------------------------------------------------------------------------


@CHECKS.on(2)
def two_forwards_then_two_backwards_are_right_in_either_order() -> None:
    for strategy in STRATEGY_NAMES:
        for order in ((0, 1), (1, 0)):
            pair = Pair(3, strategy)
            pair.step()
            for _ in range(3):
                pieces = pair.pieces(2)
                for net in pair.nets:
                    losses = [loss_of(net, piece) for piece in pieces]
                    for index in order:
                        losses[index].backward()
                pair.finish_step()
            assert_same_weights(pair.sharded, pair.unsharded)


@CHECKS.on(2)
def one_forward_one_backward_schedules_are_right() -> None:
    """F1 F2 B1 F3 B2 B3, in microbatch scopes and outside of them, and a change of schedule between steps."""
    for strategy in STRATEGY_NAMES:
        pair = Pair(3, strategy)
        for schedule in ("F0 F1 B0 F2 B1 B2",) * 3 + ("F0 B0 F1 B1 F2 B2", "F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B1 B2"):
            pieces = pair.pieces(3)
            for net in pair.nets:
                losses: dict[int, torch.Tensor] = {}
                for act in schedule.split():
                    index = int(act[1])
                    if act[0] == "F":
                        losses[index] = loss_of(net, pieces[index])
                    else:
                        losses.pop(index).backward()
            pair.finish_step()
        assert_same_weights(pair.sharded, pair.unsharded)


@CHECKS.on(2)
def a_pipeline_in_microbatch_scopes_reduces_once() -> None:
    """Scopes lie around each pass: the backward of the last microbatch alone is the last."""
    for strategy in STRATEGY_NAMES:
        pair = Pair(3, strategy)
        for _ in range(3):
            pieces = pair.pieces(3)
            before = order_of(pair.context).num_reductions
            losses: dict[int, torch.Tensor] = {}
            for act in ["F0", "F1", "B0", "F2", "B1", "B2"]:
                index = int(act[1])
                with microbatch(pair.sharded, is_first=act == "F0", is_last=act == "B2"):
                    if act[0] == "F":
                        losses[index] = loss_of(pair.sharded, pieces[index])
                    else:
                        losses.pop(index).backward()
            reductions = order_of(pair.context).num_reductions - before
            num_groups = len(pair.context.groups)
            assert reductions == num_groups * (1 if strategy in ("no_shard", "optim") else 3)
            for piece in pieces:
                loss_of(pair.unsharded, piece).backward()
            pair.finish_step()
        assert_same_weights(pair.sharded, pair.unsharded)


@CHECKS.on(2)
def a_graph_may_be_differentiated_twice() -> None:
    for strategy in STRATEGY_NAMES:
        pair = Pair(3, strategy)
        for _ in range(4):
            (piece,) = pair.pieces(1)
            for net in pair.nets:
                loss = loss_of(net, piece)
                loss.backward(retain_graph=True)
                loss.backward()
            pair.finish_step()
        assert_same_weights(pair.sharded, pair.unsharded)


@CHECKS.on(2)
def two_losses_of_one_graph_may_be_differentiated_one_after_the_other() -> None:
    pair = Pair()
    for _ in range(4):
        (piece,) = pair.pieces(1)
        for net in pair.nets:
            out = net(piece[0])
            out[:, 0].sum().backward(retain_graph=True)
            nn.functional.cross_entropy(out, piece[1]).backward()
        pair.finish_step()
    assert_same_weights(pair.sharded, pair.unsharded)


@CHECKS.on(2)
def the_same_graph_after_the_weights_have_moved_is_refused() -> None:
    """A graph that was kept past its step refers to addresses that hold other weights now."""
    pair = Pair()
    (piece,) = pair.pieces(1)
    loss = loss_of(pair.sharded, piece)
    loss.backward(retain_graph=True)
    pair.sharded.zero_grad()
    pair.steps(2)
    with pytest.raises(RuntimeError, match="run forward again"):
        loss.backward()
    assert_at_rest_after_failure(pair)
    pair.steps(2)


def assert_at_rest_after_failure(pair: Pair) -> None:
    """Drop what a failed step left, as the next forward would."""
    pair.context._recover()
    assert_at_rest(pair.sharded)
    for net in pair.nets:
        net.zero_grad()


# ---- 5. evaluation ----------------------------------------------------------------------------------------------------


@CHECKS.on(2)
def evaluation_between_steps_is_right_and_keeps_the_plan() -> None:
    """Train, evaluate, train; under no_grad, inference_mode or neither, with eval() on, between any two calls."""
    for strategy in STRATEGY_NAMES:
        pair = Pair(3, strategy)
        pair.steps(2)
        plan = pair.context.planner.plan
        for mode in (torch.no_grad, torch.inference_mode):
            for _ in range(3):
                pair.set(training=False)
                with mode():
                    for piece in pair.pieces(3):
                        pair.both(lambda net, piece=piece: loss_of(net, piece).clone())  # type: ignore[misc]
                assert_at_rest(pair.sharded)
                pair.set(training=True)
            pair.steps(1)
        _both_evaluate(pair)
        _both_forward_backward(pair)
        _both_evaluate(pair)  # between backward and step
        pair.finish_step()
        pair.steps(1)
        assert pair.context.planner.plan is plan and pair.context.planner.in_plan


def _both_evaluate(pair: Pair) -> None:
    with torch.no_grad():
        for piece in pair.pieces(2):
            pair.both(lambda net, piece=piece: loss_of(net, piece))  # type: ignore[misc]


@CHECKS.on(2)
def evaluation_first_then_training() -> None:
    """The first order that is seen is that of an evaluation; the plan grows when backward comes."""
    pair = Pair()
    for _ in range(3):
        _both_evaluate(pair)
        assert_at_rest(pair.sharded)
    assert "br" not in _uses(pair)
    pair.steps(3)
    assert "br" in _uses(pair) and pair.context.planner.in_plan


@CHECKS.on(2)
def evaluation_while_a_graph_waits_for_its_backward() -> None:
    pair = Pair()
    for _ in range(3):
        pieces = pair.pieces(2)
        for net in pair.nets:
            loss = loss_of(net, pieces[0])
            with torch.no_grad():
                loss_of(net, pieces[1])
            loss.backward()
        pair.finish_step()
    pair.steps(2)


# ---- 6. recomputation -------------------------------------------------------------------------------------------------


def _recomputed(use_reentrant: bool) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    return lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant)


def _inside(use_reentrant: bool) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """Recomputes two calls of a block as one piece, as a whole layer stack would be."""
    return lambda block, x: checkpoint(lambda y: block(block(y)), x, use_reentrant=use_reentrant)


@CHECKS.on(2)
def recomputation_is_right_and_gathers_no_more_than_without() -> None:
    """Each unit is gathered once in forward and once in backward, but for the turn, whether it is recomputed or not."""
    for use_reentrant in (False, True):
        counts = []
        for around in (None, _recomputed(use_reentrant)):
            pair = Pair(4)
            if around is not None:
                pair.set(around=around)
            pair.steps(3)
            before = order_of(pair.context).num_gathers
            pair.steps(1)
            counts.append(order_of(pair.context).num_gathers - before)
            assert pair.context.planner.in_plan
        assert counts[1] <= counts[0], (use_reentrant, counts)


@CHECKS.on(2)
def recomputation_is_right_for_every_strategy() -> None:
    for strategy in STRATEGY_NAMES:
        for use_reentrant in (False, True):
            for around in (_recomputed(use_reentrant), _inside(use_reentrant)):
                pair = Pair(3, strategy)
                pair.set(around=around)
                pair.steps(3)


@CHECKS.on(2)
def recomputation_of_several_units_at_once_is_right() -> None:
    """A checkpoint around two units: backward begins with a whole forward of both."""
    for use_reentrant in (False, True):
        pair = Pair(4)
        for net in pair.nets:
            net.order = [0]
            net.around = lambda _, x, net=net, use=use_reentrant: checkpoint(_through, net, x, use_reentrant=use)  # type: ignore[misc]
        pair.steps(3)
        gathers, reductions = order_of(pair.context).num_gathers, order_of(pair.context).num_reductions
        pair.steps(1)
        # Four blocks twice and the root once: what the recomputation gathered is what backward uses.
        num_groups = len(pair.context.groups)
        assert order_of(pair.context).num_gathers - gathers <= 2 * num_groups
        assert order_of(pair.context).num_reductions - reductions == num_groups


def _through(net: Net, x: torch.Tensor) -> torch.Tensor:
    for block in net.blocks:
        x = block(x)
    return x


# ---- 7. exceptions ----------------------------------------------------------------------------------------------------


class Trip(torch.autograd.Function):
    """The identity, until it is armed: then backward raises."""

    armed = False

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        if Trip.armed:
            raise ValueError("backward trips")
        return grad


def _trips(grad: torch.Tensor) -> None:
    raise ValueError("backward trips")


class ArmedBlocks:
    """Raises in the forward of the calls whose numbers are given, counted over this object's life."""

    def __init__(self, *calls: int) -> None:
        self.calls, self.count = set(calls), -1

    def __call__(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        handle = block.register_forward_pre_hook(self._raise) if self.count in self.calls else None
        try:
            return block(x)
        finally:
            if handle is not None:
                handle.remove()

    @staticmethod
    def _raise(*_: object) -> None:
        raise ValueError("forward trips")


@CHECKS.on(2)
def after_an_exception_in_forward_the_next_step_is_right() -> None:
    """In each block in turn, before and after there is a plan; nothing stays gathered at once."""
    for strategy in STRATEGY_NAMES:
        for num_steps_before in (0, 2):
            for call in range(3):
                pair = Pair(3, strategy)
                pair.steps(num_steps_before)
                (piece,) = pair.pieces(1)
                plain = pair.sharded.around
                pair.sharded.around = ArmedBlocks(call)
                with pytest.raises(ValueError, match="forward trips"):
                    loss_of(pair.sharded, piece)
                assert_at_rest(pair.sharded)
                assert not any(unit.forward_depth for unit in pair.context.units)
                pair.sharded.around = plain
                pair.steps(2)


class Unreadable(dict[str, torch.Tensor]):
    """Something of the user's that raises when it is searched for tensors."""

    def values(self) -> Any:
        raise ValueError("reading trips")


class Reader(nn.Module):
    """A unit that is a root, takes what it does not use, and returns what cannot be searched if it is ``armed``."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.armed = nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> Any:
        return Unreadable(x=self.inside(x)) if self.armed else self.inside(x)


@CHECKS.on(2)
def an_output_raising_when_searched_leaves_nothing_gathered() -> None:
    """The engine looks for tensors in what a root returns; user code that runs there may fail as its forward may."""
    model = Reader()
    fully_shard(model)
    x = torch.ones(2, 4)
    for _ in range(2):
        model(x).sum().backward()
        model.zero_grad()
    model.armed = True
    with pytest.raises(ValueError, match="reading trips"):
        model(x)
    assert_at_rest(model)
    model.armed = False
    model(x).sum().backward()
    assert model.inside.weight.grad is not None


@CHECKS.on(2)
def after_an_exception_in_backward_the_next_step_is_right() -> None:
    """A backward that fails has no end; the next forward finds that out, drops its gradients, and says so."""
    for strategy in STRATEGY_NAMES:
        for num_steps_before in (0, 2):
            pair = Pair(3, strategy)
            pair.set(around=lambda block, x: block(Trip.apply(x)))
            pair.steps(num_steps_before)
            (piece,) = pair.pieces(1)
            loss = loss_of(pair.sharded, piece)
            Trip.armed = True
            try:
                with pytest.raises(ValueError, match="backward trips"):
                    loss.backward()
            finally:
                Trip.armed = False
            del loss
            with pytest.raises(RuntimeError, match="the last one did not finish"):
                pair.optimizers[1].step()
            pair.optimizers[1].zero_grad()
            with warnings_of_the_engine() as messages:
                pair.steps(2)
            assert sum("did not finish" in message for message in messages) == 1
            assert pair.context.planner.in_plan or num_steps_before == 0


@CHECKS.on(2)
def after_an_exception_anywhere_in_backward_the_next_step_is_right() -> None:
    """Before a unit's backward, amid it and after it, in a hook: units before it are reduced, on their way, or not begun."""
    pair = Pair()
    pair.steps(2)
    modules = [module for block in pair.sharded.blocks for module in (block, block.up, block.down)]
    for module in (pair.sharded.entry, *modules, pair.sharded):
        (piece,) = pair.pieces(1)
        handle = module.register_forward_hook(lambda _, __, out: out.register_hook(_trips) and None)
        loss = loss_of(pair.sharded, piece)
        handle.remove()
        with pytest.raises(ValueError, match="backward trips"):
            loss.backward()
        del loss
        pair.optimizers[1].zero_grad()
        pair.steps(1)


@CHECKS.on(2)
def after_an_exception_in_backward_what_was_reduced_stays_until_gradients_are_cleared() -> None:
    """As in PyTorch without sharding; what was not reduced is dropped, and the log says both."""
    pair = Pair()
    pair.steps(2)
    (piece,) = pair.pieces(1)
    for net in pair.nets:
        handle = net.entry.register_forward_hook(lambda _, __, out: out.register_hook(_trips) and None)
        loss = loss_of(net, piece)
        handle.remove()
        with pytest.raises(ValueError, match="backward trips"):
            loss.backward()
        del loss
    with warnings_of_the_engine() as messages:
        assert loss_of(pair.sharded, piece) > 0
    assert sum("call zero_grad()" in message for message in messages) == 1
    for (name, parameter), unsharded in zip(pair.sharded.named_parameters(), pair.unsharded.parameters(), strict=True):
        if name.startswith(("blocks.1", "blocks.2")):
            assert difference(full(parameter.grad), full(unsharded.grad)) <= 2e-6, name
        else:  # the root's, and those of the first unit, which is reduced when its input's gradient is there
            assert parameter.grad is None, name


@CHECKS.on(2)
def after_an_exception_in_a_recomputation_the_next_step_is_right() -> None:
    for use_reentrant in (False, True):
        for num_steps_before in (0, 2):
            pair = Pair()
            plain = _recomputed(use_reentrant)
            pair.set(around=plain)
            pair.steps(num_steps_before)
            (piece,) = pair.pieces(1)
            armed = ArmedBlocks(4)  # three calls in forward; the second recomputation fails
            pair.sharded.around = lambda block, x, armed=armed, use=use_reentrant: checkpoint(  # type: ignore[misc]
                armed, block, x, use_reentrant=use
            )
            loss = loss_of(pair.sharded, piece)
            with pytest.raises(ValueError, match="forward trips"):
                loss.backward()
            del loss
            assert_at_rest_after_failure(pair)
            pair.sharded.around = plain
            pair.steps(2)


@CHECKS.on(2)
def after_an_exception_in_one_of_two_passes_that_take_turns_the_next_step_is_right() -> None:
    """The other one is in the middle of a unit then, and is given up."""
    for strategy in STRATEGY_NAMES:
        for failing in ("forward", "backward"):
            pair = Pair(3, strategy)
            pair.steps(2)
            plain, passes, armed = pair.sharded.around, AlternatingPasses(), ArmedBlocks(4)  # the second forward's
            if failing == "backward":
                armed = ArmedBlocks()
            pair.sharded.around = lambda block, x, armed=armed, passes=passes: armed(  # type: ignore[misc]
                block, Turn.apply(Trip.apply(x), passes)
            )
            losses: list[torch.Tensor] = []

            def forward(at: int, pair: Pair = pair, losses: list[torch.Tensor] = losses) -> None:
                with microbatch(pair.sharded, is_first=at == 0, is_last=False):
                    losses.append(loss_of(pair.sharded, pair.pieces(2)[at]))

            forward(0)
            Trip.armed = failing == "backward"
            try:
                with pytest.raises(ValueError, match=f"{failing} trips"):
                    passes.run(partial(forward, 1), lambda losses=losses: losses.pop(0).backward())  # type: ignore[misc]
            finally:
                Trip.armed = False
            losses.clear()
            assert_at_rest_after_failure(pair)
            pair.sharded.around = plain
            pair.steps(2)


@CHECKS.on(2)
def an_exception_between_forward_and_backward_leaves_the_next_step_right() -> None:
    """The user's own code fails between the two and drops the graph."""
    pair = Pair()
    pair.steps(2)
    (piece,) = pair.pieces(1)
    with pytest.raises(ValueError, match="the loss trips"), microbatch(pair.sharded):
        loss = loss_of(pair.sharded, piece)
        assert loss.requires_grad
        raise ValueError("the loss trips")
    del loss
    pair.steps(2)
    assert pair.context.planner.in_plan


@CHECKS.on(2)
def an_exception_that_is_caught_inside_the_model_is_right() -> None:
    """The model catches what its block raised and goes on without it."""

    def caught(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        try:
            return ArmedBlocks(0)(block, x) if block in to_fail else block(x)
        except ValueError:
            return x

    pair = Pair()
    to_fail = {net.blocks[1] for net in pair.nets}
    pair.set(around=caught)
    pair.steps(3)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_order(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
