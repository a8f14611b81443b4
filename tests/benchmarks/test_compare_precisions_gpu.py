"""On two GPUs with transformer-engine, a step in FP8 gathers half of the bytes of weights that it gathers in bf16."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from benchmarks import compare_precisions
from megatron.core.extensions import why_missing
from tests.support.launch import run_ranks

pytestmark = [pytest.mark.gpu(2), pytest.mark.filterwarnings("ignore")]

FLAGS = (
    "--num-layers 4 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 2 --seq-length 128 "
    "--max-position-embeddings 128 --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 "
    "--global-batch-size 4 --train-iters 8 --lr 1e-3 --bf16 --use-megatron-fsdp --use-distributed-optimizer "
    "--data-parallel-sharding-strategy optim_grads_params --overlap-grad-reduce --overlap-param-gather "
    "--init-model-with-meta-device --mock-data --tokenizer-type NullTokenizer --vocab-size 511 --eval-interval 1000 "
    "--eval-iters 0 --log-interval 1 --num-workers 0 --disable-jit-fuser"
)
RUNS = ("bf16", "delayed", "tensorwise", "blockwise")
# Of the four layers: projections to queries, keys and values, and back; both of the MLP, whose first has gates beside.
LINEAR_NUMEL = 4 * (3 * 256 * 256 + 256 * 256 + 2 * 512 * 256 + 256 * 512)


def _train(page: str, transport: str) -> int:
    warnings.simplefilter("ignore")
    own = [page, "--runs", ",".join(RUNS), "--warm-up", "2", "--last", "4", "--bar-loss", "0.02"]
    return compare_precisions.main([*own, *FLAGS.split(), "--fsdp-transport", transport])


@pytest.mark.parametrize("transport", ["nccl", "peer_copy"])
def test_bytes_gathered_in_fp8_are_half_of_those_in_bf16(transport: str, tmp_path: Path) -> None:
    if (reason := why_missing("transformer_engine_layers")) is not None:
        pytest.skip(f"transformer-engine cannot be used: {reason}")
    page = tmp_path / "page.md"
    assert run_ranks(2, _train, str(page), transport, backend="nccl") == [0, 0]
    text = page.read_text()
    rows = {row[1].strip(): row for row in (line.split("|") for line in text.splitlines()) if len(row) == 11}
    gathered = {
        name: {dtype: int(nbytes.replace(",", "")) for nbytes, dtype in re.findall(r"([\d,]+) (\w+)", rows[name][6])}
        for name in RUNS
    }
    for name in RUNS[1:]:
        # Each rank has half; forward and backward.
        assert gathered[name]["uint8"] == 2 * LINEAR_NUMEL // 2, (name, gathered)
        assert gathered["bf16"]["bfloat16"] == gathered[name]["bfloat16"] + 2 * gathered[name]["uint8"], (
            name,
            gathered,
        )
        assert 0 < int(rows[name][7].replace(",", "")) <= LINEAR_NUMEL // 128, "scales"
        assert re.search(rf"^- {name}: final loss \S+ from bf16's, allowed 2\.0%: met$", text, re.MULTILINE), text
