"""When a rank fails, all processes of the run end within ten seconds, and the last words are its error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rank_processes import Start, read_until, starting, wait_until_gone, write_corpus
from tests.support.rank_processes import start as start
from tests.support.tiny_run import SHARDED, TINY

_SECONDS = 10.0
# A busy machine is no fault of the run; the time-out, which nothing here may wait for, is 180 s.
_PATIENCE_S = 12 * _SECONDS
_LONG = f"{TINY} {SHARDED} --train-iters 5000 --distributed-timeout-minutes 3".replace(
    "--num-workers 0", "--num-workers 2"
)


_DIES_IN_SETUP = """
import os, signal, sys
import megatron.training.launch.pretrain as launch
import pretrain_gpt

def die(*args, **kwargs):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return call(*args, **kwargs)

call = getattr(launch, "{where}")
setattr(launch, "{where}", die)
pretrain_gpt.run_script(pretrain_gpt.main, sys.argv[1:])
"""

_HANGS = """
import datetime, os, signal, sys, time
import pretrain_gpt
from megatron.training.launch.distributed_init import DistributedConfig

DistributedConfig.timeout = datetime.timedelta(seconds=20)
calls, forward_step = [], pretrain_gpt.forward_step

def hang(batch, model):
    calls.append(None)
    if os.environ["RANK"] == "{rank}" and len(calls) == 6:
        {how}
    return forward_step(batch, model)

