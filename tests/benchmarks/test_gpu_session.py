"""The script for a GPU machine goes on whatever fails; a stand-in for python says what it was asked."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Two GPUs; comparisons of the 7.2B model fail, the profile hangs when told to, everything else says how it was started.
_STAND_IN = """#!/usr/bin/env bash
if [ "$1" = -c ]; then echo 2; exit; fi
echo "NVLS=$NCCL_NVLS_ENABLE MULTICAST=$TORCH_SYMM_MEM_DISABLE_MULTICAST $*"
case "$*" in *"compare.py --model 7.2b"*) exit 3 ;; *--profile*) sleep "${HANG:-0}" ;; esac
"""


def _session(folder: Path, *parts: str, **environment: str) -> tuple[int, str, str]:
    """(exit status, summary, log) of a session of these parts."""
    python = folder / "python"
    python.write_text(_STAND_IN)
    python.chmod(0o755)
    command = ["bash", "benchmarks/gpu_session.sh", str(folder / "out"), *parts]
    environment = {**os.environ, "PYTHON": str(python), **environment}
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    out = folder / "out"
    return answer.returncode, (out / "summary.txt").read_text(), (out / "session.log").read_text()


def test_a_part_that_fails_stops_no_other(tmp_path: Path):
    status, summary, log = _session(tmp_path)
    assert status == 1
    words = [line.split(" in ")[0] for line in summary.splitlines()]
    assert words == [
        "tests: passed",
        "losses: passed",
        "1.1b: passed",
        "7.2b: FAILED with status 3",
        "profile: passed",
        "pretrain: passed",
    ]
    assert "--nproc-per-node 2 benchmarks/compare_pretrain.py" in log and "--num-layers 22" in log


def test_multicast_is_off_in_every_part(tmp_path: Path):
    _, _, log = _session(tmp_path)
    starts = [line for line in log.splitlines() if line.startswith("NVLS=")]
    assert len(starts) == 6
    assert all(line.startswith("NVLS=0 MULTICAST=1 ") for line in starts)


def test_an_unknown_part_is_named_and_the_rest_runs(tmp_path: Path):
    status, summary, _ = _session(tmp_path, "nonsense", "losses")
    assert status == 1
    assert summary.startswith("nonsense: must be one of tests, losses, ")
    assert "losses: passed" in summary


def test_a_part_that_hangs_is_stopped(tmp_path: Path):
    """Its processes too: the session waits for none of them."""
    status, summary, _ = _session(tmp_path, "profile", "pretrain", HANG="300", LIMIT="2")
    assert status == 1
    assert "profile: STOPPED after its 2 s" in summary
    assert "pretrain: passed" in summary
