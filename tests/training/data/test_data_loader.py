"""Batches have the sampler's order, from loader processes too, and loading them draws no random numbers."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from megatron.training.data.batches import BatchConfig, SequentialBatchSampler
from megatron.training.data.data_loader import iterate_batches

_BATCH = BatchConfig(micro_batch_size=2, global_batch_size=4, data_parallel_size=2)


class _Squares(Dataset[dict[str, torch.Tensor]]):
    def __getitem__(self, index: Any) -> dict[str, torch.Tensor]:
        ignored = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
        return {
            "square": torch.tensor(index * index),
            "pid": torch.tensor(os.getpid()),
            "ignored": torch.tensor(ignored),
        }


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_come_in_order_and_random_numbers_stay(num_workers: int) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    sampler = SequentialBatchSampler(_BATCH, rank=1, total_samples=12)
    batches = list(iterate_batches(_Squares(), sampler, num_workers=num_workers, device=torch.device("cpu")))
    assert [batch["square"].tolist() for batch in batches] == [[4, 9], [36, 49], [100, 121]]
    assert torch.equal(torch.get_rng_state(), state)
    if num_workers:
        assert all(os.getpid() not in batch["pid"].tolist() for batch in batches)
        assert all(batch["ignored"].all() for batch in batches)
