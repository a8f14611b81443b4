"""After a kill or SIGTERM, the checkpoint on disk is complete and the run continues from it; while it lives, none else does."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from megatron.training.folder_lock import LOCK
from megatron.training.run_folder import TRACKER
from tests.support.rank_processes import Start, read_until, write_corpus
from tests.support.rank_processes import start as start
from tests.support.tiny_run import SHARDED, TINY, Run, train_all
from tests.support.warm_python import pid_of

_RESUMABLE = f"{TINY} {SHARDED} --save-interval 2 --distributed-timeout-minutes 1".replace("--mock-data", "")


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """The flags that train on a corpus of 200 documents."""
    return write_corpus(tmp_path / "corpus")


def _finish(processes: list[subprocess.Popen[str]]) -> str:
    outputs = [process.communicate(timeout=400)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    return outputs[0]


def _losses(output: str) -> dict[int, float]:
    return Run(output).losses


def test_sigterm_to_one_rank_saves_and_ends_all_and_until_then_no_other_run_saves_there(
    start: Start, corpus: str, tmp_path: Path
) -> None:
    """The signal goes to one rank alone, and again and again to all until they are gone, as from schedulers.

    Loader processes live on until their rank has saved.
    """
    folder = tmp_path / "checkpoints"
    flags = f"{_RESUMABLE} {corpus} --train-iters 5000 --exit-signal-handler --num-workers 1 --save {folder}"
    processes = start(flags)
    seen = read_until(processes[0], "iteration        3/")
    _check_refused(start, flags.replace("--train-iters 5000", "--train-iters 6"), owner=processes[0])
    processes[1].send_signal(signal.SIGTERM)
    pids = [pid_of(process) for process in processes]
    while any(process.poll() is None for process in processes):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.01)
    output = seen + _finish(processes)
    assert "SIGTERM was received" in output
    iteration = int((folder / TRACKER).read_text())
    assert iteration >= 3 and f"training ended after iteration {iteration}" in output
    assert not (folder / LOCK).exists()


def _check_refused(start: Start, flags: str, *, owner: subprocess.Popen[str]) -> None:
    """Check that another run with this ``--save`` ends at its start, with one message for all its ranks."""
    others = start(flags)
    outputs = [other.communicate(timeout=120)[0] for other in others]
    assert [other.returncode for other in others] == [2, 2], outputs
    assert re.fullmatch(
        r"pretrain_gpt.py: error: --save \S+ must be the folder of one run at a time, got one that is in use by "
        rf"process {pid_of(owner)} on host \S+ \(since .*\); end that run, or give another folder \[rank 0\]\n",
        outputs[0],
    ), outputs[0]
    assert outputs[1] == "", "it is said once"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kills", "iterations", "save"),
    [
        (1, 12, ""),
        pytest.param(20, 400, "", marks=pytest.mark.slow),
        pytest.param(5, 150, "--async-save", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_to_the_last_bit(
    start: Start, corpus: str, tmp_path: Path, kills: int, iterations: int, save: str
) -> None:
    """A rank is killed at random moments of training and of saving; the other detects it and ends by itself."""
    flags = f"{_RESUMABLE} {corpus} --train-iters {iterations}"
    expected = train_all(2, {"whole": ""}, base=flags.replace("--save-interval 2", ""))["whole"].losses
    assert len(expected) == iterations
    folder = tmp_path / "checkpoints"
    flags += f" --save {folder} --load {folder} {save}"
    generator = random.Random(kills)
    for _ in range(kills):
        processes = start(flags)
        seen = read_until(processes[0], "iteration  ")
        time.sleep(generator.uniform(0.0, 1.0))
        victim = generator.randrange(2)
        processes[victim].kill()
        outputs = [process.communicate(timeout=400)[0] for process in processes]
        got = _losses(seen + outputs[0])
        assert got == {iteration: expected[iteration] for iteration in got}
        assert processes[1 - victim].returncode not in (0, None)
        assert "another rank has ended or hangs" in outputs[1 - victim]
    final = _losses(_finish(start(flags)))
    assert final == {iteration: expected[iteration] for iteration in final}
    assert (folder / TRACKER).read_text() == str(iterations)
    # What a kill left half written is gone after the next save.
    assert all(re.fullmatch(r"iter_\d{7}", path.name) for path in folder.iterdir() if path.is_dir())
