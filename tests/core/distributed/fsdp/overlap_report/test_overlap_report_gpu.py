"""Overlap reports on GPUs, of eager steps and of a CUDA graph: kernels find their units."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from megatron.core.distributed.fsdp.overlap_report import read_report
from tests.support.launch import run_ranks
from tests.support.tiny_run import SHARDED, TINY, Run, train_one

pytestmark = [pytest.mark.gpu(2), pytest.mark.filterwarnings("ignore")]

MODEL = (
    f"{TINY} {SHARDED} --distributed-backend nccl --bf16 --hidden-size 256 --num-attention-heads 2 --seq-length 256 "
    "--max-position-embeddings 256 --transformer-impl local --overlap-grad-reduce --overlap-param-gather "
    "--use-distributed-optimizer --attention-dropout 0 --hidden-dropout 0 --train-iters 12"
)


def _train(folder: str) -> dict[str, Run]:
    warnings.simplefilter("ignore")
    lines = {
        "none": MODEL,
        "eager": f"{MODEL} --overlap-report {folder}/eager --overlap-report-step 8",
        "nccl": f"{MODEL} --fsdp-transport nccl --overlap-report {folder}/nccl --overlap-report-step 8",
        "graph": f"{MODEL} --cuda-graph-impl full_iteration --overlap-report {folder}/graph --overlap-report-step 9",
    }
    return {name: train_one(line.split()) for name, line in lines.items()}


def test_kernels_of_eager_and_captured_steps_find_their_units(tmp_path: Path) -> None:
    runs: dict[str, Run] = run_ranks(2, _train, str(tmp_path), backend="nccl")[0]
    assert {name: run.error for name, run in runs.items() if run.error} == {}
    for name in ("eager", "graph"):
        assert runs[name].losses == pytest.approx(runs["none"].losses, rel=1e-3), "backward adds in any order"
    for name in ("eager", "nccl", "graph"):
        _check(read_report(tmp_path / name), name)


def _check(report: dict[str, Any], name: str) -> None:
    totals = report["totals"]
    parts = sum(totals[part] for part in ("compute", "exposed", "host", "latency"))
    assert parts == pytest.approx(report["step_ms"], abs=0.01), name
    assert not any("outside of units" in note for note in report["notes"]), (name, report["notes"])
    rows = {row["name"]: row for row in report["rows"]}
    for layer in ("decoder.layers.0", "decoder.layers.1"):
        for direction in ("forward", "backward"):
            row = rows[f"{layer} {direction}"]
            assert row["compute"] > 0 and row["gather_nbytes"] >= 0, (name, row)
        assert rows[f"{layer} forward"]["gather"] > 0 and rows[f"{layer} forward"]["gather_gbps"] > 0, (name, rows)
        assert rows[f"{layer} backward"]["reduce"] > 0, (name, rows)
    outside = sum(row["compute"] for row in report["rows"] if row["unit"] == "outside of units")
    assert outside < 0.6 * totals["compute"], (name, outside, totals)
    peak = report["memory"]["peak"]
    for kind in ("weights", "optimizer", "gathered weights", "gradient staging", "activations"):
        assert peak[kind] > 0, (name, peak)
    assert len(report["ranks"]) == 2 and min(rank["compute"] for rank in report["ranks"]) > 0
