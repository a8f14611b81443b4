"""Work that is replayed, on a GPU."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from megatron.core.distributed.fsdp.matrices.replayed_work import ReplayedWork, capture_site

pytestmark = pytest.mark.gpu


def _leave_garbage() -> None:
    """Leave a circle of objects that holds a graph, as a model with its optimizer does when it is gone."""
    site = capture_site(torch.device("cuda"))
    x = torch.zeros(4, device="cuda")

    def add() -> None:
        x.add_(1.0)

    work = ReplayedWork(add, site)
    for _ in range(2):
        work()
    circle: list[Any] = [work]
    circle.append(circle)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_garbage_of_another_model_does_not_break_a_capture() -> None:
    site = capture_site(torch.device("cuda"))
    x = torch.zeros(4, device="cuda")
    kept: list[list[object]] = []

    def add() -> None:
        kept.extend([object()] for _ in range(2000))  # enough for several collections
        x.add_(1.0)

    work = ReplayedWork(add, site)
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(100, 1, 1)
    try:
        work()
        gc.disable()
        _leave_garbage()
        gc.enable()
        for _ in range(3):
            work()
    finally:
        gc.set_threshold(*before)
    assert x.tolist() == [4.0] * 4
    assert gc.isenabled()
