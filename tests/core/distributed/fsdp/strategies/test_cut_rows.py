"""The engine with any granule: training, loads and checkpoints are those of whole rows, and of no sharding at all.

Rows are cut into parts by force here, so that small tensors and few ranks do what large ones on 1,024 ranks do; the last tests
see that the budget of padding does it by itself. Blocks of rows and whole tensors are asked for as users do, by an attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import (
    FlatAdamW,
    Granule,
    fully_shard,
    hybrid_placements,
    load_checkpoint,
    save_checkpoint,
)
from megatron.core.distributed.fsdp.dtensor.placements import RowShard, local_rows
from tests.core.distributed.fsdp.checkpoint.test_split_checkpoints import full_tensors_survive
from tests.core.distributed.fsdp.strategies.test_parity import Setting, assert_same_bits, train_sharded, train_unsharded
from tests.core.distributed.fsdp.strategies.test_split_models import a_step_is_the_whole_models
from tests.support.agreement import assert_trains_alike, groups_of, inputs, seeded, shard
from tests.support.checkpoint_models import adamw, sharded_model, train, whole_state
from tests.support.cut_rows import rows_cut
from tests.support.hybrid import (
    KINDS,
    WORLD,
    assert_rows,
    backward_sharded,
    descend,
    make_hybrid_net,
    steps_in_order,
)
from tests.support.layouts import row_ranges
from tests.support.models import STRATEGY_NAMES, full, local_of, make_net
from tests.support.rank_checks import RankChecks
from tests.support.shared_folder import shared_folder
from tests.support.split_models import Layout, wrap

CHECKS = RankChecks(__name__)

SHARDED = [name for name in STRATEGY_NAMES if name != "no_shard"]


def _flat_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """``FlatAdamW``, for a model of the engine; PyTorch's for the one that it is compared with."""
    held = list(parameters)
    return FlatAdamW(held, lr=0.02, eps=1e-3) if FlatAdamW.serves(held) else torch.optim.AdamW(held, lr=0.02, eps=1e-3)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "flat": _flat_adamw,
}


class Perceptron(nn.Module):
    """Fewer rows than ranks, rows longer than segments, three dimensions, a vector and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(8, 3)
        self.mixed = nn.Parameter(torch.randn(2, 6, 3))
        self.exit = nn.Linear(6, 10)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.entry(x)) @ self.mixed.sum(0).t()
        return torch.tanh(self.exit(x)) * self.scale


def _loss(model: Any, rank: int, step: int) -> Any:
    return model(inputs(rank, step, 4, 8)).square().mean()


def _row_parts(model: Any) -> dict[str, int]:
    """The parts that each matrix's rows are cut into, as its DTensor says."""
    found = {}
    for name, parameter in model.named_parameters():
        parts = [placement.row_parts for placement in parameter.placements if isinstance(placement, RowShard)]
        if parts and parameter.dim() > 1:
            found[name] = max(parts)
    return found


# ---- numbers --------------------------------------------------------------------------------------------------------


@CHECKS.on(4)
def training_equals_no_sharding_to_the_last_bit() -> None:
    """Losses, gradients and weights of five steps, of the net and against the reference of ``test_parity``."""
    for strategy in SHARDED:
        for num_microbatches in (1, 3):
            setting = Setting(strategy, num_microbatches)
            with rows_cut():
                got = train_sharded(setting, poisons=True)
            assert_same_bits(got, train_unsharded(setting, in_order=True))


@CHECKS.on(4)
def any_shape_trains_as_without_sharding() -> None:
    """Losses, gradients and weights of three steps, and what is gathered has the parameter's own shape."""
    for strategy in SHARDED:
        for name, make_optimizer in OPTIMIZERS.items():
            with rows_cut():
                model = assert_trains_alike(
                    Perceptron,
                    lambda net: shard(net, ["exit"], strategy),  # noqa: B023
                    _loss,
                    make_optimizer=make_optimizer,
                )
            assert _row_parts(model) == {"mixed": 2, "entry.weight": 8, "exit.weight": 2}, (strategy, name)
    shapes = [tuple(unsharded.shape) for group in groups_of(model) for unsharded in group.unsharded]
    assert sorted(shapes) == sorted(tuple(parameter.shape) for parameter in Perceptron().parameters())


@CHECKS.on(WORLD)
def hybrid_sharding_equals_no_sharding_to_the_last_bit() -> None:
    for strategy, outer in KINDS:
        with rows_cut():
            net = make_hybrid_net(strategy, outer)
        for step, expected in enumerate(steps_in_order(strategy, 2, 3)):
            losses = backward_sharded(net, step, 2)
            assert all(map(torch.equal, losses, expected.losses))
            assert_rows(net, expected.gradients, of_gradients=True)
            descend(net)
            assert_rows(net, expected.weights)
        for parameter, expected_weight in zip(net.parameters(), expected.weights, strict=True):
            assert torch.equal(full(parameter), expected_weight)
        assert set(_row_parts(net).values()) == {5, 7, 11}


