"""The Triton kernels agree with the torch operations: in Triton's interpreter, and on a device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.core.transformer.moe import permutation
from megatron.core.transformer.moe.bounded_rows import bounded_arrivals, bounded_order
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


def _bounded_results(device: str) -> list[ExpertOrder | Arrivals]:
    """With capacities that drop some assignments, and none."""
    orders: list[ExpertOrder | Arrivals] = []
    for (num_tokens, topk, num_experts), num_owners in itertools.product(ROUTINGS, (1, 2, 4, 5)):
        if num_experts % num_owners == 0:
            experts = _experts(num_tokens, topk, num_experts).to(device)
            for copies, capacity in ((1, num_tokens * topk), (2, num_tokens * topk // num_owners + 1)):
                orders.append(
                    bounded_order(experts, num_experts, num_owners=num_owners, num_copies=copies, capacity=capacity)
                )
    for sizes in SIZES:
        most = max(map(sum, sizes))
        orders += [bounded_arrivals(torch.tensor(sizes, device=device), capacity) for capacity in (most, most + 1100)]
    return orders


def _assert_same(ours: Any, theirs: Any) -> None:
    for rows in ("assignments", "tokens", "rows"):
        mine, other = getattr(ours, rows, None), getattr(theirs, rows, None)
        assert (mine is None) == (other is None)
        if isinstance(mine, RowMap) and isinstance(other, RowMap):
            assert torch.equal(mine.sources.cpu(), other.sources) and torch.equal(mine.places.cpu(), other.places)
    assert torch.equal(ours.counts.cpu(), theirs.counts)
    if ours.ends is not None:
        assert ours.ends.dtype is torch.int32 and ours.ends.tolist() == theirs.counts.cumsum(0).tolist()


def _without_kernels(results: Callable[[str], list[ExpertOrder | Arrivals]]) -> list[ExpertOrder | Arrivals]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "_kernels", lambda: None)
        return results("cpu")


def _compare(device: str = "cpu") -> None:
    """Compare, on a device twice: the second call runs the compiled kernel."""
    expected = _without_kernels(_results)
    assert all(result.ends is None for result in expected)
    for _ in range(1 if device == "cpu" else 2):
        for ours, theirs in zip(_results(device), expected, strict=True):
            _assert_same(ours, theirs)
        for ours, theirs in zip(_bounded_results(device), _without_kernels(_bounded_results), strict=True):
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
        gaps = torch.tensor([3, y.shape[0], 0, 3, y.shape[0]])
        for x in (y, y[:, 0].contiguous()):
            taken = RowMap(sources=gaps.to(device), places=gaps, has_gaps=True).take(x.to(device)).cpu()
            assert torch.equal(taken[[0, 2, 3]], x[[3, 0, 3]]) and not taken[[1, 4]].any()
            none = RowMap(sources=torch.zeros(2, dtype=torch.int64, device=device), places=gaps, has_gaps=True).take(
                x[:0].to(device)
            )
            assert none.shape == (2, *x.shape[1:]) and not none.any()
    return sums


def _compare_sums(device: str = "cpu") -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "_kernels", lambda: None)
        expected = _sums("cpu")
    for ours, theirs in zip(_sums(device), expected, strict=True):
        # The interpreter cuts bf16 off where devices round, so a neighbour is right.
        rtol, atol = (2.0**-7, 0.0) if ours.dtype == DTYPES[2] else (None, None)  # None: torch's own
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def _compare_copies(device: str = "cpu") -> None:
    """Rows narrower and wider than a program's columns; with dropped assignments rows are gathered instead."""
    experts = _experts(12, 3, 5)
    for order in (expert_order(experts, 5), expert_order_up_to(2, experts, 5, probs=None, pads=False)):
        rows, there = order.tokens, order.tokens.sources < 12
        placed = RowMap(sources=rows.sources.to(device), places=rows.places.to(device), has_gaps=rows.has_gaps)
        for width, dtype in itertools.product((24, 1031), DTYPES):
            x = torch.randn(12, width, dtype=torch.float64).to(dtype)
            taken = placed.take(x.to(device)).cpu()
            assert taken.dtype is dtype and torch.equal(taken[there], x[rows.sources[there]])
    assert placed.take(x[:0].to(device)).shape == (placed.sources.shape[0], width)


def check_interpreted() -> None:
    _compare()
    _compare_sums()
    _compare_copies()


@pytest.mark.gpu(1)
def test_kernels_on_a_device_agree_with_torch() -> None:
    _compare("cuda")
    _compare_sums("cuda")
    _compare_copies("cuda")
