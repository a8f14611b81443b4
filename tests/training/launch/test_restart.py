"""torchrun restarts a run that has lost a rank; it continues from its last checkpoint, also on the ranks that are left."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from megatron.training.checkpointing import CheckpointConfig
from megatron.training.launch.restart import EarlierStarts, _earlier
from megatron.training.run_folder import TRACKER
from tests.support.rank_processes import end, free_port, write_corpus
from tests.support.tiny_run import SHARDED, TINY, Run
from tests.support.warm_python import pid_of, warm_python

_ROOT = Path(__file__).parents[3]
_FLAGS = f"{TINY} {SHARDED} --train-iters 8 --save-interval 2 --distributed-timeout-minutes 5".replace(
    "--mock-data", ""
)

# Dies in the sixth iteration of its first start; each step has two microbatches on two ranks.
_DIES = """
import os, signal, sys
import pretrain_gpt

calls, forward_step = [], pretrain_gpt.forward_step

def die(batch, model):
    calls.append(None)
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and len(calls) == 11:
        if os.environ["GROUP_WORLD_SIZE"] == "2":
            os.kill(int(os.environ["WARM_PARENT"]), signal.SIGKILL)  # torchrun too, as if the host were lost
        os.kill(os.getpid(), signal.SIGKILL)
    return forward_step(batch, model)

pretrain_gpt.forward_step = die
pretrain_gpt.run_script(pretrain_gpt.main, sys.argv[1:])
"""

# Exists, but does nothing until there is a file.
_LATE = """
import os, runpy, sys, time

file = sys.argv.pop(1)
while not os.path.exists(file):
    time.sleep(0.02)
runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
"""

_PATIENCE_S = 800.0
"""A run takes 40 s on a quiet machine, and minutes where a dozen others compute."""

pytestmark = pytest.mark.timeout(3 * _PATIENCE_S)

Torchrun = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Torchrun]:
    """Return a function that starts torchrun with its flags and the script's, which may wait for a file first."""
    script, late, started = tmp_path / "script.py", tmp_path / "late.py", []
    script.write_text(_DIES)
    late.write_text(_LATE)

    def start(own: str, flags: str, after: Path | None = None) -> subprocess.Popen[str]:
        launcher = ["-m", "torch.distributed.run"] if after is None else [str(late), str(after)]
        command = [warm_python(), *launcher, *own.split(), str(script), *flags.split()]
        environment = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command,
            cwd=_ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    end(started)


def _elastic(nodes: str, port: int) -> str:
    """Return torchrun's flags; a host is lost that was silent for longer than a busy machine stops a process."""
    return (
        f"--nnodes {nodes} --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint localhost:{port} --rdzv-id job --rdzv-conf "
        "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=20,join_timeout=800,read_timeout=300"
    )


def _wait_for_participant(store: dist.Store) -> None:
    """Wait until a host has joined the rendezvous that is kept in the store."""
    rendezvous, deadline = C10dRendezvousBackend(store, "job"), time.monotonic() + _PATIENCE_S
    while (found := rendezvous.get_state()) is None or not pickle.loads(found[0]).participants:
        assert time.monotonic() < deadline, "no host joined"
        time.sleep(0.05)


def _wait_for_start(process: subprocess.Popen[str]) -> None:
    """Wait until the process that ``warm_python()`` runs has its pid."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        with suppress(FileNotFoundError, ValueError):
            pid_of(process)
            return
        assert time.monotonic() < deadline, "the process did not start"
        time.sleep(0.02)


def _check(output: str, folder: Path) -> None:
    """Check that the run was continued from its last checkpoint, and that each repeated iteration gave the same loss."""
    assert "training ended after iteration 8" in output, output
    assert f"loaded {folder}/iter_0000004; training continues after iteration 4" in output, output
    first, _, second = output.partition(f"loaded {folder}")
    before, after = Run(first).losses, Run(second).losses
    assert list(before) == [1, 2, 3, 4, 5] and list(after) == [5, 6, 7, 8]
    assert after[5] == pytest.approx(before[5], rel=1e-5)  # on other numbers of ranks sums have another order
    assert (folder / TRACKER).read_text() == "8"


@pytest.mark.parametrize("kind", ["static", pytest.param("elastic", marks=pytest.mark.slow)])
def test_a_restarted_run_continues_from_its_last_checkpoint(torchrun: Torchrun, tmp_path: Path, kind: str) -> None:
    """Also without --load, since a run that began anew, or from other weights, would lose what it has learned."""
    folder = tmp_path / "checkpoints"
    own = f"--max-restarts 3 --master-port {free_port()}" if kind == "static" else _elastic("1", free_port())
    flags = f"{_FLAGS} {write_corpus(tmp_path / 'corpus')} --save {folder}"
    process = torchrun(f"--nproc-per-node 2 {own}", flags)
    output = process.communicate(timeout=_PATIENCE_S)[0]
    assert process.returncode == 0, output
    assert f"restarted by torchrun: continues from iteration 4, which it saved in {folder}" in output
    _check(output, folder)


@pytest.mark.parametrize(("saved", "latest"), [((2, 4), 4), ((2,), 2), ((), None)])
def test_a_damaged_tracker_does_not_stop_a_restart(tmp_path: Path, saved: tuple[int, ...], latest: int | None) -> None:
    """torchrun's store knows what the job has saved; a checkpoint of others, here that of iteration 6, is not taken for it."""
    for iteration in (2, 4, 6):
        folder = tmp_path / f"iter_{iteration:07d}"
        folder.mkdir()
        (folder / ".metadata").touch()
    (tmp_path / TRACKER).write_text("")
    starts = EarlierStarts(config=CheckpointConfig(save=str(tmp_path)), store=dist.HashStore())
    starts.remember_admission()
    for iteration in saved:
        starts.remember_save(iteration)
    if latest is None:
        with pytest.raises(ValueError, match=r"must hold the number .* \(the latest complete one is 6\)"):
            _earlier(starts)
    else:
        assert _earlier(starts) == (True, latest)


def test_a_run_that_lost_a_host_continues_on_the_other(torchrun: Torchrun, tmp_path: Path) -> None:
    """The global batch is that of two ranks: one takes twice as many microbatches.

    The host that will be lost needs two hosts and joins first; so the other, which needs one, never begins alone.
    """
    folder, joined = tmp_path / "checkpoints", tmp_path / "joined"
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    flags = f"{_FLAGS} {write_corpus(tmp_path / 'corpus')} --save {folder} --load {folder}"
    one, two = (f"--nproc-per-node 1 {_elastic(nodes, store.port)},is_host=0" for nodes in ("1:2", "2"))
    processes = [torchrun(one, flags, after=joined)]
    _wait_for_start(processes[0])
    processes.append(torchrun(two, flags))  # the higher pid has the higher rank
    _wait_for_participant(store)
    joined.touch()
    output = processes[0].communicate(timeout=_PATIENCE_S)[0]
    assert processes[0].returncode == 0, output
    other = processes[1].communicate(timeout=_PATIENCE_S)[0]
    assert processes[1].returncode == -signal.SIGKILL, other + output
    _check(output, folder)
    assert "gloo, 2 ranks" in output and "gloo, 1 ranks" in output
