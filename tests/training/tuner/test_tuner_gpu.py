"""The tuner on GPUs: a rank that really runs out of memory loses a candidate, not the run, and all memory comes back."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.launch import num_simulated_hosts
from tests.support.tiny_run import SHARDED, TINY

pytestmark = [
    pytest.mark.gpu(2),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(num_simulated_hosts() > 1, reason="torchrun's ranks need a device each"),
]

_ROOT = Path(__file__).parents[3]
_SCRIPT = """
import os, sys
import torch
import pretrain_gpt

plain = pretrain_gpt.forward_step

def forward_step(batch, model):
    if model.ddp_config.fsdp_forward_prefetch_depth == 2 and os.environ["RANK"] == "1":
        torch.empty(2**45, device="cuda")  # the other rank waits in a collective
    return plain(batch, model)

if __name__ == "__main__":
    pretrain_gpt.forward_step = forward_step
    pretrain_gpt.run_script(pretrain_gpt.main, sys.argv[1:])
"""


def _train(script: Path, flags: str) -> str:
    base = f"{TINY} {SHARDED} --deterministic-mode --attention-backend unfused".replace("gloo", "nccl")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*command, *base.split(), *flags.split()], cwd=_ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_a_rank_that_runs_out_of_memory_loses_a_candidate_and_not_the_run(tmp_path: Path) -> None:
    """What mem_get_info says is left on the fullest device is the same before and after, within the noise of contexts."""
    script, file = tmp_path / "script.py", tmp_path / "tuned.json"
    script.write_text(f"import sys\nsys.path.insert(0, {str(_ROOT)!r})\n{_SCRIPT}")
    fixed = "--overlap-param-gather --overlap-grad-reduce --create-all-gather-group --fsdp-memory-budget 1000 "
    fixed += "--suggested-communication-unit-size 1000"
    output = _train(script, f"{fixed} --fsdp-tune {file} --fsdp-tune-seconds 120")
    (entry,) = json.loads(file.read_text())["entries"]
    rows = dict(entry["measured"])
    name = "--fsdp-forward-prefetch-depth 2 --fsdp-backward-prefetch-depth 2"
    assert re.match(r"out of memory: .*\(rank 1\)", rows[name]), rows
    assert " ms a step" in rows["--cuda-graph-impl full_iteration"], rows
    assert " ms a step" in rows[name.replace("2", "3")], rows
    left = [float(gib) for gib in re.findall(r"as given: .*, ([\d.]+) GiB left", output)]
    assert len(left) >= 3 and max(left) - min(left) < 1.0, left
    assert len(re.findall(r"exact loss: (\S+)", output)) == 4