@CHECKS.on(4)
def an_inner_axis_of_one_rank_leaves_cutting_to_the_outer_one() -> None:
    """PyTorch takes a placement on an axis of one rank to be none, so it must not be the one that says what is cut."""
    for sizes in ((4, 1), (1, 4)):
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner"))
        net = make_net(1)
        with rows_cut():
            fully_shard(net, mesh, hybrid_placements("optim_grads_params", "optim", ("outer", "inner")))
        for parameter, whole in zip(net.parameters(), make_net(1).parameters(), strict=True):
            assert torch.equal(full(parameter), whole)
            assert torch.equal(local_of(parameter), local_rows(parameter, whole.detach()))  # type: ignore[arg-type]
        assert set(_row_parts(net).values()) == {5, 7, 11}


@CHECKS.on(4)
def split_models_take_the_whole_models_step() -> None:
    """Tensor-parallel rows, columns and gated blocks, experts, stages and hybrid sharding besides."""
    with rows_cut():
        model = wrap(Layout(tp=2))
        assert {"module.layers.0.fc1", "module.layers.0.fc2"} <= {
            name for name, n in _row_parts(model).items() if n > 1
        }
        a_step_is_the_whole_models(["tp2 ep2", "pp2 tp2 sums", "hfsdp tp2"], ["optim_grads_params"])


# ---- granules that parameters ask for -------------------------------------------------------------------------------

ASKED = [Granule.rows(2), None, Granule.whole(), Granule.rows(3), Granule.row_parts(2)]


def _ask(model: nn.Module) -> Any:
    """Have the model's parameters ask for granules in turns; parts only where rows have an even number of columns."""
    for index, parameter in enumerate(model.parameters()):
        granule = ASKED[index % len(ASKED)]
        if granule != Granule.row_parts(2) or (parameter.dim() > 1 and parameter.shape[1] % 2 == 0):
            parameter.fsdp_granule = granule  # type: ignore[attr-defined]
    return model


def _assert_granules_are_kept(model: nn.Module) -> set[Granule]:
    """No rank's rows begin or end inside a granule; returns the granules that were asked for."""
    asked = set()
    for group in groups_of(model):
        for index, (slot, parameter) in enumerate(zip(group.layout.slots, group.sharded, strict=True)):
            granule = getattr(parameter, "fsdp_granule", None)
            if granule is None or group.layout.num_ranks == 1:
                continue
            assert slot.granule == granule
            asked.add(granule)
            owners = [end for begin, end in row_ranges(group.layout, index) if end > begin]
            assert all(end == slot.rows or end % (granule.num_rows or slot.rows) == 0 for end in owners)
    return asked


@CHECKS.on(4)
def what_parameters_ask_for_changes_no_number() -> None:
    """Losses, gradients, weights, whatever the strategy and the optimizer; gathered weights have their own shape."""
    for strategy in SHARDED:
        for make_optimizer in OPTIMIZERS.values():
            model = assert_trains_alike(
                Perceptron,
                lambda net: shard(_ask(net), ["exit"], strategy),  # noqa: B023
                _loss,
                make_optimizer=make_optimizer,
            )
            assert _assert_granules_are_kept(model) == {granule for granule in ASKED if granule}
    shapes = [tuple(unsharded.shape) for group in groups_of(model) for unsharded in group.unsharded]
    assert sorted(shapes) == sorted(tuple(parameter.shape) for parameter in Perceptron().parameters())


