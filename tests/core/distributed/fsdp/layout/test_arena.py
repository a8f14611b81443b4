"""Arena plans: what is alive together never shares an address, and the arena is near what is alive at once."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.distributed.fsdp.layout.arena import ArenaPlan, LiveRange, peak_live_nbytes, plan_arena


def check(plan: ArenaPlan, nbytes: list[int], ranges: list[LiveRange], alignment: int) -> None:
    """What every plan promises, by comparing all pairs."""
    spans = [(offset, offset + size) for offset, size in zip(plan.offsets, nbytes, strict=True)]
    assert all(begin % alignment == 0 and begin >= 0 and end <= plan.nbytes for begin, end in spans)
    for i, (begin, end) in enumerate(spans):
        mine = [live for live in ranges if live.owner == i]
        for j, (other_begin, other_end) in enumerate(spans):
            if i == j:
                continue
            intersect = max(begin, other_begin) < min(end, other_end)
            assert not intersect or j in plan.overlapping[i]
            together = any(max(a.begin, b.begin) < min(a.end, b.end) for a in mine for b in ranges if b.owner == j)
            assert not (together and intersect), f"owners {i} and {j} are alive together and share addresses"
            assert not (together and j in plan.overlapping[i])


def _forward_and_backward(num_units: int, life: int = 2) -> list[LiveRange]:
    """Unit i is gathered one tick before it runs, in forward and, in reverse order, in backward."""
    forward = [LiveRange(unit, unit, unit + life) for unit in range(num_units)]
    turn = num_units + life
    backward = [LiveRange(unit, turn + num_units - unit, turn + num_units - unit + life) for unit in range(num_units)]
    return forward + backward


@pytest.mark.parametrize("num_units", [1, 2, 3, 10, 61])
def test_equal_units_prefetched_by_one_take_two_slots(num_units: int) -> None:
    ranges = [LiveRange(unit, unit, unit + 2) for unit in range(num_units)]
    plan = plan_arena([1024] * num_units, ranges)
    assert plan.nbytes == 1024 * min(2, num_units)
    assert plan.offsets == tuple(1024 * (unit % 2) for unit in range(num_units))


def test_forward_and_backward_share_one_offset_in_two_slots() -> None:
    plan = plan_arena([1000] * 32, _forward_and_backward(32), alignment=512)
    assert plan.nbytes == 2 * 1024
    check(plan, [1000] * 32, _forward_and_backward(32), 512)


def test_prefetch_by_three_takes_four_slots() -> None:
    assert plan_arena([512] * 20, _forward_and_backward(20, life=4)).nbytes == 4 * 512


def test_overlapping_names_those_who_share_addresses() -> None:
    plan = plan_arena([512] * 5, [LiveRange(unit, unit, unit + 2) for unit in range(5)])
    assert plan.overlapping == ((2, 4), (3,), (0, 4), (1,), (0, 2))


def test_a_large_embedding_and_head_cost_no_more_than_what_is_alive_at_once() -> None:
    """Embedding, 12 layers, head: the least arena is the largest neighbouring pair."""
    nbytes = [50_000, *[7_000] * 12, 60_000]
    ranges = _forward_and_backward(14)
    plan = plan_arena(nbytes, ranges)
    check(plan, nbytes, ranges, 512)
    assert plan.nbytes == peak_live_nbytes(nbytes, ranges)


def test_alternating_dense_and_expert_units_are_near_the_bound() -> None:
    nbytes = [9_000, *[20_000, 3_000, 90_000] * 8, 50_000]
    ranges = _forward_and_backward(len(nbytes), life=3)
    plan = plan_arena(nbytes, ranges)
    check(plan, nbytes, ranges, 512)
    assert plan.nbytes <= 1.05 * peak_live_nbytes(nbytes, ranges)


def test_a_unit_alive_for_the_whole_step_shares_with_no_one() -> None:
    ranges = [*_forward_and_backward(6), LiveRange(6, 0, 100)]
    plan = plan_arena([512] * 7, ranges)
    assert plan.overlapping[6] == ()
    assert plan.nbytes == 3 * 512


def test_ranges_that_touch_may_share() -> None:
    assert plan_arena([512, 512], [LiveRange(0, 0, 3), LiveRange(1, 3, 5)]).nbytes == 512


def test_overlapping_ranges_of_one_owner_count_once() -> None:
    ranges = [LiveRange(0, 0, 5), LiveRange(0, 2, 8), LiveRange(1, 6, 7)]
    assert peak_live_nbytes([512, 512], ranges) == 1024
    assert plan_arena([512, 512], ranges).overlapping == ((), ())


def test_owners_without_bytes_or_ranges() -> None:
    plan = plan_arena([0, 700, 300], [LiveRange(0, 0, 9), LiveRange(1, 0, 9)], alignment=256)
    assert (plan.nbytes, plan.offsets, plan.overlapping) == (768, (0, 0, 0), ((), (2,), (1,)))


def test_no_owners() -> None:
    assert plan_arena([], []) == ArenaPlan((), 0, ())


@pytest.mark.parametrize(
    ("nbytes", "ranges", "alignment", "message"),
    [
        ([1], [LiveRange(1, 0, 1)], 512, r"owners below 1, got \[1\]"),
        ([-1], [], 512, "sizes 0 or more"),
        ([1], [], 0, "alignment must be positive"),
    ],
)
def test_impossible_requests_are_refused(
    nbytes: list[int], ranges: list[LiveRange], alignment: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan_arena(nbytes, ranges, alignment=alignment)


@pytest.mark.parametrize(("owner", "begin", "end"), [(0, 3, 3), (0, 4, 3), (-1, 0, 1)])
def test_empty_live_ranges_are_refused(owner: int, begin: int, end: int) -> None:
    with pytest.raises(ValueError, match="begin < end"):
        LiveRange(owner, begin, end)


def test_a_large_model_is_planned_fast() -> None:
    """500 units in well below a second: the plan is made in the first iteration."""
    nbytes = [512 * (1 + unit * 7 % 13) for unit in range(500)]
    begin = time.process_time()
    plan_arena(nbytes, _forward_and_backward(500, life=4))
    assert time.process_time() - begin < 1.0


_RANGES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(1, 10)), max_size=25)


@given(st.lists(st.integers(0, 2000), min_size=10, max_size=10), _RANGES, st.sampled_from([1, 16, 512]))
@settings(max_examples=300, deadline=None)
def test_every_plan_keeps_owners_apart(nbytes: list[int], lives: list[tuple[int, int, int]], alignment: int) -> None:
    ranges = [LiveRange(owner, begin, begin + length) for owner, begin, length in lives]
    plan = plan_arena(nbytes, ranges, alignment=alignment)
    check(plan, nbytes, ranges, alignment)
    sizes = [-(-size // alignment) * alignment for size in nbytes]
    assert peak_live_nbytes(nbytes, ranges, alignment=alignment) <= plan.nbytes <= sum(sizes)
    assert plan == plan_arena(nbytes, ranges, alignment=alignment)


@given(st.lists(st.integers(1, 100), min_size=2, max_size=30), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_prefetching_units_of_any_size_stays_near_the_bound(nbytes: list[int], life: int) -> None:
    """The shape that FSDP makes: units alive for a few ticks, in order, forward and backward."""
    ranges = _forward_and_backward(len(nbytes), life)
    plan = plan_arena(nbytes, ranges, alignment=1)
    check(plan, nbytes, ranges, 1)
    assert plan.nbytes <= 1.5 * peak_live_nbytes(nbytes, ranges, alignment=1)
