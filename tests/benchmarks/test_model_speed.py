"""The benchmarks of the model run as they stand, on a tiny shape where there is no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import model_speed
from tests.support.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]


def test_the_shape_is_llama_3_8bs() -> None:
    """Its 8,030,261,248 parameters are 32 layers, two matrices of the vocabulary, and 65 norms."""
    shape = model_speed.LLAMA_3_8B
    assert 32 * shape.layer_weights + 2 * 128256 * 4096 + 65 * 4096 == 8_030_261_248
    assert shape.head_flops == 6 * 8192 * 128256 * 4096
    # Attention's causal half: 2 * t^2 * h multiply-adds halved in forward, twice that in backward.
    assert shape.layer_flops == 6 * 8192 * shape.layer_weights + 3 * 2 * 8192**2 * 4096


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it takes the full shape, by hand")
def test_each_part_is_a_row_of_the_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["model_speed.py", "--steps", "1", "--layers", "1", "--ablations"])
    model_speed.main()
    rows = re.findall(r"^\| (.+?) \| \d", capsys.readouterr().out, re.MULTILINE)
    names = ["fused", "plain", *(f"without {name}" for name in model_speed.FUSIONS), "fused, not compiled"]
    names += ["fused, flash attention", "fused, cuDNN attention"]
    assert rows == [f"{part}, {name}" for name in names for part in ("1 layers", "output layer and loss")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it trains the full model, by hand")
def test_the_llama_script_trains_and_prints_the_median(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": warm_python(), "NPROC": "1", "ITERS": "8", "EXTRA": "--disable-jit-fuser"}
    command = ["bash", "benchmarks/llama3_8b.sh", str(tmp_path)]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert re.search(r"^median of iterations 7 to 8: [\d.]+ ms, [\d.]+ tokens/s per GPU", answer.stdout, re.MULTILINE)
    assert "disable_jit_fuser=True" in (tmp_path / "pretrain.log").read_text()
