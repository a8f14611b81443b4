"""Processes that a killed process has started end, whatever they do at the moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]

_POOL = """
import multiprocessing, os, sys, time
from concurrent.futures import ProcessPoolExecutor
from megatron.core.child_process import end_with_parent

if __name__ == "__main__":
    pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), initializer=end_with_parent)
    print(*{pool.submit(os.getpid).result() for _ in range(4)}, flush=True)
    time.sleep(600)
"""

_WITHOUT_PARENT = """
import multiprocessing, os, sys, time
from megatron.core.child_process import end_with_parent

def late(path):
    started_by = os.getppid()
    print(os.getpid(), flush=True)
    while os.getppid() == started_by:
        time.sleep(0.01)
    end_with_parent()
    open(path, "w").close()

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=late, args=(sys.argv[1],))
    process.start()
    time.sleep(600)
"""

_TRIAL = """
import os, sys, time
from megatron.core.distributed.fsdp.tuner import Place, Trial, TrialProcess

if __name__ == "__main__":
    place = Place(rank=0, world_size=1, backend="gloo", device="cpu", store=("", 0), prefix="", timeout_s=1.0, log="")
    process = TrialProcess(Trial(build=print, step=print), place)
    process._requests.send(({}, 1))
    process._requests.recv()
    print(process._process.pid, flush=True)
    time.sleep(600)
"""


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def _wait(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize(
    ("script", "is_stopped"),
    [(_POOL, False), (_POOL, True), (_TRIAL, True), (_WITHOUT_PARENT, False)],
    ids=["pool", "stopped pool", "stopped trial of the tuner", "too late for the signal"],
)
def test_children_end_with_a_killed_parent(script: str, is_stopped: bool, tmp_path: Path) -> None:
    """A worker of a pool waits on a queue of which it has both ends; a stopped process runs no thread that could look."""
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "went on")]
    environment = os.environ | {"PYTHONPATH": str(_ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        children = [int(word) for word in parent.stdout.readline().split()]
        assert children and all(map(_is_alive, children))
        for child in children if is_stopped else ():
            os.kill(child, signal.SIGSTOP)
        parent.kill()
        parent.wait()
    try:
        assert _wait(lambda: not any(map(_is_alive, children)))
        assert not (tmp_path / "went on").exists()
    finally:
        for child in filter(_is_alive, children):
            os.kill(child, signal.SIGKILL)