@CHECKS.on(4)
def hybrid_sharding_keeps_granules_on_both_axes() -> None:
    """The outer axis cuts what the inner one leaves: neither cuts a block or a whole tensor."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    net = _ask(make_net(1))
    fully_shard(net, mesh, hybrid_placements("optim_grads_params", "optim", ("outer", "inner")))
    assert {Granule.whole(), Granule.rows(2), Granule.rows(3)} <= _assert_granules_are_kept(net)
    for parameter, whole in zip(net.parameters(), make_net(1).parameters(), strict=True):
        assert torch.equal(full(parameter), whole)
        assert torch.equal(local_of(parameter), local_rows(parameter, whole.detach()))
        if getattr(parameter, "fsdp_granule", None) == Granule.whole():
            assert local_of(parameter).numel() in (0, whole.numel())


@CHECKS.on(4)
def checkpoints_load_with_other_granules() -> None:
    """Saved by a model that asks for granules, loaded by one that does not, and the other way round; bit for bit."""
    with shared_folder() as folder:
        for name, saves, loads in (("saves", _ask, lambda model: model), ("loads", lambda model: model, _ask)):
            model: Any = shard(saves(seeded(Perceptron)), ["exit"])
            optimizer = _flat_adamw(model.parameters())
            _steps(model, optimizer, 0, 2)
            save_checkpoint(model, optimizer, Path(folder) / name)
            other: Any = shard(loads(Perceptron()), ["exit"])
            fresh = _flat_adamw(other.parameters())
            load_checkpoint(other, fresh, Path(folder) / name)
            assert _steps(other, fresh, 2, 4) == _steps(model, optimizer, 2, 4)
            for parameter, expected in zip(other.parameters(), model.parameters(), strict=True):
                assert torch.equal(full(parameter), full(expected))


def _steps(model: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Train for some steps; return their losses."""
    losses = []
    for step in range(first, last):
        optimizer.zero_grad()
        loss = _loss(model, torch.distributed.get_rank(), step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@CHECKS.on(2)
def a_granule_that_does_not_fit_is_refused() -> None:
    layer: Any = nn.Linear(5, 4)
    layer.weight.fsdp_granule = Granule.row_parts(2)
    with pytest.raises(ValueError, match="fsdp_granule of parameter weight: row_parts must divide dim 1"):
        fully_shard(layer)
    layer.weight.fsdp_granule = "whole"
    with pytest.raises(TypeError, match="fsdp_granule of parameter weight must be a Granule, got 'whole'"):
        fully_shard(layer)


# ---- loads and checkpoints ------------------------------------------------------------------------------------------


@CHECKS.on(2)
def initial_weights_are_those_of_whole_rows() -> None:
    """Also on the meta device, where a module is filled when it is sharded."""
    with rows_cut():
        model = shard(seeded(Perceptron))
        with torch.device("meta"):
            layer = nn.Linear(8, 3)
        layer = seeded(lambda: shard(layer))
    for parameter, expected in zip(model.parameters(), seeded(Perceptron).parameters(), strict=True):
        assert torch.equal(full(parameter), expected)
    assert torch.equal(full(layer.weight), seeded(lambda: nn.Linear(8, 3)).weight)


@CHECKS.on(2)
def full_and_sharded_state_is_loaded() -> None:
    whole = seeded(Perceptron)
    with rows_cut():
        cut = shard(Perceptron())
    rows = shard(Perceptron())
    for source, target in ((whole, cut), (cut, rows), (whole, rows), (rows, cut), (cut, cut)):
        with torch.no_grad():
            for parameter in target.parameters():
                local_of(parameter).fill_(float("nan")) if source is not target else None
        target.load_state_dict(source.state_dict())
        for parameter, expected in zip(target.parameters(), whole.parameters(), strict=True):
            assert torch.equal(full(parameter), expected)


@CHECKS.on(4)
def checkpoints_load_with_parts_and_without() -> None:
    """Weights, optimizer state and the losses that follow, bit for bit, whichever way rows were cut when it was saved."""
    with shared_folder() as folder:
        for strategy, saves_cut, loads_cut in zip(SHARDED, (True, False, True), (False, True, True), strict=True):
            _save_and_load(Path(folder) / strategy, strategy, saves_cut=saves_cut, loads_cut=loads_cut)


def _save_and_load(path: Path, strategy: str, *, saves_cut: bool, loads_cut: bool) -> None:
    with rows_cut() if saves_cut else nullcontext():
        model = sharded_model("optim_grads_params")
    optimizer = adamw(model)
    train(model, optimizer, 2)
    assert (max(_row_parts(model).values()) > 1) == saves_cut
    save_checkpoint(model, optimizer, path, extra_state={"step": 2})
    state = whole_state(model, optimizer)
    losses = train(model, optimizer, 2, first=2)
    with rows_cut() if loads_cut else nullcontext():
        other = sharded_model(strategy, seed=1)
    fresh = adamw(other)
    load_checkpoint(other, fresh, path)
    assert whole_state(other, fresh) == state
    assert train(other, fresh, 2, first=2) == losses


@CHECKS.on(4)
def checkpoints_of_split_models_hold_the_whole_tensors() -> None:
    """PyTorch's own reader sees them; blocks, columns and rows of tensor parallelism are cut into parts."""
    with rows_cut(), shared_folder() as folder:
        full_tensors_survive(folder, 2)


# ---- by itself ------------------------------------------------------------------------------------------------------


@CHECKS.on(2, 4)
def a_budget_of_padding_cuts_rows_by_itself() -> None:
    """Three long rows on 2 or 4 ranks are a third of padding; those of the matrix of many short ones stay whole."""
    width = 2**19

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(width, 3, bias=False)
            self.second = nn.Linear(3, 64)

        def forward(self, x: torch.Tensor) -> Any:
            return self.second(torch.tanh(self.first(x)))

    model = assert_trains_alike(
        Wide, shard, lambda model, rank, step: model(inputs(rank, step, 4, width)).square().mean(), steps=3
    )
    parts = _row_parts(model)
    assert parts["first.weight"] > 1 and parts["second.weight"] == 1
    total = sum(group.layout.total_numel for group in groups_of(model))
    used = sum(parameter.numel() for parameter in model.parameters())
    assert total - used <= 0.02 * used
    assert total < width * 4, "whole rows of the first matrix alone would take more"
    small = shard(nn.Linear(1024, 3))
    assert set(_row_parts(small).values()) == {1}, "a small unit keeps whole rows"


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
