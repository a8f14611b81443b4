"""Ranks that run units of equal size in another order are told, before the wrong weights that they exchanged train anything."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.core.distributed.fsdp import fully_shard, fully_shard_context, fully_shard_optimizer
from megatron.core.distributed.fsdp.api.module import contexts_of
from megatron.core.distributed.fsdp.checks import order_errors
from megatron.core.distributed.fsdp.checks.observer import RankObserver
from megatron.core.distributed.fsdp.comm.process_group import is_same_on_ranks
from megatron.core.distributed.fsdp.flat_optimizer.flat_adamw import FlatAdamW
from tests.support.launch import run_ranks
from tests.support.models import order_of
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


class _Branches(nn.Module):
    """Layers of equal size, which run in the order of ``order``."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_layers))
        self.order = list(range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return x


def _branches(num_layers: int = 2, mesh: DeviceMesh | None = None, **options: Any) -> _Branches:
    model = _Branches(num_layers)
    for layer in model.layers:
        fully_shard(layer, mesh, **options)
    return fully_shard(model, mesh, **options)


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def _swap_on_rank_1(model: _Branches) -> None:
    if dist.get_rank() == 1:
        model.order = [1, 0]


_SAID = (
    r"got as collective 1 (of step 1 )?the forward's all-gather of layers\.0\.weight and 1 more \(\d+ elements\) on ranks "
    r"\[0\] and forward's all-gather of layers\.1\.weight and 1 more \(\d+ elements\) on ranks \[1\]; those would exchange"
)


@CHECKS.on(2)
def another_order_in_the_first_step_is_an_error_on_all_ranks() -> None:
    """All-gathers of one size meet, whatever they gather: nothing hangs, and weights are those of another layer."""
    model = _branches()
    _swap_on_rank_1(model)
    with pytest.raises(RuntimeError, match=_SAID):
        _step(model)


@CHECKS.on(2)
def another_order_of_a_first_evaluation_is_an_error_on_all_ranks() -> None:
    model = _branches()
    _swap_on_rank_1(model)
    with torch.no_grad():
        model(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=_SAID):
        model(torch.ones(2, 4))


@CHECKS.on(2)
def a_new_order_is_compared_before_it_is_planned() -> None:
    model = _branches()
    for _ in range(3):
        _step(model)
    model.order = [1, 0]
    _step(model)  # leaves the plan
    with mock.patch.object(order_errors, "is_same_on_ranks", wraps=is_same_on_ranks) as compared:
        for _ in range(2):  # the new order is recorded, and comes again
            _step(model)
        assert compared.call_count == 1
        for _ in range(3):
            _step(model)
        assert compared.call_count == 1, "a step that follows the plan costs nothing"


def _planned(model: _Branches) -> _Branches:
    for _ in range(3):
        _step(model)
    return model


@CHECKS.on(2)
def ranks_that_leave_the_plan_for_different_units_are_told_in_that_step() -> None:
    """Both gather on demand then, so that collectives of one size meet, and nothing hangs."""
    model = _planned(_branches(4))
    model.order = [[0, 2, 3, 1], [0, 3, 2, 1]][dist.get_rank()]
    with pytest.raises(
        order_errors.OrderDiffersError,
        match=r"got as collective \d of step 4 the forward's all-gather of layers\.2\.weight and 1 more \(\d+ elements\) on ranks "
        r"\[0\] and forward's all-gather of layers\.3\.weight and 1 more \(\d+ elements\) on ranks \[1\]; those",
    ):
        _step(model)


class _Event:
    """One that has fired when the test says so."""

    has_fired = False

    def query(self) -> bool:
        return self.has_fired


@CHECKS.on(2)
def a_host_that_does_not_wait_hears_of_it_later() -> None:
    """As on CUDA: at the first forward, or step of the optimizer, that finds the answer there."""
    for hears in ("forward", "optimizer", "flat optimizer"):
        model = _planned(_branches(4))
        kind = FlatAdamW if hears.startswith("flat") else torch.optim.SGD
        optimizer = fully_shard_optimizer(kind(model.parameters(), lr=0.1))
        context = contexts_of(model)[0]
        assert isinstance(context.observer, RankObserver)
        with (
            mock.patch.object(RankObserver, "_waits", False),
            mock.patch.object(context.streams, "record", lambda role, again=None: _Event()),
        ):
            _step(model)
            first = context.observer._awaited[0].arrived
            model.order = [[0, 2, 3, 1], [0, 3, 2, 1]][dist.get_rank()]
            _step(model)
            optimizer.step()
            first.has_fired = True
            optimizer.step()
            context.observer._awaited[0].arrived.has_fired = True
            with pytest.raises(
                order_errors.OrderDiffersError, match=r"of step 5 .*layers\.2.* on ranks \[0\] and .*layers\.3"
            ):
                _step(model) if hears == "forward" else optimizer.step()


@CHECKS.on(2)
def an_evaluation_between_two_steps_counts_for_the_next_one() -> None:
    model = _planned(_branches(4))
    model.order = [[0, 2, 3, 1], [0, 3, 2, 1]][dist.get_rank()]
    with torch.no_grad():
        model(torch.ones(2, 4))
    model.order = [0, 1, 2, 3]
    with pytest.raises(order_errors.OrderDiffersError, match=r"collective \d of step 4 .*layers\.2.*layers\.3"):
        _step(model)


@CHECKS.on(4)
def a_rank_is_named_among_those_of_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = _planned(_branches(4, mesh))
    model.order = [0, 3, 2, 1] if dist.get_rank() == 3 else [0, 2, 3, 1]
    with pytest.raises(
        order_errors.OrderDiffersError, match=r"layers\.2.* on ranks \[0-2\] and .*layers\.3.* on ranks \[3\]"
    ):
        _step(model)


@CHECKS.on(2)
def a_rank_that_makes_no_step_is_told_in_the_next_backward() -> None:
    """Its loss was not finite, say: weights are half old and half new from then on."""
    said = (
        r"all ranks must update weights in the same way, got before the end of step 5 the update of layers\.0\.weight and 1 more on ranks \[0\] and "
        r"none on ranks \[1\]"
    )
    for placements in ("no_shard", "optim_grads_params"):
        for is_flat in (False, True):
            model = _branches(2, placements=placements)
            kind = FlatAdamW if is_flat else torch.optim.SGD
            optimizer = fully_shard_optimizer(kind(model.parameters(), lr=0.1))
            for step in range(4):
                _step(model)
                if step == 2:
                    optimizer.zero_grad()  # all skip: a difference of no ranks
                if step < 2 or (step == 3 and dist.get_rank() == 0):
                    optimizer.step()
            with pytest.raises(order_errors.OrderDiffersError, match=said):
                _step(model)


@CHECKS.on(2)
def steps_of_several_optimizers_at_any_time_are_no_difference() -> None:
    model = _branches(2)
    optimizers = [fully_shard_optimizer(torch.optim.SGD(layer.parameters(), lr=0.1)) for layer in model.layers]
    for step in range(6):
        _step(model)
        for index, optimizer in enumerate(optimizers):
            if step % (index + 2) == 0:
                optimizer.step()
    with pytest.raises(
        order_errors.OrderDiffersError,
        match=r"the none on ranks \[0\] and update of layers\.1\.\S+ and 1 more on ranks \[1\]",
    ):
        if dist.get_rank() == 1:
            optimizers[1].step()
        _step(model)


@CHECKS.on(2)
def ranks_that_leave_the_plan_together_go_on() -> None:
    model = _planned(_branches(4))
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        model.order = torch.randperm(4, generator=generator)[
            : 3 + int(torch.rand((), generator=generator) > 0.5)
        ].tolist()
        with torch.no_grad():
            model(torch.ones(2, 4))
        _step(model)


@CHECKS.on(2)
def a_rank_may_evaluate_alone_where_nothing_is_gathered() -> None:
    model = _planned(_branches(4, placements="no_shard"))
    if dist.get_rank() == 1:
        model.order = [0, 2]
        with torch.no_grad():
            model(torch.ones(2, 4))
        model.order = [0, 1, 2, 3]
    for _ in range(3):
        _step(model)


def _impatient_mesh() -> DeviceMesh:
    group = dist.new_group(timeout=timedelta(seconds=3))
    return DeviceMesh.from_group(group, "cpu")


@CHECKS.on(2)
def a_rank_that_leaves_the_plan_alone_is_named_on_all_ranks_when_they_time_out() -> None:
    """The others prefetch, so collectives of different kinds wait for each other."""
    model = _planned(_branches(4, _impatient_mesh()))
    if dist.get_rank() == 1:
        model.order = [0, 2, 1, 3]
    with pytest.raises(
        order_errors.OrderDiffersError,
        match=r"got as use 3 of step 4 the forward of unit layers\.1 on ranks \[0\] and forward of unit layers\.2 on ranks \[1\]",
    ):
        _step(model)


@CHECKS.on(2)
def a_rank_that_ends_is_no_difference_of_orders() -> None:
    """Both leave the plan alike; then one does not come."""
    model = _planned(_branches(4, _impatient_mesh()))
    model.order = [0, 2, 1, 3]
    with mock.patch.object(order_errors, "PATIENCE_S", 0.5):
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="must be joined by all of ranks") as raised:
                _step(model)
            assert not isinstance(raised.value, order_errors.OrderDiffersError)
            assert "ran the forward of unit layers.2 where its plan says the forward of unit layers.1" in str(
                raised.value
            )
        else:
            model.layers[1].register_forward_pre_hook(_fail)
            with pytest.raises(ZeroDivisionError):
                _step(model)


