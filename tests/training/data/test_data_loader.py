"""Batches have the sampler's order, from loader processes too, and loading them draws no random numbers."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from megatron.training.data.batches import BatchConfig, SequentialBatchSampler
from megatron.training.data.data_loader import iterate_batches
from megatron.training.launch.samples import draw

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


@pytest.mark.parametrize(("name", "bad"), [("tokens", 8), ("tokens", -1), ("labels", 9)])
def test_an_id_that_the_model_has_not_is_named_with_its_sample(name: str, bad: int) -> None:
    """A model on CUDA would end with an assertion of a kernel, some steps later."""
    rows = torch.arange(48).view(12, 4) % 8
    samples = [{"tokens": row, "labels": row.clone()} for row in rows]
    samples[6]["labels"][0] = samples[9]["labels"][0] = -100  # do not count
    setup: Any = SimpleNamespace(
        settings=SimpleNamespace(
            data=SimpleNamespace(order="single", num_workers=0),
            model=SimpleNamespace(padded_vocab_size=lambda size: size + 2),
        ),
        model=SimpleNamespace(pg_collection=SimpleNamespace(dp=None, cp=None)),
        vocab_size=6,
        device=torch.device("cpu"),
    )
    assert len(list(draw(setup, samples, _BATCH, 0))) == 3
    samples[9][name][2] = bad
    expected = f"from 0 to 7, .* got {bad} at position 2 of the {name} of sample 9"
    with pytest.raises(ValueError, match=expected):
        list(draw(setup, samples, _BATCH, 0))