pretrain_gpt.forward_step = hang
pretrain_gpt.run_script(pretrain_gpt.main, sys.argv[1:])
"""

_WAITING = {
    "lost in set-up": _DIES_IN_SETUP.format(where="process_groups"),
    "hangs": _HANGS.format(rank=1, how="time.sleep(1000)"),
    "stopped": _HANGS.format(rank=0, how="os.kill(os.getpid(), signal.SIGSTOP)"),
}
"""Scripts whose ranks wait for a time-out, mostly."""


Waiting = dict[str, list[subprocess.Popen[str]]]


@pytest.fixture(scope="module", autouse=True)
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Waiting]:
    """The ranks of these scripts, which wait while the other tests of this file run."""
    scripts = {name: tmp_path_factory.mktemp("script") / "script.py" for name in _WAITING}
    for name, script in scripts.items():
        script.write_text(_WAITING[name])
    with starting() as start_ranks:
        flags = f"{TINY} {SHARDED} --distributed-timeout-minutes 1"
        yield {name: start_ranks(flags, script=str(script)) for name, script in scripts.items()}


def test_an_error_of_one_rank_ends_all_though_loader_processes_ignore_sigterm(start: Start, tmp_path: Path) -> None:
    """Python would wait at exit for processes that ignore what is to end them."""
    flags = _LONG.replace("--mock-data", "") + " " + write_corpus(tmp_path / "corpus", bad_token=500)
    processes = start(flags)
    error = "token ids must be below the tokenizer's 100, got 500 in documents"
    outputs = [read_until(process, error) for process in processes]
    wait_until_gone(processes, _PATIENCE_S)
    outputs = [seen + process.communicate()[0] for seen, process in zip(outputs, processes, strict=True)]
    for output, process in zip(outputs, processes, strict=True):
        assert process.returncode == 1, output
        assert error in output.strip().splitlines()[-1], "the error is the last thing printed"
    assert any("failed with ValueError" in output for output in outputs), "one of them says who failed first"


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_rank_is_named_also_where_it_serves_the_store(start: Start, victim: int) -> None:
    processes = start(_LONG.replace("--num-workers 2", "--num-workers 0"))
    read_until(processes[0], "iteration        3/")
    processes[victim].kill()
    wait_until_gone(processes, _PATIENCE_S)
    last = processes[1 - victim].communicate()[0].strip().splitlines()[-1]
    assert ("rank 0, which serves the store" if victim == 0 else "no sign of life within 6 s from rank 1") in last


def test_ranks_end_with_a_torchrun_that_is_killed() -> None:
    """It cannot end them itself: without this they keep training, log a stack trace every other second and keep the lock."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "pretrain_gpt.py",
    ]
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, *_LONG.split()],
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as torchrun:
        try:
            read_until(torchrun, "iteration        2/")
            children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
            ranks = [pid for pid in children if b"pretrain_gpt.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
            assert len(ranks) == 2
        finally:
            torchrun.kill()
        deadline = time.monotonic() + _PATIENCE_S
        while left := [pid for pid in ranks if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, f"{left} are left"
            time.sleep(0.05)


def test_a_command_line_that_one_rank_refuses_ends_all_at_once(start: Start) -> None:
    begin = time.monotonic()
    processes = start(_LONG, of_rank_1="--lrr 1")
    outputs = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert time.monotonic() - begin < 170, "the time-out is 180 s"
    assert outputs[1] == "pretrain_gpt.py: error: --lrr is unknown; did you mean --lr?\n"
    assert outputs[0].startswith("pretrain_gpt.py: error: rank 1 refuses its command line:\n")
    assert "--lrr is unknown" in outputs[0]


def test_a_refusal_of_all_ranks_is_reported_once(start: Start) -> None:
    processes = start(f"{_LONG} --lrr 1")
    outputs = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert outputs == ["pretrain_gpt.py: error: --lrr is unknown; did you mean --lr?\n", ""]


def _check_lost_in_set_up(processes: list[subprocess.Popen[str]]) -> None:
    output = processes[0].communicate(timeout=400)[0]
    assert processes[0].returncode == 1 and processes[1].wait() == -signal.SIGKILL
    assert "no sign of life within 6 s from rank 1" in output.strip().splitlines()[-1]


def test_a_rank_that_is_lost_in_set_up_is_named(waiting: Waiting) -> None:
    _check_lost_in_set_up(waiting["lost in set-up"])


@pytest.mark.slow
def test_a_rank_that_is_lost_before_the_process_groups_is_named(start: Start, tmp_path: Path) -> None:
    """The others wait for the time-out, a minute."""
    script = tmp_path / "script.py"
    script.write_text(_DIES_IN_SETUP.format(where="initialize_distributed"))
    _check_lost_in_set_up(start(f"{TINY} {SHARDED} --distributed-timeout-minutes 1", script=str(script)))


def test_a_time_out_names_who_has_not_come_and_what_that_rank_did_last(
    waiting: Waiting,
) -> None:
    """Each step has two microbatches, so that rank 1 hangs before the last forward of the third step."""
    processes = waiting["hangs"]
    outputs = [process.communicate(timeout=400)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    waits = outputs[0].strip().splitlines()
    assert re.search(
        r"all-gather of the weights of \S+ and \d+ more \(forward\) must be joined by all of ranks", outputs[0]
    )
    assert "rank 0 waited at iteration 3, microbatch 1, all-gather" in waits[-1]
    assert "not come to where the others wait: rank 1 (host" in waits[-1]
    assert re.search(r"rank 1 was last at iteration 3, microbatch 1, all-gather .*, as it said \d+ s ago", waits[-1])
    assert "rank 0 has begun no collective for 18 s, at iteration 3" in outputs[0], (
        "NCCL may end it without an exception"
    )
    assert "rank 1 ends, since rank 0 failed with RuntimeError: all-gather of the weights of" in outputs[1]


def test_a_stopped_rank_0_is_named(waiting: Waiting) -> None:
    """The store that it serves does not answer, and its connections stay open."""
    processes = waiting["stopped"]
    output = processes[1].communicate(timeout=400)[0]
    assert processes[1].returncode == 1, output
    last = output.strip().splitlines()[-1]
    assert (
        "rank 1 waited at iteration 3, microbatch 1" in last and "rank 0, which serves the store on 127.0.0.1:" in last
    )
