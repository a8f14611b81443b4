"""Every cell of the matrix leads to the losses, gradient norms and weights of one process."""

from __future__ import annotations

import pytest

from tests.parity.cells import CELLS, IN_CI, STEPS, Cell
from tests.parity.comparison import differences
from tests.parity.launches import Ran, run_cells, run_references

_RAN: dict[str, Ran] = {}


def _marked(name: str) -> object:
    marks = [pytest.mark.matrix, *([] if name in IN_CI else [pytest.mark.slow])]
    return pytest.param(name, marks=marks, id=name)


def _run_with(cell: Cell, request: pytest.FixtureRequest) -> None:
    """Run the cell, together with all cells of its number of ranks that this run of the tests asks for."""
    items = [item for item in request.session.items if item.function is request.function]  # type: ignore[attr-defined]
    asked = [CELLS[item.callspec.params["name"]] for item in items if not item.get_closest_marker("skip")]  # type: ignore[attr-defined]
    if not _RAN:
        run_references([one.reference for one in asked])
    _RAN.update(run_cells([one for one in asked if one.ranks == cell.ranks and one.name not in _RAN]))


@pytest.mark.timeout(7200)  # the first cell of a number of ranks waits for all of them
@pytest.mark.parametrize("name", [_marked(name) for name in sorted(CELLS, key=lambda name: CELLS[name].ranks)])
def test_a_cell_leads_to_the_numbers_of_one_process(name: str, request: pytest.FixtureRequest) -> None:
    """Losses and gradient norms of three steps, and all weights after them; README.md says what else is compared."""
    cell = CELLS[name]
    if name not in _RAN:
        _run_with(cell, request)
    expected = run_references([cell.reference])[cell.reference]
    assert len(set(expected.norms)) == STEPS and min(expected.norms) > 0.5, "clipping is at work in every step"
    found = differences(_RAN[name], expected)
    assert not found, f"{name} on {cell.ranks} ranks:\n" + "\n".join(found[:20])


def test_the_table_is_whole() -> None:
    """Six strategies, two numbers of microbatches, two losses: in each layout of each model. Variants of attention, and Muon: half."""
    variants = (3 * 7 + 8 + 2) * 6 * 2  # of attention, multi-token prediction, gpt-oss, documents
    turns = (1 * 2 + 4) * 6 * 2 + 6  # stages that take turns need several microbatches
    muon = (4 + 2) * 6 * 2  # on some of the layouts
    deepseek = delta = 5 * 6 * 2  # too
    mamba = 4 * 6 * 2
    assert len(CELLS) == (7 + 8) * 6 * 2 * 2 + variants + turns + muon + deepseek + delta + mamba
    assert set(IN_CI) <= set(CELLS) and len(set(IN_CI)) == len(IN_CI)
    for field in ("strategy", "microbatches", "per_token", "model", "ranks"):
        assert {getattr(CELLS[name], field) for name in IN_CI} == {getattr(cell, field) for cell in CELLS.values()}
    assert all(2 <= cell.ranks <= 8 for cell in CELLS.values())
