"""The script for a GPU machine goes on whatever fails; a stand-in for python says what it was asked."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from benchmarks.engines.registry import engine_kind
from benchmarks.tune_check import CASES

ROOT = Path(__file__).resolve().parents[2]
_SCRIPT = (ROOT / "benchmarks/gpu_session.sh").read_text()
_HEAD = _SCRIPT.split("set -uo")[0].split("PART:")[1].split("Each part")[0]

# Two GPUs; comparisons of the 7.2B model fail, the profile hangs when told to, everything else says how it was started.
_STAND_IN = """#!/usr/bin/env bash
if [ "$1" = -c ]; then echo 2; exit; fi
echo "NVLS=$NCCL_NVLS_ENABLE MULTICAST=$TORCH_SYMM_MEM_DISABLE_MULTICAST SEGMENTS=${PYTORCH_CUDA_ALLOC_CONF-} PATH=$PYTHONPATH $*"
case "$*" in *"compare.py --model 7.2b"*) exit 3 ;; *--profile*) sleep "${HANG:-0}" ;; esac
"""


def _session(folder: Path, *parts: str, **environment: str) -> tuple[int, str, str]:
    """(exit status, summary, log) of a session of these parts."""
    python = folder / "python"
    python.write_text(_STAND_IN)
    python.chmod(0o755)
    command = ["bash", "benchmarks/gpu_session.sh", str(folder / "out"), *parts]
    environment = {**os.environ, "PYTHON": str(python), **environment}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    out = folder / "out"
    return answer.returncode, (out / "summary.txt").read_text(), (out / "session.log").read_text()


def test_a_part_that_fails_stops_no_other(tmp_path: Path) -> None:
    status, summary, log = _session(tmp_path)
    assert status == 1
    words = [line.split(" in ")[0] for line in summary.splitlines()]
    assert words == [
        "tests: passed",
        "bars-1.1b: passed",
        "bars-7.2b: FAILED with status 3",
        "bars-7.2b-1024: FAILED with status 3",
    ]
    assert "--nproc-per-node 2 benchmarks/compare.py --model 1.1b" in log


def test_multicast_is_off_in_every_part(tmp_path: Path) -> None:
    _, _, log = _session(tmp_path)
    starts = [line for line in log.splitlines() if line.startswith("NVLS=")]
    assert sum("benchmarks/compare.py" in line for line in starts) == 3
    assert sum("-m pytest -m gpu" in line for line in starts) > 20, "one start for each file"
    assert all(line.startswith("NVLS=0 MULTICAST=1 ") for line in starts)


def test_an_unknown_part_is_named_and_the_rest_runs(tmp_path: Path) -> None:
    status, summary, _ = _session(tmp_path, "nonsense", "bars-1.1b")
    assert status == 1
    assert summary.startswith("nonsense: must be one of those that ")
    assert "bars-1.1b: passed" in summary


def test_a_part_that_hangs_is_stopped(tmp_path: Path) -> None:
    """Its processes too: the session waits for none of them."""
    status, summary, _ = _session(tmp_path, "profile-1.1b", "pretrain-1.1b", HANG="300", LIMIT="2")
    assert status == 1
    assert "profile-1.1b: STOPPED after its 2 s" in summary
    assert "pretrain-1.1b: passed" in summary


def test_every_part_is_named_in_the_head_and_starts_something(tmp_path: Path) -> None:
    """Each name has a limit and a command line; llama's script belongs to somebody else, who may not have brought it."""
    cases = re.findall(r"^ +([\w.-]+)\) ", _SCRIPT.split("run_part() {")[1].split("\n}")[0], re.M)
    parts = [*cases, *(f"tune-{name}" for name in CASES)]
    assert len(parts) == len(set(parts)) >= 32, parts
    assert [part for part in parts if not re.search(rf"(?<![\w-]){re.escape(part)}(?![\w-])", _HEAD)] == []
    parts.remove("llama")
    (tmp_path / "corpus.bin").write_bytes(b"text")
    _, summary, log = _session(tmp_path, *parts, DATA=str(tmp_path / "corpus"))
    assert len(summary.splitlines()) == len(parts)
    started = [line for line in log.splitlines() if line.startswith("NVLS=")]
    assert len([line for line in started if "-m pytest" not in line]) == len(parts) - 1, (
        "a start each, but for the tests"
    )
    named = {f"--engines {engines}" for engines in re.findall(r"--engines (\S+)", log)}
    for engines in named:
        for name in engines.removeprefix("--engines ").split(","):
            engine_kind(name)  # raises where there is none


def test_symmetric_memory_runs_without_expandable_segments(tmp_path: Path) -> None:
    _, _, log = _session(tmp_path, "bars-1.1b", "symm-1.1b")
    assert [line.endswith("--expandable-segments") for line in log.splitlines() if line.startswith("NVLS=")] == [
        True,
        False,
    ]
    assert "SEGMENTS=expandable_segments:True" in log and "SEGMENTS= " in log


def test_losses_are_compared_over_fifty_steps(tmp_path: Path) -> None:
    _, _, log = _session(tmp_path, "losses50")
    assert "--steps 50 " in log and "--check-losses --deterministic" in log


def test_what_is_compared_and_where_it_lies_can_be_said(tmp_path: Path) -> None:
    _, _, log = _session(
        tmp_path, "bars-1.1b", ENGINES="fsdp2,ours-peer+nosync", STEPS="3", EXTRA_PYTHONPATH="shelf:/elsewhere"
    )
    assert "--engines fsdp2,ours-peer+nosync --steps 3 " in log
    assert f":{ROOT}/shelf:/elsewhere" in log
