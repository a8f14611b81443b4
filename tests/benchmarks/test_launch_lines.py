"""Launch lines are started as users start them, and their logs are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import launch_lines
from megatron.training.arguments import parse_settings


@pytest.mark.parametrize("model", launch_lines.MODELS)
@pytest.mark.parametrize("variant", launch_lines.VARIANTS)
def test_each_line_is_served(model: str, variant: str) -> None:
    common = f"{launch_lines._COMMON} {launch_lines.MODELS[model]} {launch_lines.VARIANTS[variant]}"
    assert parse_settings(common.split()).loop.train_iters == launch_lines.NUM_STEPS


def test_a_tiny_line_runs_and_its_log_is_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert launch_lines.main([str(page), "moe"]) == 0
    run = launch_lines.read_log((tmp_path / "page_moe_this.log").read_text())
    assert len(run.ms) == len(run.losses) == launch_lines.NUM_STEPS and run.median_ms > 0.0
    assert f"| moe | this framework | {run.median_ms:.1f} |" in page.read_text()


def test_a_line_that_fails_is_a_row_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(launch_lines.TINY_MODELS, "moe", "--num-layers nothing")
    page = tmp_path / "page.md"
    assert launch_lines.main([str(page), "moe"]) == 1
    assert "exit status" in page.read_text()
