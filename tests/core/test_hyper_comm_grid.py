"""Grids of ranks with named axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.parallel_state import RankGenerator
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


@pytest.mark.parametrize("axes", [["tp"], ["cp", "dp"], ["dp", "cp"], ["tp", "pp"], ["tp", "cp", "dp"]])
def test_groups_are_those_of_a_rank_generator(monkeypatch: pytest.MonkeyPatch, axes: list[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "24")
    grid = HyperCommGrid([2, 2, 3, 2], ["tp", "cp", "dp", "pp"])
    generator = RankGenerator(tp=2, ep=1, dp=3, pp=2, cp=2, order="tp-cp-ep-dp-pp")
    assert sorted(grid.get_rank_enum(axes)) == sorted(generator.get_ranks("-".join(axes)))


def test_a_grid_may_begin_at_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    grid = HyperCommGrid([2, 2], ["tp", "dp"], rank_offset=4)
    assert grid.get_rank_enum("tp") == [[4, 5], [6, 7]] and grid.get_rank_enum("dp") == [[4, 6], [5, 7]]


def test_wrong_grids_and_axes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RuntimeError, match="8 ranks"):
        HyperCommGrid([2, 4], ["tp", "dp"])
    with pytest.raises(ValueError, match="one name"):
        HyperCommGrid([2], ["tp", "dp"])
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    with pytest.raises(ValueError, match="'pp'"):
        grid.get_rank_enum("pp")
    with pytest.raises(KeyError, match="create_pg"):
        grid.get_pg("tp")
    with pytest.raises(KeyError, match="'experts' is not registered"):
        grid.get_rank_enum("tp", view="experts")


def test_experts_have_axes_of_their_own_over_the_same_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "10")
    grid = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"], rank_offset=2)
    grid.register_view("expert", [1, 4, 2], ["expt_tp", "ep", "pp"], shared_dims=["pp"])
    assert grid.get_rank_enum("ep", view="expert") == [[2, 3, 4, 5], [6, 7, 8, 9]]
    assert grid.get_rank_enum("pp", view="expert") == grid.get_rank_enum("pp") == [[2, 6], [3, 7], [4, 8], [5, 9]]
    with pytest.raises(ValueError, match="'ep', which is not in view 'base'"):
        grid.get_rank_enum("ep")
    with pytest.raises(KeyError, match="ep for view 'expert' hasn't been created"):
        grid.get_pg("ep", view="expert")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("base", [8], ["ep"]), "already registered"),
        (("e", [2, 4], ["ep"]), "each axis needs one name"),
        (("e", [2, 4], ["ep", "ep"]), "duplicate dim_names"),
        (("e", [-2, -4], ["ep", "pp"]), "must be positive ints"),
        (("e", [2, 2], ["ep", "pp"]), "must have 8 ranks, but has 4"),
        (("e", [4, 2], ["ep", "pp"], ["pp", "pp"]), "duplicate shared_dims"),
        (("e", [4, 2], ["ep", "pp"], ["tp"]), r"shared axes must be among .* got \['tp'\]"),
        (("e", [2, 4], ["pp", "ep"], ["pp"]), r"groups over the shared pp must be the grid's, \[\[0, 4\]"),
    ],
    ids=lambda value: None if isinstance(value, tuple) else value,
)
def test_views_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[Any, ...], message: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    grid = HyperCommGrid([2, 2, 2], ["tp", "dp", "pp"])
    with pytest.raises(ValueError, match=message):
        grid.register_view(*arguments)


@CHECKS.on(2)
def groups_reduce_over_their_axes() -> None:
    grid = HyperCommGrid([1, 2], ["tp", "dp"])
    groups = {name: grid.create_pg(name) for name in ("tp", "dp")}
    for name, total in (("tp", dist.get_rank() + 1), ("dp", 3)):
        assert grid.get_pg(name) is groups[name]
        value = torch.tensor([dist.get_rank() + 1])
        dist.all_reduce(value, group=grid.get_pg(name))
        assert value.item() == total and grid.is_current_rank_in_grid()
    try:
        grid.create_pg("dp")
    except KeyError as error:
        assert "dp has already been created" in str(error)
    else:
        raise AssertionError("a second group over the same axis was made")
    grid.register_view("expert", [2, 1], ["ep", "dp"])
    grid.register_view("same", [1, 2], ["ep", "dp"], shared_dims=["dp"])
    assert grid.get_pg("dp", view="same") is groups["dp"], "shared axes have the grid's group"
    assert (
        dist.get_world_size(grid.create_pg("ep", view="expert")) == 2
        and grid.create_pg("dp", view="expert") is not None
    )
    assert dist.get_world_size(grid.get_pg("dp", view="expert")) == 1, "of another view, so another group"
    dist.barrier()  # a group that goes while another rank still connects fails there
    grid.destroy()


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
