"""The benchmark of host costs: its counters see what they should, and its command line prints and writes the figures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks import host_cost
from benchmarks.measure.host_counts import ENGINE, PHASES, Tally


def _engine_function(body: str) -> dict[str, object]:
    """Names that are defined by code which says that it is the engine's."""
    names: dict[str, object] = {"torch": torch}
    exec(compile(body, f"{ENGINE}/imagined.py", "exec"), names)
    return names


def test_calls_lines_and_builtins_are_counted_for_the_engine_alone() -> None:
    names = _engine_function(
        "def add(n):\n    total = 0\n    for i in range(n):\n        total += abs(i)\n    return total\n"
    )
    tally = Tally()
    tally.begin("forward")
    with tally.calls():
        names["add"](5)  # type: ignore[operator]
    assert tally.counts.calls == {"forward": 1}
    assert tally.counts.builtins["forward"] == 5
    assert tally.counts.by_function == {("forward", "imagined.add"): 1}
    tally.begin("backward")
    few, many = Tally(), Tally()
    for each, n in ((few, 5), (many, 15)):
        each.begin("backward")
        with each.lines():
            names["add"](n)  # type: ignore[operator]
    assert many.counts.lines["backward"] - few.counts.lines["backward"] == 2 * 10
    assert many.counts.other_calls == Counter()


def test_operators_are_counted_by_kind() -> None:
    tally = Tally()
    tally.begin("forward")
    weight = torch.ones(4, requires_grad=True)
    with tally.operators():
        loss = (weight.view(2, 2) * 2.0).sum()
        tally.begin("backward")
        loss.backward()
    assert tally.counts.ops["forward"] == 3 and tally.counts.kernels["forward"] == 2
    assert tally.counts.kernels["backward"] > 0
    assert not tally.counts.dtensor_ops and not tally.counts.collectives


def test_the_command_line_writes_all_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "host.json"
    host_cost.main(["--units", "3", "--parameters", "2", "--steps", "2", "--device", "cpu", "--json", str(file)])
    report = json.loads(file.read_text())
    assert set(report["microseconds"]["sharded"]) == set(PHASES)
    counts = report["counts"]
    assert counts["collectives"]["forward"]["per_unit"] == 1, "each further unit gathers once in forward"
    assert counts["collectives"]["backward"]["per_unit"] == 2, "and gathers and reduces once in backward"
    assert counts["calls"]["forward"]["per_unit"] > 0 and counts["lines"]["forward"]["per_unit"] > 0
    printed = capsys.readouterr().out
    assert "engine per unit" in printed and "per further parameter" in printed
