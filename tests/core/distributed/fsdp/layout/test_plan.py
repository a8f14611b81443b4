"""From a record of uses to a plan: what is prefetched, what stays unsharded, and which buffers share addresses. Pure."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.distributed.fsdp.layout.plan import Plan, Recorder, Use

# The root is unit 0; blocks follow. Each unit has one group of its own number.
NBYTES = 512


def _chain(num_blocks: int, *, with_backward: bool = True) -> Recorder:
    """What a context records of a step of a root with a chain of blocks, without gathers ahead."""
    recorder = Recorder()
    _use(recorder, 0, backward=False)
    for block in range(1, num_blocks + 1):
        _use(recorder, block, backward=False)
        recorder.end("weights", block)
    recorder.end("weights", 0)
    if with_backward:
        _use(recorder, 0, backward=True)
        for block in range(num_blocks, 0, -1):
            _use(recorder, block, backward=True)
            recorder.end("weights", block)
            recorder.begin("inputs", block)
            recorder.end("inputs", block)
        recorder.begin("inputs", 0)
        recorder.end("inputs", 0)
        recorder.end("weights", 0)
    return recorder


def _use(recorder: Recorder, unit: int, *, backward: bool) -> None:
    recorder.use(unit, backward=backward)
    recorder.begin("weights", unit)


def _plan(recorder: Recorder, num_units: int, *, ahead_nbytes: int = 0, sizes: dict[int, int] | None = None) -> Plan:
    nbytes = sizes or dict.fromkeys(range(num_units), NBYTES)
    return recorder.plan(
        weight_nbytes=nbytes,
        input_nbytes=nbytes,
        groups_of={unit: [unit] for unit in range(num_units)},
        ahead_nbytes=ahead_nbytes,
    )


def test_each_use_gathers_the_next_one_ahead() -> None:
    plan = _plan(_chain(3), 4)
    assert plan.uses == (
        *(Use(unit, False) for unit in (0, 1, 2, 3)),
        *(Use(unit, True) for unit in (0, 3, 2, 1)),
    )
    assert plan.ahead == (*((use,) for use in plan.uses[1:]), ())


def test_weights_stay_where_forward_turns_into_backward() -> None:
    plan = _plan(_chain(3), 4)
    assert plan.turns == (False, False, False, True, False, False, False, False)


def test_nothing_stays_for_a_unit_that_has_no_backward() -> None:
    """A teacher under no_grad that runs last in forward: its weights are not needed again."""
    recorder = _chain(2, with_backward=False)
    _use(recorder, 3, backward=False)
    recorder.end("weights", 3)
    _use(recorder, 2, backward=True)
    recorder.end("weights", 2)
    assert not any(_plan(recorder, 4).turns)


def test_forward_alone_keeps_nothing() -> None:
    plan = _plan(_chain(3, with_backward=False), 4)
    assert not any(plan.turns) and not plan.inputs.pools and plan.inputs.nbytes == 0


def test_pools_have_arenas_of_their_own() -> None:
    """Groups of different pools share no addresses, and each pool is laid out as if the other were not there."""
    num_blocks, nbytes = 6, dict.fromkeys(range(7), NBYTES)
    pool_of = {unit: unit % 2 for unit in nbytes}
    plan = _chain(num_blocks).plan(
        weight_nbytes=nbytes, input_nbytes=nbytes, groups_of={unit: [unit] for unit in nbytes}, pool_of=pool_of
    )
    for ranges in (plan.weights, plan.inputs):
        assert [pool.groups for pool in ranges.pools] == [(0, 2, 4, 6), (1, 3, 5)]
        assert ranges.nbytes == sum(pool.nbytes for pool in ranges.pools)
        for unit in nbytes:
            pool = ranges.pools[pool_of[unit]]
            assert {pool_of[other] for other in ranges.overlapping[unit]} <= {pool_of[unit]}
            assert 0 <= ranges.offsets[unit] <= pool.nbytes - NBYTES
    # Every second block alone: one range does, besides the root's.
    assert [pool.nbytes for pool in plan.inputs.pools] == [2 * NBYTES, NBYTES]


def test_a_chain_shares_two_ranges_besides_the_roots() -> None:
    """One unit computes while the next one is gathered, or the last one is reduced, however long the chain is."""
    for num_blocks in (2, 3, 8):
        plan = _plan(_chain(num_blocks), num_blocks + 1)
        assert plan.weights.nbytes == plan.inputs.nbytes == 3 * NBYTES
        assert plan.weights.overlapping[0] == ()
        for block in range(1, num_blocks):
            assert block + 1 not in plan.weights.overlapping[block]
            assert plan.weights.offsets[block] != plan.weights.offsets[block + 1]
            assert block + 1 not in plan.inputs.overlapping[block]


def test_gathers_reach_as_far_ahead_as_asked() -> None:
    """At least so many bytes are on their way after each use; the arena grows by them."""
    plan = _plan(_chain(6), 7, ahead_nbytes=2 * NBYTES)
    assert plan.ahead[0] == plan.uses[1:3]
    assert all(len(ahead) == 1 for ahead in plan.ahead[1:-2])
    assert plan.ahead[-2:] == ((), ())
    assert plan.weights.nbytes == 4 * NBYTES
    all_ahead = [use for ahead in plan.ahead for use in ahead]
    assert all_ahead == list(plan.uses[1:]), "each use is gathered ahead once"


def _plan_of_depth(num_blocks: int, depth: tuple[int, int], *, ahead_nbytes: int = 0) -> Plan:
    nbytes = dict.fromkeys(range(num_blocks + 1), NBYTES)
    return _chain(num_blocks).plan(
        weight_nbytes=nbytes,
        input_nbytes=nbytes,
        groups_of={unit: [unit] for unit in nbytes},
        prefetch_depth_of=dict.fromkeys(nbytes, depth),
        ahead_nbytes=ahead_nbytes,
    )


def test_prefetch_depth_counts_units_in_each_direction() -> None:
    """Forward three units ahead, backward one; where forward turns, what forward has fetched is not fetched again."""
    plan = _plan_of_depth(6, (3, 1))
    assert plan.ahead[0] == plan.uses[1:4]
    first_backward = next(at for at, use in enumerate(plan.uses) if use.backward)
    assert all(len(ahead) == 1 for ahead in plan.ahead[1 : first_backward - 1])
    assert [use for ahead in plan.ahead for use in ahead] == list(plan.uses[1:]), "each use is gathered ahead once"
    assert plan.weights.nbytes > _plan_of_depth(6, (1, 1)).weights.nbytes
    assert _plan_of_depth(6, (1, 1)) == _plan(_chain(6), 7)


def test_a_prefetch_depth_of_zero_gathers_on_demand() -> None:
    plan = _plan_of_depth(6, (0, 0), ahead_nbytes=2 * NBYTES)
    assert not any(plan.ahead)
    backward = _plan_of_depth(6, (1, 0))
    assert all(not ahead for use, ahead in zip(backward.uses, backward.ahead, strict=True) if use.backward)
    assert any(backward.ahead)


def test_the_horizon_follows_units_that_are_gathered_on_demand() -> None:
    plan = _plan_of_depth(6, (0, 1))
    gathered = [{use, *ahead} for use, ahead in zip(plan.uses, plan.ahead, strict=True)]
    reached = [max(plan.uses.index(use) for use in by) + 1 for by in gathered]
    assert plan.horizons == tuple(max(reached[: at + 1]) for at in range(len(reached)))
    assert plan.horizons[1] == 2, "nothing is prefetched in forward"


def test_the_bytes_asked_for_go_beyond_the_depth() -> None:
    assert _plan_of_depth(6, (2, 2), ahead_nbytes=NBYTES) == _plan_of_depth(6, (2, 2))
    assert _plan_of_depth(6, (1, 1), ahead_nbytes=3 * NBYTES) == _plan_of_depth(6, (3, 3))


def test_small_units_count_by_their_bytes() -> None:
    sizes = {0: NBYTES, 1: 4 * NBYTES, 2: NBYTES, 3: NBYTES, 4: 4 * NBYTES}
    recorder = _chain(4, with_backward=False)
    plan = _plan(recorder, 5, ahead_nbytes=2 * NBYTES, sizes=sizes)
    assert plan.ahead[0] == (Use(1, False),)
    assert plan.ahead[1] == (Use(2, False), Use(3, False))
    assert plan.ahead[2] == (Use(4, False),)


def test_units_without_weights_to_gather_have_no_range() -> None:
    """Groups that rest replicated are used, but take no address."""
    recorder = _chain(2)
    plan = recorder.plan(weight_nbytes={1: NBYTES}, input_nbytes={}, groups_of={0: [0], 1: [1], 2: [2]})
    assert list(plan.weights.offsets) == [1] and not plan.inputs.pools


def test_a_group_that_was_never_released_lives_to_the_end() -> None:
    recorder = Recorder()
    for unit in range(3):
        _use(recorder, unit, backward=False)
    plan = _plan(recorder, 3)
    assert plan.weights.nbytes == 3 * NBYTES


def test_a_record_that_grows_without_end_says_so() -> None:
    recorder = Recorder()
    for _ in range(100_000):
        recorder.use(0, backward=False)
    assert not recorder.is_too_long
    recorder.use(0, backward=False)
    assert recorder.is_too_long


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(0, 4))
def test_what_is_needed_together_never_shares_addresses(order: list[int], num_ahead: int) -> None:
    """Whatever the order of blocks: a unit that runs, those gathered ahead of it, and the root have bytes of their own."""
    recorder = Recorder()
    _use(recorder, 0, backward=False)
    for block in order:
        _use(recorder, block, backward=False)
        recorder.end("weights", block)
    for block in reversed(order):
        _use(recorder, block, backward=True)
        recorder.end("weights", block)
    plan = _plan(recorder, 6, ahead_nbytes=num_ahead * NBYTES)
    on_their_way: list[int] = []
    for at, use in enumerate(plan.uses):
        on_their_way = [unit for unit in on_their_way if unit != use.unit] + [ahead.unit for ahead in plan.ahead[at]]
        together = {0, use.unit, *(ahead.unit for ahead in plan.ahead[at])}
        if at and plan.turns[at - 1]:
            together.add(plan.uses[at - 1].unit)
        for unit in together:
            assert not set(plan.weights.overlapping[unit]) & together, (use, together)
