"""The quickstart's sequence of runs, and a run that is interrupted and continued."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from examples import quickstart
from examples.quickstart import Ranks, RunFolder, target_iteration, training_flags
from megatron.training.arguments import parse_settings
from tests.support.warm_python import warm_python


@pytest.mark.parametrize(("saved", "target"), [(0, 400), (1, 400), (399, 400), (400, 800), (650, 800), (800, 1200)])
def test_a_run_ends_where_the_stretch_that_it_continues_ends(saved: int, target: int) -> None:
    assert target_iteration(saved, 400) == target


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 24])
def test_flags_are_lawful_for_any_number_of_ranks(count: int, tmp_path: Path) -> None:
    ranks = Ranks(count=count, backend="gloo")
    flags = training_flags(RunFolder(tmp_path), ranks, target=800, stretch=400)
    settings = parse_settings(flags, world_size=count)
    assert settings.batch.num_microbatches == 1 and settings.loop.train_iters == 800
    assert settings.ddp.use_megatron_fsdp and settings.ddp.data_parallel_sharding_strategy == "optim_grads_params"


def test_what_is_there_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: built.append(command[1]))
    folder = RunFolder(tmp_path)
    quickstart.build_corpus(folder)
    assert len(built) == 3
    folder.corpus.mkdir()
    for part in ("train", "valid"):
        Path(f"{folder.data_prefix(part)}.idx").touch()
    quickstart.build_corpus(folder)
    assert len(built) == 3


def test_two_runs_do_not_train_in_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunFolder(tmp_path).reserved():
        assert quickstart.main(["--run-folder", str(tmp_path)]) == 1
    assert "another quickstart trains in" in capsys.readouterr().err


def start(folder: Path) -> subprocess.Popen[str]:
    script = Path(quickstart.__file__)
    return subprocess.Popen(
        [warm_python(), str(script), "--run-folder", str(folder), "--iterations", "40"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        # A shell that starts tests in the background has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def test_an_interrupted_run_goes_on_and_ends_with_all_that_was_promised(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with start(tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "iteration 20/40" in line:
                process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    saved = folder.saved_iteration()
    assert 20 <= saved < 40

    printed, _ = start(tmp_path).communicate()
    assert f"from iteration {saved} in " in printed, printed
    assert "exists already" in printed and "validation loss" in printed
    assert folder.saved_iteration() == 40 and (folder.checkpoints / "iter_0000040").is_dir()
    assert folder.sample.read_text().startswith(quickstart.PROMPT)
    assert folder.picture.read_bytes().startswith(b"\x89PNG")
    assert any(path.name.startswith("events.out") for path in folder.tensorboard.iterdir())
