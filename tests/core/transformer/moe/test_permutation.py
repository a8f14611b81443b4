"""Permutation into expert order: the place of each assignment, and that take and sum are each other's adjoint."""

from __future__ import annotations

import pytest
import torch

from megatron.core.transformer.moe.bounded_rows import rank_capacity
from megatron.core.transformer.moe.permutation import (
    ExpertOrder,
    RowMap,
    arrivals,
    expert_order,
    expert_order_up_to,
    with_copies,
)
from megatron.core.transformer.transformer_config import TransformerConfig

EXPERTS = torch.tensor([[2, 0], [2, 1], [2, 0], [0, 2]])
PROBS = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.5, 0.5], [0.3, 0.7]])


def _keeps(policy: str, *, pads: bool) -> ExpertOrder:
    return expert_order_up_to(2, EXPERTS, 4, probs=PROBS if policy == "probs" else None, pads=pads)


ORDERS = {
    "all": expert_order(EXPERTS, 4),
    "copies": with_copies(expert_order(EXPERTS, 4), 3, 2),
    "dropped": _keeps("probs", pads=False),
    "padded": _keeps("position", pads=True),
    "dropped_copies": with_copies(_keeps("position", pads=False), 2, 4),
    "padded_copies": with_copies(_keeps("probs", pads=True), 2, 2),
}


def test_assignments_are_sorted_by_expert_and_by_token_within() -> None:
    order = ORDERS["all"]
    assert order.counts.tolist() == [3, 1, 4, 0]
    assert order.assignments.sources.tolist() == [1, 5, 6, 3, 0, 2, 4, 7]
    assert order.tokens.sources.tolist() == [0, 2, 3, 1, 0, 1, 2, 3]
    assert order.assignments.places.flatten().tolist() == [4, 0, 5, 3, 6, 1, 2, 7]


def test_the_most_probable_assignments_are_kept() -> None:
    order = _keeps("probs", pads=False)
    assert order.counts.tolist() == [2, 1, 2, 0]
    assert order.assignments.sources.tolist() == [5, 1, 3, 2, 7]  # 0.5 and 0.4; 0.1; 0.9 and 0.7


def test_the_first_assignments_are_kept() -> None:
    order = _keeps("position", pads=False)
    assert order.assignments.sources.tolist() == [1, 5, 3, 0, 2]


def test_padded_experts_have_as_many_rows_each() -> None:
    """8 is the number of assignments: a row without source."""
    order = _keeps("position", pads=True)
    assert (order.counts.tolist(), order.rows_of_each) == ([2, 2, 2, 2], 2)
    assert order.assignments.sources.tolist() == [1, 5, 3, 8, 0, 2, 8, 8]
    assert order.assignments.places.flatten().tolist() == [4, 0, 5, 2, 8, 1, 8, 8]


def test_copies_of_an_owners_rows_are_blocks() -> None:
    """Owner 0 has experts 0 and 1, owner 1 the others; each block stands three times."""
    sources = ORDERS["all"].assignments.sources.tolist()
    assert ORDERS["copies"].assignments.sources.tolist() == sources[:4] * 3 + sources[4:] * 3


def _matrix(rows: RowMap) -> torch.Tensor:
    """Return the matrix [r, n] of ``take``."""
    matrix = torch.zeros(rows.sources.shape[0], rows.places.shape[0] + 1, dtype=torch.float64)
    matrix[torch.arange(matrix.shape[0]), rows.sources] = 1.0
    return matrix[:, :-1]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("of", ["tokens", "assignments"])
def test_take_and_sum_are_a_matrix_and_its_transpose(name: str, of: str) -> None:
    rows = getattr(ORDERS[name], of)
    matrix = _matrix(rows)
    for shape in ((), (5,)):  # factors and hidden states
        x = torch.randn(matrix.shape[1], *shape, dtype=torch.float64)
        y = torch.randn(matrix.shape[0], *shape, dtype=torch.float64)
        torch.testing.assert_close(rows.take(x), matrix @ x)
        torch.testing.assert_close(rows.sum(y), matrix.t() @ y)


SIZES = [[[3, 0, 1], [2, 5, 0]], [[0, 0], [0, 4], [0, 1]], [[2], [3]], [[0, 0, 0, 0]], [[1, 2, 3]]]
"""[g, l] rows: some without any, one expert alone, nothing at all, one rank alone."""


@pytest.mark.parametrize("sizes", SIZES)
def test_rows_that_arrive_rank_by_rank_are_put_expert_by_expert(sizes: list[list[int]]) -> None:
    """In the order of a stable sort by expert."""
    num_experts = len(sizes[0])
    experts = torch.arange(num_experts).repeat(len(sizes)).repeat_interleave(torch.tensor(sizes).flatten())
    rows, counts, ends = arrivals(torch.tensor(sizes), sizes)
    assert counts.tolist() == torch.bincount(experts, minlength=num_experts).tolist()
    assert ends is None
    if rows is None:
        assert num_experts == 1
    else:
        assert rows.sources.tolist() == experts.sort(stable=True)[1].tolist()
        assert rows.places.flatten().tolist() == rows.sources.argsort().tolist()


@pytest.mark.parametrize(
    ("factor", "owners", "capacity"),
    [(1.0, 4, 3), (1.3, 4, 4), (4.0, 4, 10), (9.0, 4, 10), (2.0, 1, None), (None, 4, None)],
)
def test_a_rank_takes_its_share_times_the_factor_of_each_rank(
    factor: float | None, owners: int, capacity: int | None
) -> None:
    """Rounded up: with as many times the share as there are owners nothing is dropped. Of ten assignments."""
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, num_moe_experts=4, moe_expert_rank_capacity_factor=factor
    )
    assert rank_capacity(10, owners, config) == capacity
