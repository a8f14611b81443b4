"""The comparison of engines runs on CPU: every engine trains, all alike, and a wrong one is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compare, engines
from benchmarks.engines import Engine, EngineSettings, Ours
from benchmarks.plain_gpt import SHAPES, Linear, PlainGpt
from tests.support.launch import run_ranks

ROOT = Path(__file__).resolve().parents[2]
COMMON = ["--model", "tiny", "--tokens", "32"]


def _run(argv: list[str]) -> int:
    return compare.main([*COMMON, *argv])


def test_every_engine_runs_and_is_in_the_page(tmp_path: Path):
    """Two ranks, two microbatches: a row for each engine, and one first loss, since all start from the same weights."""
    page = tmp_path / "page.md"
    argv = ["--steps", "1", "--warmup", "1", "--microbatches", "2", "--engines", ",".join(engines.ENGINES)]
    assert run_ranks(2, _run, [*argv, "--output", str(page)]) == [0, 0]
    text = page.read_text()
    for name in engines.ENGINES:
        assert f"\n| {name} | " in text
    losses = [row.split(" | ")[1:] for row in text.splitlines() if row.startswith("| 1 | ")]
    assert len({value.strip(" |") for value in losses[0]}) == 1


def test_a_profile_is_a_summary_for_each_engine(tmp_path: Path):
    argv = ["--warmup", "1", "--engines", "fsdp2,ours-linear", "--profile", str(tmp_path)]
    assert run_ranks(2, _run, argv) == [0, 0]
    summary = (tmp_path / "profile_tiny_32.txt").read_text()
    for name in ("fsdp2", "ours-linear"):
        assert f"==== one step of {name}, rank 0\n" in summary
    assert summary.count("Functions by self time on the host") == 2


def test_ours_trains_like_fsdp2_for_twenty_steps(tmp_path: Path):
    page = tmp_path / "page.md"
    argv = ["--check-losses", "--engines", "fsdp2,ours,ours-linear", "--output", str(page)]
    assert run_ranks(2, _run, argv) == [0, 0]
    text = page.read_text()
    assert "`ours`: equal within noise" in text
    assert "`ours-linear`: equal within noise" in text
    assert "| 20 | " in text


def _halved_gradients(settings: EngineSettings) -> Engine:
    engine = Ours(settings, linear=Linear)
    for unit in engine.model.units():
        for group in unit.parameter_groups:  # type: ignore[union-attr, operator]
            group.grad_scale /= 2
    return engine


def _run_with_a_wrong_engine(argv: list[str]) -> int:
    engines.ENGINES["ours"] = _halved_gradients
    return _run(argv)


def test_a_wrongly_divided_gradient_fails_the_check(tmp_path: Path):
    """AdamW makes the same update of half a gradient, so the losses are equal: the norms tell."""
    page = tmp_path / "page.md"
    argv = ["--check-losses", "--engines", "fsdp2,ours", "--output", str(page)]
    assert run_ranks(2, _run_with_a_wrong_engine, argv) == [1, 1]
    assert "`ours`: 20 FAULTS" in page.read_text()
    assert "gradient norm" in page.read_text()


@pytest.mark.parametrize(("name", "billions"), [("7.2b", 7.24), ("1.1b", 1.10)])
def test_models_have_the_sizes_of_their_names(name: str, billions: float):
    import torch

    with torch.device("meta"):
        model = PlainGpt(SHAPES[name], linear=Linear, dtype=torch.bfloat16, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--engines", "ours,theirs"], "got theirs"),
        (["--check-losses", "--engines", "ours"], "--check-losses needs fsdp2"),
        (["--check-losses", "--engines", "ideal,fsdp2"], "--check-losses needs fsdp2 and an engine of ours"),
        (["--profile", "folder", "--output", "page.md"], "--profile writes no page"),
        (["--profile", "folder", "--check-losses"], "not allowed with argument"),
        (["--steps", "0"], "must be positive, got 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        compare.main(argv)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_it_starts_as_a_file():
    """``torchrun benchmarks/compare.py`` finds what it imports without an installed package."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "benchmarks/compare.py", "--help"]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 0, answer.stderr
    assert "--check-losses" in answer.stdout
