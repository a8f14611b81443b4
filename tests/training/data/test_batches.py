"""A global batch holds the same samples in the same order whatever the number of ranks."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from megatron.training.data.batches import BatchConfig, CyclicBatchSampler, SequentialBatchSampler
from megatron.training.loop.dropout_seed import microbatch_seed


def _samples_of_steps(ranks: int, *, consumed: int = 0, micro: int = 2, total: int = 40) -> list[list[int]]:
    """The samples of each step, in the order of microbatches and ranks."""
    batch = BatchConfig(micro_batch_size=micro, global_batch_size=8, data_parallel_size=ranks)
    by_rank = [
        list(SequentialBatchSampler(batch, rank=rank, total_samples=total, consumed_samples=consumed))
        for rank in range(ranks)
    ]
    order = [sample for taken in zip(*by_rank, strict=True) for samples in taken for sample in samples]
    return [order[start : start + 8] for start in range(0, len(order), 8)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_steps_take_consecutive_samples(ranks: int) -> None:
    assert _samples_of_steps(ranks) == [list(range(start, start + 8)) for start in range(0, 40, 8)]


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_resume_goes_on_where_it_was(ranks: int) -> None:
    assert _samples_of_steps(ranks, consumed=24) == _samples_of_steps(1)[3:]


def test_an_incomplete_microbatch_is_left_out() -> None:
    batch = BatchConfig(micro_batch_size=2, global_batch_size=4, data_parallel_size=2)
    sampler = SequentialBatchSampler(batch, rank=1, total_samples=7)
    assert list(sampler) == [[2, 3]]
    assert len(sampler) == 1
    assert len(SequentialBatchSampler(batch, rank=0, total_samples=4, consumed_samples=8)) == 0


@pytest.mark.parametrize("shards_data", [True, False])
def test_epochs_have_a_random_order_each(shards_data: bool) -> None:
    """Every sample once, but for an incomplete microbatch; a resume goes on in its epoch."""
    batch = BatchConfig(micro_batch_size=2, global_batch_size=8, data_parallel_size=2)

    def drawn(rank: int, consumed: int, count: int) -> list[list[int]]:
        given: Any = {"rank": rank, "total_samples": 14, "consumed_samples": consumed, "shards_data": shards_data}
        return list(islice(CyclicBatchSampler(batch, **given), count))

    of_ranks = [drawn(rank, 0, 6) for rank in range(2)]
    for epoch in (slice(0, 3), slice(3, 6)):
        taken = [sample for batches in of_ranks for samples in batches[epoch] for sample in samples]
        assert len(set(taken)) == 12 and set(taken) <= set(range(14)) and taken != sorted(taken)
    assert of_ranks[0][:3] != of_ranks[0][3:]
    assert [drawn(rank, 16, 2) for rank in range(2)] == [batches[4:] for batches in of_ranks]
    # Megatron-LM's orders: torch's permutations with the number of the epoch as seed.
    generator = torch.Generator().manual_seed(1)
    if shards_data:
        assert [sample for samples in of_ranks[1][3:] for sample in samples] == [
            6 + index for index in torch.randperm(6, generator=generator).tolist()
        ]
    else:
        assert [sample for samples in of_ranks[1][3:] for sample in samples] == torch.randperm(
            14, generator=generator
        ).tolist()[1:12:2]
    for total, consumed in ((3, 0), (14, 2)):
        with pytest.raises(ValueError, match=f"got {total} and {consumed}"):
            CyclicBatchSampler(batch, rank=0, total_samples=total, consumed_samples=consumed)


@pytest.mark.parametrize("sizes", [(2, 6, 2), (0, 6, 2), (2, 0, 1)])
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"(must be a multiple|must be at least 1)"):
        BatchConfig(micro_batch_size=sizes[0], global_batch_size=sizes[1], data_parallel_size=sizes[2])


def test_seeds_of_dropout_differ_and_do_not_depend_on_the_process() -> None:
    seeds = {microbatch_seed(s, i, m) for s in range(3) for i in range(5) for m in range(7)}
    assert len(seeds) == 3 * 5 * 7
    assert microbatch_seed(1234, 0, 0) == 7511662402349365976


SCHEDULED = BatchConfig(
    micro_batch_size=1, global_batch_size=8, data_parallel_size=2, schedule=((0, 2), (5, 4), (14, 8))
)


def test_a_scheduled_size_holds_from_its_sample_on() -> None:
    assert [SCHEDULED.at(consumed).global_batch_size for consumed in (0, 4, 5, 6, 13, 14, 99)] == [2, 2, 4, 4, 4, 8, 8]
    assert SCHEDULED.at(6).num_microbatches == 2 and SCHEDULED.at(6).schedule == ()


def test_iterations_and_samples_of_a_schedule_are_those_of_taking_one_batch_after_the_other() -> None:
    consumed = [0]
    for _ in range(12):
        consumed.append(consumed[-1] + SCHEDULED.at(consumed[-1]).global_batch_size)
    for start in (0, 2, 5):
        for end in range(start, 12):
            assert SCHEDULED.consumed_after(end - start, consumed[start]) == consumed[end]
    for samples in range(70):
        expected = max(number for number, taken in enumerate(consumed) if taken <= samples)
        assert SCHEDULED.iterations_until(samples) == expected
    constant = BatchConfig(micro_batch_size=1, global_batch_size=8, data_parallel_size=2)
    assert (constant.consumed_after(3, 8), constant.iterations_until(31, 8)) == (32, 2)


@pytest.mark.parametrize(
    "schedule", [((1, 8),), ((0, 4), (0, 8)), ((0, 4), (9, 4)), ((0, 3), (9, 8)), ((0, 0), (9, 8))]
)
def test_schedules_that_cannot_be_are_refused(schedule: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match=r"(must begin at 0|must be a multiple)"):
        BatchConfig(micro_batch_size=1, global_batch_size=8, data_parallel_size=2, schedule=schedule)
