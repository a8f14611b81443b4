"""The comparison of engines runs on CPU: every engine trains, all alike, and a wrong one is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from benchmarks import compare
from benchmarks.engines import registry as engines
from benchmarks.engines.engine import Engine, EngineSettings
from benchmarks.engines.ours import Ours, parse_ours
from benchmarks.engines.plain_gpt import SHAPES, Linear, PlainGpt
from tests.support.launch import run_ranks

ROOT = Path(__file__).resolve().parents[2]
COMMON = ["--model", "tiny", "--tokens", "32"]
TRAINED_HERE = ["ideal", "fsdp2", "ours-peer+keep=0.001", "ours-plain+torchadam+together+nosync", "ours-peer+muon"]


def _run(argv: list[str]) -> int:
    return compare.main([*COMMON, *argv])


def test_every_engine_runs_or_says_why_not(tmp_path: Path) -> None:
    """Two ranks, two microbatches: a row for each engine, and one first loss, since all start from the same weights."""
    page = tmp_path / "page.md"
    absent = ["megatron-fsdp", "ours-nccl-graph", "ours-symm"]
    argv = ["--steps", "1", "--microbatches", "2", "--engines", ",".join([*absent, *TRAINED_HERE])]
    assert run_ranks(2, _run, [*argv, "--output", str(page)]) == [0, 0]
    text = page.read_text()
    for name in TRAINED_HERE:
        assert f"\n| {name} | " in text
    for name in absent:
        assert f"\n- `{name}` did not run: " in text
    losses = [row.split(" | ")[1:] for row in text.splitlines() if row.startswith("| 1 | ")]
    assert len({value.strip(" |") for value in losses[0]}) == 1
    assert "\n## Bars\n" in text
    assert "`ours-peer+keep=0.001`: planned at rest 0." in text and " for backward, which saves " in text


def test_a_profile_is_a_summary_for_each_engine(tmp_path: Path) -> None:
    argv = ["--warmup", "1", "--engines", "fsdp2,ours-nccl", "--profile", str(tmp_path)]
    assert run_ranks(2, _run, argv) == [0, 0]
    summary = (tmp_path / "profile_tiny_32.txt").read_text()
    for name in ("fsdp2", "ours-nccl"):
        assert f"==== one step of {name}, rank 0\n" in summary
    for words in (
        "Functions by self time on the host",
        "Host, without a profiler: forward ",
        " ms, backward ",
        " ms, optimizer ",
    ):
        assert summary.count(words) == 2


def test_ours_trains_like_fsdp2(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    names = [name for name in TRAINED_HERE[1:] if "muon" not in name]
    argv = ["--check-losses", "--steps", "20", "--deterministic", "--engines", ",".join(names), "--output", str(page)]
    assert run_ranks(2, _run, argv) == [0, 0]
    text = page.read_text()
    for name in names[1:]:
        assert f"`{name}`: equal within noise" in text
    assert "| 20 | " in text and "| 21 | " not in text


class _HalvedGradients(Ours):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        for unit in self.model.units():
            for group in unit.parameter_groups:
                group.change_training(sum_divisor=2 * group.training.sum_divisor)


class _FailsInItsThirdStep(Ours):
    num_steps = 0

    def after_step(self) -> None:
        self.num_steps += 1
        if self.num_steps == 3:
            raise RuntimeError("a fault of this engine")


def _run_with(wrong: type, argv: list[str]) -> int:
    with patch.object(engines, "Ours", wrong):
        return _run(argv)


def test_a_wrongly_divided_gradient_fails_the_check(tmp_path: Path) -> None:
    """AdamW makes the same update of half a gradient, so the losses are equal: the norms tell."""
    page = tmp_path / "page.md"
    argv = ["--check-losses", "--steps", "4", "--engines", "fsdp2,ours-nccl", "--output", str(page)]
    assert run_ranks(2, _run_with, _HalvedGradients, argv) == [1, 1]
    assert "`ours-nccl`: 4 FAULTS" in page.read_text()
    assert "gradient norm" in page.read_text()


def test_an_engine_that_fails_on_every_rank_stops_no_other(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    argv = ["--steps", "1", "--engines", "ours-nccl,fsdp2", "--output", str(page)]
    assert run_ranks(2, _run_with, _FailsInItsThirdStep, argv) == [1, 1]
    text = page.read_text()
    assert "`ours-nccl` did not run: it failed: RuntimeError: a fault of this engine" in text
    assert "\n| fsdp2 | " in text


def _phases() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.measure.phases import time_phases
    from benchmarks.measure.steps import make_batch

    device, mesh = torch.device("cpu"), init_device_mesh("cpu", (1,))
    settings = EngineSettings(shape=SHAPES["tiny"], mesh=mesh, device=device, learning_rate=1e-3, seed=1)
    engine: Engine = engines.engine_kind("fsdp2").build(settings)
    batch = make_batch(0, num_microbatches=2, num_tokens=16, vocab_size=256, seed=1, device=device)
    times = time_phases(engine, batch)
    engine.step(batch)  # marks nothing any more
    assert all(value > 0 for value in times.values())
    return list(times)


def test_phases_of_a_step_are_told_apart() -> None:
    assert run_ranks(1, _phases) == [["forward", "backward", "optimizer"]]


@pytest.mark.parametrize(("name", "billions"), [("7.2b", 7.24), ("1.1b", 1.10)])
def test_models_have_the_sizes_of_their_names(name: str, billions: float) -> None:
    with torch.device("meta"):
        model = PlainGpt(SHAPES[name], linear=Linear, dtype=torch.bfloat16, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--engines", "ours-nccl,theirs"], "got theirs"),
        (["--engines", "ours-tcp"], "got ours-tcp"),
        (["--engines", "ours-nccl-graphs"], "got ours-nccl-graphs"),
        (["--engines", "ours-nccl+faster"], "got faster in ours-nccl+faster"),
        (["--engines", "ours-nccl-graph", "--warmup", "3"], "--warmup must be at least 4, got 3"),
        (["--check-losses", "--engines", "ours-nccl"], "--check-losses needs fsdp2"),
        (["--check-losses", "--engines", "ideal,fsdp2"], "--check-losses needs fsdp2 and an engine of ours"),
        (["--profile", "folder", "--output", "page.md"], "--profile writes no page"),
        (["--profile", "folder", "--check-losses"], "not allowed with argument"),
        (["--steps", "0"], "must be positive, got 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        compare.main(argv)
    assert ended.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_name_is_a_transport_and_what_is_left_out() -> None:
    best = parse_ours("ours-peer")
    assert (best.transport, best.flat_optimizer, best.remainders, best.gathers_apart) == ("peer", True, True, True)
    assert best.overlaps_forward and best.prepares_forward and not best.graph
    plain = parse_ours("ours-plain+torchadam+nosync")
    assert plain.linear is Linear and plain.transport == "nccl"
    assert not (plain.flat_optimizer or plain.remainders or plain.prepares_forward)
    assert parse_ours("ours-nccl+keep=2.5").memory_budget_gib == 2.5


def test_a_graph_holds_whole_steps() -> None:
    """Nothing may be launched before a replay for it, or left over after it for the next."""
    options = parse_ours("ours-symm-graph+fp32main")
    assert options.graph and not (options.prepares_forward or options.overlaps_forward or options.remainders)
    assert engines.eager_twin("ours-symm-graph+fp32main") == "ours-symm+fp32main"


def test_it_starts_as_a_file() -> None:
    """``torchrun benchmarks/compare.py`` finds what it imports without an installed package."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "benchmarks/compare.py", "--help"]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    assert "--check-losses" in answer.stdout
