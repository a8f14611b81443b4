"""Profiles and the record of memory on a GPU: what is written, and that it names what ran and what was alive."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from pathlib import Path

import pytest
import torch

from tests.support.launch import run_ranks
from tests.support.tiny_run import SHARDED, TINY, Run, train_one

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

MODEL = (
    f"{TINY} {SHARDED} --distributed-backend nccl --bf16 --hidden-size 256 --num-attention-heads 2 --seq-length 128 "
    "--max-position-embeddings 128 --transformer-impl local --overlap-grad-reduce --overlap-param-gather"
)
STEPS = "--profile --profile-step-start 2 --profile-step-end 4"


def _train(folder: str) -> dict[str, Run]:
    warnings.simplefilter("ignore")
    torch_profile = (
        f"{STEPS} --use-pytorch-profiler --record-memory-history --memory-snapshot-path {folder}/snapshot.pickle "
        f"--pytorch-profiler-collect-callstack --tensorboard-dir {folder}/tensorboard"
    )
    runs = {
        "none": train_one(MODEL.split()),
        "torch": train_one(f"{MODEL} {torch_profile}".split()),
        "nsys": train_one(f"{MODEL} {STEPS} --nvtx-ranges --record-shapes".split()),
    }
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    torch.cuda.memory._record_memory_history(enabled=None)
    return runs


def test_a_profile_and_a_snapshot_can_be_read_without_a_browser(tmp_path: Path) -> None:
    runs: dict[str, Run] = run_ranks(1, _train, str(tmp_path), backend="nccl")[0]
    assert {name: run.error for name, run in runs.items() if run.error} == {}
    for name in ("torch", "nsys"):
        assert runs[name].losses == pytest.approx(runs["none"].losses, rel=1e-3), name  # backward adds in any order
    summary = (tmp_path / "torch_profile/rank-0.txt").read_text()
    assert summary.startswith("Sums over 2 steps; a step is ")
    for words in (" kernels of compute, ", "Device: span ", " idle ", "Kernels by time (ms, runs, name):", " aten::"):
        assert words in summary, summary
    assert " 0 launches" not in summary
    text = (tmp_path / "snapshot_0.txt").read_text()
    assert text.startswith("Device 0: ") and "MiB alive at the peak of" in text
    assert "megatron/core/distributed/fsdp/" in text, text
    with (tmp_path / "snapshot_0.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    alive = sum(segment["active_size"] for segment in snapshot["segments"])
    peak = float(text.split()[2])
    assert peak >= alive / 2**20 > 0
    assert "MiB alive at the end of" in (tmp_path / "snapshot_oom_rank_0.txt").read_text()
