"""The comparison of precisions trains each run from the same start, and its page says what was asked and reached."""

from __future__ import annotations

import csv
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from benchmarks import compare_precisions
from megatron.training.arguments import parse_settings
from tests.support import fake_transformer_engine
from tests.support.launch import run_ranks

FLAGS = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4 --num-query-groups 2 "
    "--group-query-attention --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 1 --global-batch-size 4 --train-iters 6 --lr 1e-3 --bf16 --use-megatron-fsdp "
    "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce "
    "--overlap-param-gather --init-model-with-meta-device --mock-data --tokenizer-type NullTokenizer --vocab-size 255 "
    "--eval-interval 1000 --eval-iters 0 --log-interval 2 --num-workers 0 --distributed-backend gloo"
)
RUNS = "local,bf16,delayed,tensorwise+wide,delayed+graph"
# Of a layer: projections to queries, keys and values, and back; both of the MLP, whose first has gates beside.
LINEAR_NUMEL = 64 * (64 + 2 * 32) + 64 * 64 + 2 * 160 * 64 + 64 * 160


def _train(page: str, runs: str) -> int:
    fake_transformer_engine.install()
    return compare_precisions.main(
        [page, "--runs", runs, "--warm-up", "2", "--last", "4", "--bar-loss", "0.01", *FLAGS.split()]
    )


def test_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    """Two ranks, two microbatches. In FP8 each gather of a layer brings a byte for each element of the other rank's half."""
    page = tmp_path / "page.md"
    assert run_ranks(2, _train, str(page), RUNS) == [0, 0]
    text = page.read_text()
    rows = {row[1].strip(): row for row in (line.split("|") for line in text.splitlines()) if len(row) == 11}
    assert list(rows)[2:] == ["local", "bf16", "delayed", "tensorwise+wide"]
    assert "- delayed+graph did not run: CUDA graphs need CUDA devices" in text
    assert len(re.findall(r"^- \S+: final loss \S+ from local's, allowed 1\.0%: met$", text, re.MULTILINE)) == 2

    def gathered(name: str) -> dict[str, int]:
        return {dtype: int(nbytes.replace(",", "")) for nbytes, dtype in re.findall(r"([\d,]+) (\w+)", rows[name][6])}

    wide, narrow = gathered("bf16"), gathered("delayed")
    assert narrow["uint8"] == 2 * 2 * 2 * LINEAR_NUMEL // 2, "2 layers, forward and backward of 2 microbatches"
    assert wide["bfloat16"] == narrow["bfloat16"] + 2 * narrow["uint8"]
    assert gathered("local") == wide == gathered("tensorwise+wide")
    # Four weights of each layer have a scale, each in memory of its own of 64 floats; they are brought up to date once.
    assert int(rows["delayed"][7].replace(",", "")) == 2 * 4 * 64 * 4 and int(rows["bf16"][7]) == 0

    with page.with_suffix(".csv").open(newline="") as file:
        losses = [(row["run"], int(row["iteration"]), float(row["loss"])) for row in csv.DictReader(file)]
    assert [row[:2] for row in losses] == [(name, at) for name in RUNS.split(",")[:4] for at in (2, 4, 6)]
    first, of_local = losses[:3], losses[0][2]
    assert first[2][2] < of_local and all(abs(loss - of_local) < 0.01 for _, at, loss in losses if at == 2)
    picture = ElementTree.parse(page.with_suffix(".svg")).getroot()
    curves = picture.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(curve.attrib["points"].split()) for curve in curves] == [3] * 4


def test_options_change_the_flags() -> None:
    assert compare_precisions.flags_of("local") == ["--transformer-impl", "local"]
    assert "--fp8-param-gather" in compare_precisions.flags_of("blockwise")
    wide = compare_precisions.flags_of("delayed+wide+attention")
    assert "--fp8-param-gather" not in wide and "--fp8-dot-product-attention" in wide
    for option in compare_precisions.OPTIONS:
        if option != "graph":
            parse_settings(
                [*FLAGS.split(), *compare_precisions.flags_of(f"delayed+{option}")]
            )  # raises where it is no flag
    for name in ("fp16", "bf16+magic"):
        with pytest.raises(ValueError, match="a run must be one of local, bf16, delayed"):
            compare_precisions.flags_of(name)


def test_a_run_without_timed_iterations_is_refused_before_it_starts() -> None:
    with pytest.raises(SystemExit, match="--train-iters must be more than --warm-up 6, got 6"):
        compare_precisions.main(["page.md", "--runs", "local", "--warm-up", "6", *FLAGS.split()])
