"""``examples/finetune_hf.py`` learns, saves, and samples with plain transformers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

REPOSITORY = Path(__file__).resolve().parents[2]


def test_both_ways_of_fine_tuning_lower_the_held_out_loss(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(REPOSITORY / "examples/finetune_hf.py"), "--output-folder", str(tmp_path), "--steps", "12"]
    done = subprocess.run(
        [*launch, *script, "--samples", "4"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"(full|lora): held-out loss ([\d.]+) -> ([\d.]+)", done.stdout)
    assert [name for name, *_ in losses] == ["full", "lora"], done.stdout
    assert all(float(after) < float(before) for _, before, after in losses), losses
    assert len(re.findall(r"^['\"]def __init__\(self", done.stdout, re.MULTILINE)) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"base", "full", "lora"}
    assert (tmp_path / "lora" / "adapter_model.safetensors").exists()
