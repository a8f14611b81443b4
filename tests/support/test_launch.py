"""The launcher itself: results in rank order, failures with their traceback."""

import pytest
import torch
import torch.distributed as dist

from tests.support.launch import run_ranks


def _sum_of_ranks() -> float:
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return value.item() + 10 * dist.get_rank()


def _fail_on_rank_one() -> None:
    dist.barrier()  # or the other rank may still be connecting, and say that instead
    if dist.get_rank() == 1:
        raise ValueError("rank one is unhappy")


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(2, _sum_of_ranks) == [3.0, 13.0]


def test_a_failing_rank_ends_the_run_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match="rank one is unhappy"):
        run_ranks(2, _fail_on_rank_one)
