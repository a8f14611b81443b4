"""A delayed read returns the values at the time when it was requested."""

from __future__ import annotations

import pytest
import torch

from megatron.core.delayed_read import DelayedRead


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_later_writes_are_not_seen(device: str) -> None:
    tensor = torch.tensor([[1.0, 2.5], [float("inf"), 0.0]], dtype=torch.float64, device=device)
    read = DelayedRead(tensor)
    tensor.zero_()
    assert read.values() == [1.0, 2.5, float("inf"), 0.0]


@pytest.mark.gpu
def test_asking_does_not_wait_for_the_device() -> None:
    values = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # of the order of a second
    read = DelayedRead(values)
    assert read._done is not None and not read._done.query()
    assert read.values() == [1.0] * 8
