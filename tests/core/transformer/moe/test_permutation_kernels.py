"""The Triton kernels agree with the torch operations: in Triton's interpreter, and on a device."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from megatron.core.transformer.moe import permutation
from megatron.core.transformer.moe.permutation import (
    Arrivals,
    ExpertOrder,
    RowMap,
    arrivals,
    expert_order,
    expert_order_up_to,
)

# (tokens, experts of a token, experts): one program's block and less, several, one assignment alone, idle experts.
ROUTINGS = [(1, 1, 1), (7, 2, 4), (6000, 3, 5), (8192, 1, 2), (33, 4, 20)]
SIZES = [[[3, 0, 1], [2, 5, 0]], [[0, 0], [0, 1500], [0, 1]], [[0, 0, 0, 0]], [[1, 2, 3]], [[1024, 7], [0, 2048]]]


def _experts(num_tokens: int, topk: int, num_experts: int) -> torch.Tensor:
    """Draw different experts [t, k] for each token; the last expert but one gets none, if there are enough."""
    scores = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(num_tokens))
    if num_experts > topk:
        scores[:, -2] = -1.0
    return torch.topk(scores, topk)[1]


def _results(device: str) -> list[ExpertOrder | Arrivals]:
    orders = [expert_order(_experts(*routing).to(device), routing[2]) for routing in ROUTINGS]
    return orders + [arrivals(torch.tensor(sizes, device=device), sizes) for sizes in SIZES]


def _assert_same(ours: Any, theirs: Any) -> None:
    for rows in ("assignments", "tokens", "rows"):
        mine, other = getattr(ours, rows, None), getattr(theirs, rows, None)
        assert (mine is None) == (other is None)
        if isinstance(mine, RowMap) and isinstance(other, RowMap):
            assert torch.equal(mine.sources.cpu(), other.sources) and torch.equal(mine.places.cpu(), other.places)
    assert torch.equal(ours.counts.cpu(), theirs.counts)
    assert ours.ends.dtype is torch.int32 and ours.ends.tolist() == theirs.counts.cumsum(0).tolist()


def _without_kernels() -> list[ExpertOrder | Arrivals]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "_kernels", lambda: None)
        return _results("cpu")


def _compare(device: str = "cpu") -> None:
    """Compare, on a device twice: the second call runs the compiled kernel."""
    expected = _without_kernels()
    assert all(result.ends is None for result in expected)
    for _ in range(1 if device == "cpu" else 2):
        for ours, theirs in zip(_results(device), expected, strict=True):
            _assert_same(ours, theirs)


DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def _sums(device: str) -> list[torch.Tensor]:
    """Sum rows narrower and wider than a program's columns; some tokens lack rows."""
    experts = _experts(12, 3, 5)
    orders = (expert_order(experts, 5), expert_order_up_to(6, experts, 5, probs=None, pads=False))
    maps = [order.tokens for order in orders]
    sums = []
    for rows, width, dtype in itertools.product(maps, (24, 1031), DTYPES):
        generator = torch.Generator().manual_seed(width)
        y = torch.randn(rows.sources.shape[0], width, generator=generator, dtype=torch.float64).to(dtype)
        placed = RowMap(sources=rows.sources, places=rows.places.to(device), has_gaps=rows.has_gaps)
        sums.append(placed.sum(y.to(device)).cpu())
    return sums


def _compare_sums(device: str = "cpu") -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "_kernels", lambda: None)
        expected = _sums("cpu")
    for ours, theirs in zip(_sums(device), expected, strict=True):
        # The interpreter cuts bf16 off where devices round, so a neighbour is right.
        rtol, atol = (2.0**-7, 0.0) if ours.dtype == DTYPES[2] else (None, None)  # None: torch's own
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_interpreted_kernels_agree_with_torch() -> None:
    command = [sys.executable, "-c", f"from {__name__} import _compare, _compare_sums; _compare(); _compare_sums()"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu(1)
def test_kernels_on_a_device_agree_with_torch() -> None:
    _compare("cuda")
    _compare_sums("cuda")