@CHECKS.on(2)
def a_rank_that_left_the_plan_and_ended_is_named() -> None:
    model = _planned(_branches(4, _impatient_mesh()))
    if dist.get_rank() == 0:
        with pytest.raises(
            order_errors.OrderDiffersError,
            match=r"layers\.1 on ranks \[0\] and forward of unit layers\.2 on ranks \[1\]",
        ):
            _step(model)
    else:
        model.order = [0, 2, 1, 3]
        model.layers[2].register_forward_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            _step(model)


def _fail(*_: object) -> None:
    raise ZeroDivisionError


def _abort_of_gloo(folder: str) -> None:
    logging.basicConfig(filename=f"{folder}/{dist.get_rank()}.log")
    model = _Branches(4)
    model.layers[3] = nn.Linear(4, 4, bias=False)
    for layer in model.layers:
        fully_shard(layer)
    _planned(fully_shard(model))
    if dist.get_rank() == 1:
        model.order = [0, 1, 3]
    _step(model)


def test_sizes_that_do_not_match_are_named_where_the_backend_ends_a_process(tmp_path: Path) -> None:
    """Gloo ends the process of a rank that gets more than it waits for. The rank that left the plan has said so before.

    The other rank may be the first to end: its connection is closed.
    """
    with pytest.raises(AssertionError) as ended:
        run_ranks(2, _abort_of_gloo, str(tmp_path), timeout_s=20.0)
    assert "died without a word" in str(ended.value) or "OrderDiffersError" in str(ended.value)
    said = "\n".join(path.read_text() for path in sorted(tmp_path.iterdir()))
    assert "unit layers.3 ran forward out of the planned order, which has the forward of unit layers.2 here" in said
    assert "All ranks must do the same" in said


