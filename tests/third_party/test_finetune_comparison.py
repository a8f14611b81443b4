"""``benchmarks/finetune_hf.py``: FSDP2 and this engine fine-tune the same models with the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("more", [[], ["--microbatches", "2", "--recompute"]], ids=["plain", "accumulated"])
def test_losses_are_those_of_fsdp2(tmp_path: Path, more: list[str]) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(REPOSITORY / "benchmarks/finetune_hf.py"), "--models", "tiny-llama,tiny-qwen3-moe", "--tokens", "64"]
    options = ["--steps", "2", "--learning-rate", "1e-2", "--tolerance", "0.002", "--output", str(tmp_path / "page.md")]
    done = subprocess.run(
        [*launch, *script, *options, *more],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "page.md").read_text()
    assert page.count("| ours |") == 2 and page.count("| ours-import |") == 2, page
    assert "within 0.2% of each other" in page, page
