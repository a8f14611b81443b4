"""The page in a real browser, the picture, and two reports compared."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.core.distributed.fsdp.overlap_report import compare_reports, comparison_page, read_report
from megatron.core.distributed.fsdp.overlap_report.figures import find_figures
from megatron.core.distributed.fsdp.overlap_report.memory import KINDS
from megatron.core.distributed.fsdp.overlap_report.picture import COLORS
from megatron.core.distributed.fsdp.overlap_report.report import Report, headline, make_report, write_report
from megatron.core.distributed.fsdp.overlap_report.trace import Work
from tests.support.browser import Browser, browser
from tools import compare_overlap

NUM_LAYERS = 80


def _works(slower: float) -> list[Work]:
    """Eighty layers forward and backward; before layer 7's backward compute waits ``slower`` microseconds for its gather."""
    works: list[Work] = []
    now = 0.0
    for direction, order in (("forward", range(NUM_LAYERS)), ("backward", reversed(range(NUM_LAYERS)))):
        for layer in order:
            unit = f"decoder.layers.{layer}"
            wait = slower if (layer, direction) == (7, "backward") else 10.0
            works.append(Work(now - 300.0, now + wait, "gather", unit, direction, "gather", now - 400.0))
            works.append(Work(now + wait, now + wait + 2000.0, "compute", unit, direction, "gemm", now - 200.0))
            now += wait + 2000.0
            if direction == "backward":
                works.append(Work(now, now + 500.0, "reduce", unit, direction, "reduce", now - 100.0))
    works.append(Work(now + 100.0, now + 3000.0, "compute", "</script><b>", "update", "adam", now + 90.0))
    return works


def _report(slower: float = 4000.0) -> Report:
    times = [0.0, 100.0, 200.0, 330.0]
    gib = 2**30
    series = {kind: [gib, 2 * gib, (at + 1) * gib, gib] for at, kind in enumerate(KINDS)}
    memory: dict[str, Any] = {
        "times": times,
        "series": series,
        "peak_ms": 200.0,
        "phases": [(0.0, "forward"), (160.0, "backward")],
    }
    memory["peak"] = {kind: values[2] for kind, values in series.items()}
    works = _works(slower)
    return make_report(
        find_figures(works, (0.0, max(work.end for work in works)), calls=[(0.0, 90.0)]),
        iteration=12,
        device=torch.device("cpu"),
        is_captured=False,
        usual_ms=333.0,
        memory=memory,
        memory_of=10,
        notes=["a note"],
    )


def _written(folder: Path) -> Path:
    """A report's page, without the picture, which takes longest."""
    with patch.dict(sys.modules, {"matplotlib.figure": None}):
        page = write_report(_report(), folder)
    assert page is not None
    return page


def _text(page: Browser, selector: str) -> list[str]:
    found: list[str] = page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(each => each.textContent)")
    return found


def _pixels(page: Browser, color: str) -> int:
    """How many pixels of the time line have this colour."""
    wanted = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    script = (
        "(() => { const c = document.getElementById('line'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        f" let n = 0; for (let i = 0; i < d.length; i += 4) if (d[i] === {wanted[0]} && d[i+1] === {wanted[1]} && d[i+2] === {wanted[2]}) n++;"
        " return n; })()"
    )
    return int(page.run(script))


