"""The scripts for several hosts pass valid flags and the right addresses; the drill really loses a host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.multi_node import drill
from megatron.training.arguments import parse_settings

SCRIPTS = Path(drill.__file__).parent
TINY = [*drill.MODEL_FLAGS.split(), "--train-iters", "4"]
HOST = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "first", "RANKS_PER_NODE": "2"}


def _stub(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)
    return path


def _start_host(
    folder: Path, settings: dict[str, str], *, python: str, flags: list[str] = TINY
) -> subprocess.Popen[str]:
    """train.sh with a stand-in for Python."""
    _stub(folder, "sleep", "exit 0")
    environment = os.environ | HOST | {"RUN": str(folder / "run"), "PYTHON": str(_stub(folder, "python", python))}
    return subprocess.Popen(
        ["bash", str(SCRIPTS / "train.sh"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | {"PATH": f"{folder}:{os.environ['PATH']}"} | settings,
    )


def _host(folder: Path, *, python: str, **settings: str) -> tuple[int, str]:
    process = _start_host(folder, settings, python=python)
    output = process.communicate(timeout=300)[0]
    return process.returncode, output


@pytest.mark.parametrize("script", ["train.sh", "slurm.sbatch"])
def test_scripts_are_lawful_bash(script: str) -> None:
    subprocess.run(["bash", "-n", str(SCRIPTS / script)], check=True)


@pytest.mark.parametrize("missing", ["NNODES", "NODE_RANK", "MASTER_ADDR", "RUN"])
def test_a_missing_setting_is_named(missing: str, tmp_path: Path) -> None:
    status, output = _host(tmp_path, python="echo started", **{missing: ""})
    assert status == 2 and f"{missing} must be set" in output and "started" not in output


@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_a_host_is_an_instance_of_hybrid_sharding(outer: str, tmp_path: Path) -> None:
    """The inner axis is within a host: as many instances as hosts, and ranks of a host are neighbours."""
    status, output = _host(tmp_path, python='printf "%s\\n" "$@"', OUTER_SHARDING=outer)
    words = output.split()
    launcher, flags = words[: words.index("pretrain_gpt.py")], words[words.index("pretrain_gpt.py") + 1 :]
    assert status == 0 and "--nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr first" in " ".join(launcher)
    settings = parse_settings(flags, world_size=4)
    assert settings.ddp.num_distributed_optimizer_instances == 2
    assert settings.ddp.outer_dp_sharding_strategy == outer
    assert settings.loop.exit_signal_handler and settings.distributed.timeout_minutes == 10
    assert settings.checkpoint.save == settings.checkpoint.load == str(tmp_path / "run" / "checkpoints")


def test_all_ranks_may_share_as_if_they_were_on_one_host(tmp_path: Path) -> None:
    _, output = _host(tmp_path, python='echo "$@"', OUTER_SHARDING="all")
    assert "--num-distributed-optimizer-instances" not in output
    status, output = _host(tmp_path, python="echo started", OUTER_SHARDING="some")
    assert status == 2 and "must be no_shard, optim or all, got some" in output and "started" not in output


def test_a_failed_host_starts_again_as_often_as_asked(tmp_path: Path) -> None:
    status, output = _host(tmp_path, python="echo started; exit 3", RESTARTS="2")
    assert (
        status == 3
        and output.count("started") == 3
        and "ended with status 3; starting again, at most 1 times" in output
    )
    status, output = _host(tmp_path, python="echo started", RESTARTS="2")
    assert status == 0 and output.count("started") == 1


def test_a_run_that_ends_before_it_is_complete_has_a_status_of_its_own(tmp_path: Path) -> None:
    """Who restarts what has failed must not take it for done, and must leave alone what is."""
    tracker = "$RUN/checkpoints/latest_checkpointed_iteration.txt"
    status, output = _host(tmp_path, python=f"echo 30 > {tracker}", COMPLETE_AT="31", RESTARTS="2")
    assert status == 75 and "training ended after iteration 30, and is complete at 31" in output
    assert _host(tmp_path, python="exit 0", COMPLETE_AT="30")[0] == 0
    assert _host(tmp_path, python="exit 3", COMPLETE_AT="30")[0] == 3


def test_what_operators_of_torchrun_set_is_read(tmp_path: Path) -> None:
    theirs = {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "gpt-0.gpt", "PET_MASTER_PORT": "29400"}
    ours = dict.fromkeys((*HOST, "MASTER_PORT"), "")
    _, output = _host(tmp_path, python='echo "$@"', **ours, **theirs, PET_NPROC_PER_NODE="8")
    assert "--nnodes 4 --node-rank 3 --nproc-per-node 8 --master-addr gpt-0.gpt --master-port 29400" in output


@pytest.mark.parametrize(("under_slurm", "heard"), [(False, True), (True, False)])
def test_sigterm_reaches_torchrun_except_under_slurm(under_slurm: bool, heard: bool, tmp_path: Path) -> None:
    """torchrun gives ranks 30 s; Slurm signals the ranks themselves, which then have as long as the job has."""
    # A process whose parent ignores a signal cannot trap it in bash: then only the file ends it.
    wait = f"trap 'echo heard; exit 0' TERM; echo up; while [[ ! -e {tmp_path}/end ]]; do /bin/sleep 0.05; done"
    process = _start_host(tmp_path, {"SLURM_JOB_ID": "1" if under_slurm else ""}, python=f'echo "$@"; {wait}')
    assert process.stdout is not None
    flags = process.stdout.readline()
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    if not heard:  # or the process ends by the signal, however long that takes
        time.sleep(0.5)
        (tmp_path / "end").touch()
    assert ("heard" in process.communicate(timeout=300)[0]) == heard
    assert ("--signals-to-handle SIGINT,SIGHUP,SIGQUIT" in flags) == under_slurm and process.returncode == 0


@pytest.mark.parametrize("progress", [False, True])
def test_a_slurm_job_is_queued_again_only_if_it_came_further(progress: bool, tmp_path: Path) -> None:
    tracker = tmp_path / "run" / "checkpoints" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir(parents=True)
    saves = f"echo 500 > {tracker}" if progress else ":"
    _stub(tmp_path, "srun", f'printf "%s\\n" "$@" "$MASTER_ADDR" "$NNODES"; {saves}; exit 1')
    _stub(tmp_path, "scontrol", '[[ "$1" == show ]] && printf "first\\nsecond\\n" || echo "scontrol $*"')
    job = {"SLURM_SUBMIT_DIR": str(SCRIPTS.parents[1]), "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_ID": "77"}
    job |= {"SLURM_JOB_NODELIST": "x", "RUN": str(tmp_path / "run"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(SCRIPTS / "slurm.sbatch")], env=os.environ | job, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and ("scontrol requeue 77" in done.stdout) == progress
    words = done.stdout.splitlines()
    script = next(i for i, word in enumerate(words) if word.endswith("train.sh"))
    end = words.index("first")
    assert words[end : end + 2] == ["first", "4"]
    settings = parse_settings(words[script + 1 : end], world_size=32)
    assert settings.batch.num_microbatches == 16


def test_the_drill_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert drill.main([]) == 2
    assert "need root" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("mode", [[], ["--stop-processes"]])
def test_a_lost_host_is_named_and_training_resumes(mode: list[str], tmp_path: Path) -> None:
    """In namespaces where they can be made, and with stopped processes anywhere; about 3 minutes each."""
    if not mode and (reason := drill.missing_for_namespaces()) is not None:
        pytest.skip(reason)
    flags = ["--ranks-per-host", "1", "--iterations", "60", "--cut-after", "20", "--folder", str(tmp_path / "drill")]
    subprocess.run([sys.executable, str(SCRIPTS / "drill.py"), *mode, *flags], check=True, timeout=1400)
