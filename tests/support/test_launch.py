"""The launcher itself: results in rank order, failures with their traceback."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.launch import run_ranks


def _sum_of_ranks() -> float:
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return value.item() + 10 * dist.get_rank()


def _late_rank_one() -> bool:
    """Have rank 1 end its work when rank 0, whose work is done, would long have left."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("pid", str(os.getpid()))
        return True
    process = Path(f"/proc/{int(store.get('pid'))}/stat")
    time.sleep(0.3)
    return process.exists() and process.read_text().rpartition(")")[2].split()[0] != "Z"


def _fail_on_rank_one() -> None:
    dist.barrier()  # or the other rank may still be connecting, and say that instead
    if dist.get_rank() == 1:
        raise ValueError("rank one is unhappy")


def test_results_come_back_in_rank_order() -> None:
    assert run_ranks(2, _sum_of_ranks) == [3.0, 13.0]


def test_no_rank_leaves_before_all_are_done() -> None:
    assert run_ranks(2, _late_rank_one) == [True, True]


def test_a_failing_rank_ends_the_run_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match="rank one is unhappy"):
        run_ranks(2, _fail_on_rank_one)