def test_pages_are_drawn_by_a_browser_without_a_network(tmp_path: Path) -> None:
    """Eighty layers; a name that looks like HTML is text; on a phone the page is no wider than the window."""
    page = _written(tmp_path / "a")
    (tmp_path / "b.json").write_text(json.dumps(_report(10.0)))
    other = tmp_path / "comparison.html"
    assert compare_overlap.main([str(tmp_path / "a"), str(tmp_path / "b.json"), "--page", str(other)]) == 0
    with browser(tmp_path) as opened:
        opened.open(page)
        first = _text(opened, "#units tbody tr:first-child td")
        assert first[0] == "decoder.layers.7 backward" and first[1] == "4.00"
        assert len(_text(opened, "#units tbody tr")) == 24
        opened.run("document.querySelector('#units button').click()")
        names = _text(opened, "#units tbody td:first-child")
        assert len(names) == 2 * NUM_LAYERS + 1 and "</script><b> update" in names
        opened.run("document.querySelectorAll('#units th')[0].click()")
        assert _text(opened, "#units tbody td:first-child")[1] == "decoder.layers.0 backward"
        shown = {lane: _pixels(opened, COLORS[lane]) for lane in ("compute", "gather", "exposed", "reduce")}
        assert all(shown.values()), shown
        opened.run("document.getElementById('in').click(), document.getElementById('in').click()")
        assert _pixels(opened, COLORS["compute"]) != shown["compute"]
        assert len(_text(opened, "#memory path")) == len(KINDS)
        wide = opened.screenshot(tmp_path / "wide.png")
        opened.open(page, width=390, height=844)
        assert opened.run("document.documentElement.scrollWidth") <= 390
        narrow = opened.screenshot(tmp_path / "narrow.png")
        opened.open(other)
        assert _text(opened, "#units tbody tr:first-child td")[:4] == [
            "decoder.layers.7 backward",
            "4.00",
            "0.010",
            "−3.99",
        ]
        assert opened.errors == [] and all(each.startswith(("file:", "data:")) for each in opened.requests)
    assert min(wide.stat().st_size, narrow.stat().st_size) > 50_000


def test_the_headline_says_what_waits_most() -> None:
    report = _report()
    assert report["headline"].startswith(
        "Step 329 ms: 323 ms compute, 5.7 ms exposed communication (most before decoder.layers.7 backward 4.0 ms,"
    )
    slow = {**report["ranks"][0], "host": 50.0}
    assert headline({**report, "ranks": [report["ranks"][0], slow]}).endswith(
        ". Rank 1 waits 50.0 ms for its host, and ranks that wait for it count that as communication."
    )
    assert headline({**report, "ranks": [slow, slow], "rank": 1}) == report["headline"]
    assert report["ranks"] == [
        {name: report["ranks"][0][name] for name in ("step_ms", "compute", "exposed", "host", "latency", "wait")}
    ]


def test_two_reports_differ_where_one_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = _report(), _report(10.0)
    comparison = compare_reports(a, b)
    assert comparison["rows"][0]["name"] == "decoder.layers.7 backward"
    assert comparison["rows"][0]["exposed_change"] == pytest.approx(-3.99)
    assert comparison["totals"]["exposed"] == pytest.approx(-3.99, abs=1e-3)
    assert [row["name"] for row in comparison["rows"] if abs(row["exposed_change"]) > 1e-3] == [
        "decoder.layers.7 backward"
    ]
    del b["rows"][3]  # a unit that one of them lacks
    assert len(compare_reports(a, b)["rows"]) == len(a["rows"])
    assert "decoder.layers.7 backward" in comparison_page(comparison)
    assert compare_overlap.main([str(tmp_path), str(tmp_path)]) == 2
    assert "must be the folder of an overlap report" in capsys.readouterr().err
    (tmp_path / "overlap.json").write_text(json.dumps({"version": 99, "totals": {}}))
    with pytest.raises(ValueError, match="must be an overlap report of version 1, got version 99"):
        read_report(tmp_path)
    for text, why in (
        ("{}", "KeyError"),
        ('{"version": 1}', "got JSON without compute, "),
        ('"version"', "TypeError"),
        ("{", "JSON"),
    ):
        (tmp_path / "overlap.json").write_text(text)
        assert compare_overlap.main([str(tmp_path), str(tmp_path)]) == 2
        assert why in capsys.readouterr().err
    (tmp_path / "overlap.json").write_text(json.dumps(a))
    assert compare_overlap.main([str(tmp_path), str(tmp_path), "--page", str(tmp_path / "none" / "page.html")]) == 2
    assert "--page must be a file that can be written, got " in capsys.readouterr().err


def test_without_matplotlib_the_page_is_written_and_the_picture_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _written(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["overlap.html", "overlap.json"]
    assert "needs matplotlib: pip install matplotlib" in caplog.text
