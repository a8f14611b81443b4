"""Rows in the order of experts: where each assignment stands, and that spread and collect are each other's adjoint."""

from __future__ import annotations

import pytest
import torch

from megatron.core.transformer.moe.permutation import (
    ExpertOrder,
    RowMap,
    expert_order,
    expert_order_up_to,
    with_copies,
)

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
    assert order.of_tokens(2).sources.tolist() == [0, 2, 3, 1, 0, 1, 2, 3]
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
    """[r, n] that spread multiplies with."""
    matrix = torch.zeros(rows.sources.shape[0], rows.places.shape[0] + 1, dtype=torch.float64)
    matrix[torch.arange(matrix.shape[0]), rows.sources] = 1.0
    return matrix[:, :-1]


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("of_tokens", [False, True])
def test_spread_and_collect_are_a_matrix_and_its_transpose(name: str, of_tokens: bool) -> None:
    rows = ORDERS[name].of_tokens(2) if of_tokens else ORDERS[name].assignments
    matrix = _matrix(rows)
    x = torch.randn(matrix.shape[1], 5, dtype=torch.float64, requires_grad=True)
    y = torch.randn(matrix.shape[0], 5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(rows.spread(x), matrix @ x)
    torch.testing.assert_close(rows.collect(y), matrix.t() @ y)
    assert torch.autograd.gradcheck(rows.spread, x)
    assert torch.autograd.gradcheck(rows.collect, y)
