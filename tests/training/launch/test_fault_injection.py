"""A table of faults, each injected into one rank at a named point of a run, and how the run ends."""

from __future__ import annotations

import errno
import importlib
import multiprocessing.connection
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.training.run_folder import TRACKER
from tests.support.launch import PRELOAD
from tests.support.tiny_run import SHARDED, TINY, Run

_ENDS_WITHIN_S = 10.0
_BUSY_S = 80.0
"""A busy machine is no fault of the run; the time-out, which nothing here may wait for, is 120 s."""

_LAST_LINES = 3
"""An error and what it says besides of this rank, and of the others."""

_AT_A_TIME = 4

_STEP = 3
"""The iteration from which on a fault waits for its point."""

_FLAGS = f"{TINY} {SHARDED} --train-iters 6 --eval-interval 4 --eval-iters 1 --distributed-timeout-minutes 2"

POINTS = {
    "set-up": "megatron.training.launch.pretrain:FullyShardedDataParallel",
    "data": "megatron.core.datasets.gpt_dataset:GPTDataset.__getitem__",
    "forward": "megatron.training.loop.stage_forward:StageForward.__call__",
    "gather": "megatron.core.distributed.fsdp.buffers.weights:Weights.gather",
    "backward": "megatron.core.distributed.fsdp.runtime.backward:Backward.begin",
    "reduction": "megatron.core.distributed.fsdp.buffers.gradients:Gradients.reduce",
    "update": "megatron.core.optimizer.optimizer:MegatronOptimizer.launch_step",
    "between steps": "megatron.training.loop.step_agreement:StepAgreement.post",
    "evaluation": "megatron.training.loop.training_loop:TrainingLoop.evaluate",
    "a checkpoint's file": "megatron.core.distributed.fsdp.checkpoint.files:_Item.write",
}
"""What is called at the point; the fault comes before the call."""


def _raise() -> None:
    raise RuntimeError("injected: an error")


def _delay() -> None:
    time.sleep(3.0)


def _hang() -> None:
    time.sleep(600.0)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_a_loader_process() -> None:
    multiprocessing.active_children()[0].kill()
    time.sleep(20.0)  # PyTorch's handler of SIGCHLD raises in here


def _out_of_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("injected: out of memory")


def _disk_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


FAULTS: dict[str, Callable[[], None]] = {
    "raise": _raise,
    "delay": _delay,
    "hang": _hang,
    "kill": _kill,
    "kill a loader process": _kill_a_loader_process,
    "out of memory": _out_of_memory,
    "disk full": _disk_full,
}


@dataclass(frozen=True)
class Row:
    """One fault and its end."""

    fault: str
    point: str
    rank: int
    last: str = ""
    """What the rank says last, or where it was killed the other; "": the run goes on to the same losses."""

    flags: str = ""

    @property
    def name(self) -> str:
        return f"{self.fault} at {self.point} on rank {self.rank}"


_ERROR, _OOM = "RuntimeError: injected: an error", "OutOfMemoryError: injected: out of memory"
_LOST = {0: "rank 0, which serves the store", 1: "no sign of life within 6 s from rank 1"}

TABLE = (
    Row("raise", "set-up", 0, _ERROR),
    Row("raise", "data", 1, _ERROR),
    Row("raise", "forward", 0, _ERROR),
    Row("raise", "gather", 1, "injected: an error"),
    Row("raise", "backward", 1, _ERROR),
    Row("raise", "reduction", 0, "injected: an error"),
    Row("raise", "update", 1, _ERROR),
    Row("raise", "between steps", 0, _ERROR),
    Row("raise", "evaluation", 1, _ERROR),
    Row("delay", "set-up", 1),
    Row("delay", "gather", 1),
    Row("delay", "reduction", 0),
    Row("delay", "between steps", 1),
    Row("kill", "set-up", 1, _LOST[1]),
    Row("kill", "forward", 0, _LOST[0]),
    Row("kill", "gather", 1, _LOST[1]),
    Row("kill", "reduction", 1, _LOST[1]),
    Row("kill", "a checkpoint's file", 1, _LOST[1]),
    Row("kill a loader process", "reduction", 1, "RuntimeError: DataLoader worker (pid", "--num-workers 1"),
    Row("out of memory", "forward", 1, _OOM),
    Row("out of memory", "gather", 0, _OOM),
    Row("out of memory", "reduction", 1, _OOM),
    Row("out of memory", "update", 0, _OOM),
    Row("disk full", "a checkpoint's file", 0, "No space left on device"),
    Row("disk full", "a checkpoint's file", 1, "No space left on device"),
    Row("disk full", "a checkpoint's file", 1, "No space left on device", "--async-save"),
)


