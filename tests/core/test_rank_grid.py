"""Groups of ranks: small worlds against an independent definition, large ones by their properties."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.core.rank_grid import GROUP_NAMES, RankGrid

DENSE = {"tp": "tp", "cp": "cp", "pp": "pp", "mp": "tp pp", "dp": "dp", "dp_cp": "cp dp", "tp_cp": "tp cp"}
DENSE["tp_dp_cp"] = "tp dp cp"
EXPERT = {"ep": "ep", "expt_tp": "tp", "expt_dp": "dp", "tp_ep": "tp ep", "pp": "pp"}

AS_DENSE = {"ep": "ep", "expt_tp": "tp", "expt_dp": "dp_cp", "tp_ep": "tp", "pp": "pp"}


def grid(world_size: int, **degrees: Any) -> RankGrid:
    """A grid with Megatron's short names of the degrees."""
    names = {
        "tp": "tensor_model_parallel_size",
        "cp": "context_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
        "expt_tp": "expert_tensor_parallel_size",
        "instances": "num_distributed_optimizer_instances",
    }
    return RankGrid(world_size=world_size, **{names.get(name, name): value for name, value in degrees.items()})


def test_the_groups_of_16_ranks_are_those_of_megatron() -> None:
    """tp 2, pp 4, so dp 2: the example of Megatron-Core's documentation."""
    example = grid(16, tp=2, pp=4)
    assert example.groups("tp").tolist() == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert example.groups("dp").tolist() == [[r, r + 2] for r in (0, 1, 4, 5, 8, 9, 12, 13)]
    assert example.groups("pp").tolist() == [[r, r + 4, r + 8, r + 12] for r in range(4)]
    assert example.groups("mp").tolist() == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    assert example.groups("embd").tolist() == [[r, r + 12] for r in range(4)]
    assert example.ranks("embd", 12) == [0, 12] and example.ranks("embd", 4) is None


def test_experts_have_a_grid_of_their_own() -> None:
    """8 ranks: dense tp 2 x cp 2 x dp 2, experts ep 4 x expt_dp 2, which takes in tensor-parallel neighbours."""
    both = grid(8, tp=2, cp=2, ep=4, expt_tp=1)
    assert both.groups("dp_cp").tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert both.groups("tp_cp").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert both.groups("ep").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert both.groups("expt_dp").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert both.size("expt_tp") == 1
    inherited = grid(8, tp=2, ep=2)
    assert inherited.groups("expt_tp").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert inherited.groups("tp_ep").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_inner_axis_of_hybrid_sharding_is_a_consecutive_part() -> None:
    """So the ranks of a host, which are consecutive, are on one inner axis."""
    hybrid = grid(16, instances=2)
    assert hybrid.groups("intra_dp_cp").tolist() == [list(range(8)), list(range(8, 16))]
    assert hybrid.groups("inter_dist_opt").tolist() == [[r, r + 8] for r in range(8)]
    split = grid(8, tp=2, ep=2, expt_tp=1, instances=2)
    assert split.groups("intra_dp_cp").tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert split.groups("intra_expt_dp").tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert split.groups("inter_expt_dist_opt").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_pipeline_stages_may_be_neighbours_within_a_data_parallel_rank() -> None:
    other = grid(16, tp=2, pp=4, order="tp-cp-ep-pp-dp")
    assert other.groups("pp").tolist() == [[r, r + 2, r + 4, r + 6] for r in (0, 1, 8, 9)]
    assert other.groups("dp").tolist() == [[r, r + 8] for r in range(8)]
    with_context = grid(8, cp=2, pp=2, order="tp-cp-ep-pp-dp")
    assert (
        with_context.groups("expt_dp").tolist() == with_context.groups("dp_cp").tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    )


degree = st.sampled_from([1, 1, 2, 3, 4, 8])


