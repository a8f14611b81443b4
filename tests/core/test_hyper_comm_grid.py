"""Grids of ranks with named axes."""

from __future__ import annotations

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
    with pytest.raises(NotImplementedError, match="views"):
        grid.get_rank_enum("tp", view="experts")  # type: ignore[arg-type]


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
        assert "exists" in str(error)
    else:
        raise AssertionError("a second group over the same axis was made")
    grid.destroy()


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