@CHECKS.on(2)
def every_collective_is_compared_under_the_debug_mode() -> None:
    """So a difference is told before a rank waits for another in another collective, also in a step that follows a plan."""
    with fully_shard_context(debug=True) as context:
        model = _branches()
    for _ in range(4):
        before = order_of(context).num_gathers + order_of(context).num_reductions
        with mock.patch.object(order_errors, "is_same_on_ranks", wraps=is_same_on_ranks) as compared:
            _step(model)
        issued = order_of(context).num_gathers + order_of(context).num_reductions - before
        assert compared.call_count == issued + (context.planner.plan is None)
    _swap_on_rank_1(model)
    with pytest.raises(
        RuntimeError,
        match=r"got as collective \d\d the last reduction of \S*layers\.1.* on ranks \[0\] and last reduction of \S*layers\.0",
    ):
        _step(model)


@CHECKS.on(2)
def a_debug_mode_of_one_rank_is_told_when_a_unit_is_sharded() -> None:
    said = r"fully_shard_context around the call of fully_shard .*debug=False' on ranks \[0\] and .*=True' on"
    with fully_shard_context(debug=dist.get_rank() == 1), pytest.raises(ValueError, match=said):
        fully_shard(nn.Linear(4, 4))


@CHECKS.on(2)
def a_scope_of_one_rank_is_told_when_a_unit_is_sharded() -> None:
    said = r"around the call of fully_shard .*'none' on ranks \[0\] and 'one with debug=False'"
    with fully_shard_context() if dist.get_rank() else nullcontext(), pytest.raises(ValueError, match=said):
        fully_shard(nn.Linear(4, 4))


@CHECKS.on(2)
def a_debug_mode_that_one_rank_turns_on_later_is_told_at_once() -> None:
    with fully_shard_context() as context:
        model = _branches()
    _step(model)
    with pytest.raises(
        ValueError, match=r"debug of the context must be .*False on ranks \[0\] and True on ranks \[1\]"
    ):
        context.debug = dist.get_rank() == 1
    assert not context.debug
    _step(model)
    context.debug = True
    _step(model)


@CHECKS.on(2)
def what_one_rank_unshards_alone_is_told_under_the_debug_mode() -> None:
    """Also where no step is under way."""
    with fully_shard_context(debug=True):
        model = _branches()
    _step(model)
    with pytest.raises(RuntimeError, match=r"layers\.0.* on ranks \[0\] and forward's all-gather of \S*layers\.1"):
        model.layers[dist.get_rank()].unshard()  # type: ignore[operator]


@CHECKS.on(2)
def a_rank_that_ends_sooner_is_named() -> None:
    order = ["all-gather of a", "last reduction of a"][: 2 - dist.get_rank()]
    with pytest.raises(
        RuntimeError, match=r"collective 2 the last reduction of a on ranks \[0\] and end on ranks \[1\]"
    ):
        order_errors.check_same_order(order, [_world()], _CPU)


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


_CPU = torch.device("cpu")


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