@st.composite
def grids(draw: st.DrawFn, largest_world: int) -> RankGrid:
    """Grids whose degrees fill the world, dense and expert."""
    tp, cp, pp, ep, expt_tp, instances = (draw(degree) for _ in range(6))
    order = draw(st.sampled_from(["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]))
    unit = int(np.lcm.reduce([tp * cp * pp * instances, expt_tp * ep * pp * instances]))
    assume(unit <= largest_world)
    assume(order.endswith("pp") or pp == 1 or tp * cp == expt_tp * ep or (ep == 1 and tp == expt_tp))
    world = unit * draw(st.integers(1, largest_world // unit))
    return grid(world, tp=tp, cp=cp, pp=pp, ep=ep, expt_tp=expt_tp, instances=instances, order=order)


def places(sizes: dict[str, int], rank: int) -> dict[str, int]:
    """A rank's place on each axis, by division: the definition that groups must agree with."""
    found = {}
    for axis, size in sizes.items():
        rank, found[axis] = divmod(rank, size)
    return found


@settings(deadline=None, max_examples=40)
@given(grids(64))
def test_a_group_holds_the_ranks_that_differ_on_its_axes_alone(some: RankGrid) -> None:
    for axes_by_name, sizes in ((DENSE, some.dense_sizes), (EXPERT, some.expert_sizes)):
        where = [places(sizes, rank) for rank in range(some.world_size)]
        for name, axes in axes_by_name.items():
            if axes_by_name is EXPERT and some.experts_are_split_as_dense_layers:
                assert some.groups(name).tolist() == some.groups(AS_DENSE[name]).tolist()
                continue
            expected: dict[tuple[int, ...], list[int]] = {}
            for rank, place in enumerate(where):
                expected.setdefault(tuple(place[a] for a in sizes if a not in axes.split()), []).append(rank)
            assert some.groups(name).tolist() == sorted(expected.values()), name


def check_large(some: RankGrid) -> None:
    """Groups of one kind partition the ranks, and groups of crossing kinds share one rank."""
    world = some.world_size
    belongs: dict[str, Any] = {}
    for name in GROUP_NAMES:
        groups = some.groups(name)
        if name == "embd":
            stages = min(2, some.pipeline_model_parallel_size)
            assert groups.shape == (world // some.pipeline_model_parallel_size, stages)
            continue
        assert np.array_equal(np.sort(groups, axis=None), np.arange(world)), name
        assert (np.diff(groups, axis=1) > 0).all(), "ranks of a group ascend, whatever the split"
        belongs[name] = np.empty(world, dtype=np.int64)
        belongs[name][groups] = np.arange(len(groups))[:, None]
    for crossing in (
        ("tp", "cp", "dp", "pp"),
        ("tp", "dp_cp", "pp"),
        ("mp", "dp_cp"),
        ("tp", "intra_dp_cp", "inter_dist_opt", "pp"),
        ("expt_tp", "ep", "expt_dp", "pp"),
        ("tp_ep", "intra_expt_dp", "inter_expt_dist_opt", "pp"),
    ):
        assert np.prod([some.size(name) for name in crossing]) == world
        for one, other in combinations(crossing, 2):
            pairs = belongs[one] * world + belongs[other]
            assert len(np.unique(pairs)) == world, f"a {one} and a {other} group share one rank at most"
    assert (some.size("intra_dp_cp"), some.size("inter_dist_opt")) == (
        some.size("dp_cp") // some.num_distributed_optimizer_instances,
        some.num_distributed_optimizer_instances,
    )


@settings(deadline=None, max_examples=40)
@given(grids(2048))
def test_groups_divide_the_world_and_cross_in_one_rank(some: RankGrid) -> None:
    check_large(some)


@pytest.mark.parametrize(
    "degrees",
    [
        {"instances": 8},
        {"tp": 8, "cp": 16, "pp": 16, "instances": 4},
        {"tp": 4, "pp": 16, "ep": 64, "expt_tp": 1, "instances": 2},
        {"tp": 8, "cp": 2, "pp": 8, "ep": 16, "expt_tp": 1, "order": "tp-cp-ep-pp-dp"},
        {"tp": 16384},
        {"tp": 8, "cp": 4, "pp": 16, "instances": 8, "order": "tp-cp-ep-pp-dp"},
    ],
    ids=str,
)
def test_16384_ranks(degrees: dict[str, Any]) -> None:
    check_large(grid(16384, **degrees))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no ranks": ({"world_size": 0}, "world_size must be at least 1, got 0"),
    "no tensor-parallel ranks": ({"tp": 0}, "tensor_model_parallel_size must be at least 1, got 0"),
    "an axis twice": ({"order": "tp-cp-dp-pp-tp"}, "order must name tp, cp, ep, dp and pp once each.*'tp-cp-dp-pp-tp'"),
    "an axis of several ranks missing": (
        {"order": "tp-ep-dp-pp", "cp": 2},
        "order must name all axes of several ranks, got 'tp-ep-dp-pp' without cp",
    ),
    "dense degrees that do not fill the world": (
        {"tp": 2, "cp": 3},
        r"multiple of tensor_model_parallel_size \* context_parallel_size \* pipeline_model_parallel_size, got 16 ranks "
        r"and 2 \* 3 \* 1 = 6; change",
    ),
    "expert degrees that do not fill the world": (
        {"tp": 2, "ep": 16},
        r"expert_tensor_parallel_size \* expert_model_parallel_size \* .*got 16 ranks and 2 \* 16 \* 1 = 32",
    ),
    "instances that do not divide": (
        {"tp": 2, "instances": 3},
        r"must divide the data x context parallel size, which is the ranks / \(tensor_model_parallel_size \* "
        r"pipeline_model_parallel_size\), got 3 and 16 / \(2 \* 1\) = 8; change",
    ),
    "instances that do not divide the experts' ranks": (
        {"ep": 8, "instances": 4},
        r"must divide the expert data parallel size, which is the ranks / \(expert_tensor_parallel_size \* "
        r"expert_model_parallel_size \* pipeline_model_parallel_size\), got 4 and 16 / \(1 \* 8 \* 1\) = 2; change",
    ),
    "stages of dense and expert layers apart": (
        {"tp": 2, "pp": 2, "ep": 2, "order": "tp-cp-ep-pp-dp"},
        r"same ranks.*2 \(tp\) ranks before pp for dense layers and 2 \(tp\) \* 2 \(ep\) = 4 for expert layers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_degrees_that_do_not_fit_are_refused_with_the_arithmetic(name: str) -> None:
    degrees, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        grid(**{"world_size": 16, **degrees})


def test_axes_of_one_rank_may_be_left_out_of_the_order() -> None:
    for short, whole in (("tp-ep-dp-pp", "tp-cp-ep-dp-pp"), ("TP-PP-DP", "tp-cp-ep-pp-dp")):
        left_out, named = (grid(16, tp=2, pp=4, order=order) for order in (short, whole))
        for name in GROUP_NAMES:
            assert left_out.groups(name).tolist() == named.groups(name).tolist(), (short, name)


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a group must be one of tp, cp, .*, got 'dpcp'"):
        grid(2).groups("dpcp")
