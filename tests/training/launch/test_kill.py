"""After a kill or SIGTERM, the checkpoint on disk is complete and the run continues from it."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.training.checkpointing import TRACKER
from tests.support.tiny_run import SHARDED, TINY, Run, train_all

_ROOT = Path(__file__).parents[3]
_RESUMABLE = f"{TINY} {SHARDED} --save-interval 2 --distributed-timeout-minutes 1".replace("--mock-data", "")


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """The flags that train on a corpus of 200 documents."""
    builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=np.int32)
    generator = np.random.default_rng(1)
    for length in generator.integers(5, 60, size=200):
        builder.add_item(generator.integers(0, 99, size=length))
        builder.end_document()
    builder.finalize(str(tmp_path / "corpus.idx"))
    return f"--data-path 1.0 {tmp_path}/corpus --split 1,0,0"


Start = Callable[[str], list[subprocess.Popen[str]]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts two ranks with these flags; they are ended after the test."""
    started: list[subprocess.Popen[str]] = []

    def start_ranks(flags: str) -> list[subprocess.Popen[str]]:
        processes = _start(flags)
        started.extend(processes)
        return processes

    yield start_ranks
    for process in started:
        if process.returncode is None:
            process.kill()
            process.communicate()


def _start(flags: str, *, ranks: int = 2) -> list[subprocess.Popen[str]]:
    """Start ranks as torchrun does, but without torchrun, which would end one when the other dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, "pretrain_gpt.py", *flags.split()],
            cwd=_ROOT,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def _finish(processes: list[subprocess.Popen[str]]) -> str:
    outputs = [process.communicate(timeout=400)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    return outputs[0]


def _losses(output: str) -> dict[int, float]:
    return Run(output).losses


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} never came:\n{seen}")


def test_sigterm_to_one_rank_saves_and_ends_all(start: Start, corpus: str, tmp_path: Path) -> None:
    """The signal goes to one rank alone; loader processes live on until their rank has saved."""
    folder = tmp_path / "checkpoints"
    flags = f"{_RESUMABLE} {corpus} --train-iters 5000 --exit-signal-handler --num-workers 1 --save {folder}"
    processes = start(flags)
    seen = _read_until(processes[0], "iteration        3/")
    processes[1].send_signal(signal.SIGTERM)
    output = seen + _finish(processes)
    assert "SIGTERM was received" in output
    iteration = int((folder / TRACKER).read_text())
    assert iteration >= 3 and f"training ended after iteration {iteration}" in output


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
        seen = _read_until(processes[0], "iteration  ")
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