def _inject(row: Row) -> None:
    """Let the fault happen once, the first time that this rank comes to the point after the step before ``_STEP``."""
    from megatron.training.loop.train_step import TrainStep

    module, path = POINTS[row.point].split(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    call, step = getattr(owner, name), TrainStep.__call__
    waits = row.point == "set-up"

    def faulty(*args: Any, **named: Any) -> Any:
        nonlocal waits
        if waits:
            waits = False
            FAULTS[row.fault]()
        return call(*args, **named)

    def counted(self: Any, batches: Any, iteration: int) -> Any:
        nonlocal waits
        waits = waits or iteration == _STEP
        return step(self, batches, iteration)

    setattr(owner, name, faulty)
    TrainStep.__call__ = counted  # type: ignore[method-assign]


def _run_rank(rank: int, port: int, flags: str, output: str, row: Row | None) -> None:
    """Do what ``pretrain_gpt.py`` does when it is started as this rank."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import torch

    import pretrain_gpt
    from megatron.core.datasets.mock_corpus import MockGPTLowLevelDataset
    from megatron.training.launch.failures import run_script

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # as under torchrun: loader processes are this one's children
    MockGPTLowLevelDataset.size = 100
    if row is not None and row.rank == rank:
        _inject(row)
    run_script(pretrain_gpt.main, flags.split())


def _run(folder: Path, row: Row | None) -> tuple[list[int | None], list[str], float]:
    """Run two ranks; return their exit statuses, what they printed, and the seconds between their ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    saves = row is not None and row.point == "a checkpoint's file"
    flags = f"{_FLAGS} {row.flags if row else ''}" + (f" --save {folder}/saved --save-interval 5" if saves else "")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    outputs = [folder / f"rank{rank}" for rank in range(2)]
    processes = [
        context.Process(target=_run_rank, args=(rank, port, flags, str(outputs[rank]), row)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        multiprocessing.connection.wait([process.sentinel for process in processes], timeout=400)
        begin = time.monotonic()
        for process in processes:
            process.join(timeout=150)
        ended = time.monotonic() - begin
        return [process.exitcode for process in processes], [output.read_text() for output in outputs], ended
    finally:
        for process in processes:
            process.kill()
            process.join()


Ends = dict[Row | None, tuple[list[int | None], list[str], float]]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """How the runs of all rows end, and (None) one without a fault. They mostly wait, so a few run at a time."""
    folders = {row: tmp_path_factory.mktemp("row") for row in (None, *TABLE)}
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        return dict(zip(folders, pool.map(_run, folders.values(), folders), strict=True))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.name} {row.flags}".strip())
def test_a_fault_ends_as_its_row_says(ends: Ends, row: Row) -> None:
    statuses, outputs, seconds = ends[row]
    text = "\n---- rank 1\n".join(outputs)
    undisturbed, losses = Run(ends[None][1][0]).losses, Run(outputs[0]).losses
    assert len(undisturbed) == 6 and losses == {iteration: undisturbed[iteration] for iteration in losses}, text
    if not row.last:
        assert statuses == [0, 0] and losses == undisturbed, text
        return
    killed, other = row.fault == "kill", outputs[1 - row.rank]
    assert statuses[row.rank] == (-signal.SIGKILL if killed else 1) and statuses[1 - row.rank] == 1, (statuses, text)
    assert seconds < _ENDS_WITHIN_S + _BUSY_S, text
    speaks = other if killed else outputs[row.rank]
    assert row.last in "\n".join(speaks.strip().splitlines()[-_LAST_LINES:]), text
    named = (f"rank {row.rank} failed with", f"[rank {row.rank}]", _LOST[row.rank])
    assert any(words in other for words in named), text
    if row.fault == "kill a loader process":
        assert f"rank {row.rank} failed with {row.last}" in other, text


def test_a_save_that_fails_leaves_no_checkpoint(ends: Ends, tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.getbasetemp()
    saved = [folder for folder in base.glob("row[0-9]*/saved")]
    assert len(saved) == sum(row.point == "a checkpoint's file" for row in TABLE)
    for folder in saved:
        assert not list(folder.glob("iter_???????")) and not (folder / TRACKER).exists(), list(folder.iterdir())


@pytest.mark.slow
def test_a_rank_that_hangs_ends_with_the_others_after_the_time_out(tmp_path: Path) -> None:
    """The rank that waits names the collective and its unit; the one that hangs cannot end by itself."""
    begin = time.monotonic()
    statuses, outputs, seconds = _run(tmp_path, Row("hang", "gather", 1, flags="--distributed-timeout-minutes 1"))
    assert statuses == [1, 1] and seconds < _ENDS_WITHIN_S + _BUSY_S, outputs
    assert 60.0 < time.monotonic() - begin < 400.0, "the rank hangs for 600 s"
    assert "all-gather of the weights of decoder.layers." in outputs[0] and "did not finish on rank 0" in outputs[0]
    assert "rank 1 ends, since rank 0 failed with RuntimeError: all-gather" in outputs[1], outputs
