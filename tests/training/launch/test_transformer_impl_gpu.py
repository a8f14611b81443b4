"""transformer-engine itself from the command line: bf16 and each recipe of FP8 train as the local layers do, and resume."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from megatron.core.extensions import why_missing
from tests.support.conversations import write_sft
from tests.support.launch import run_ranks
from tests.support.tiny_run import SHARDED, TINY, Run, train_one

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

MODEL = (
    f"{TINY} {SHARDED} --distributed-backend nccl --bf16 --hidden-size 256 --num-attention-heads 2 --seq-length 128 "
    "--max-position-embeddings 128 --attention-dropout 0 --hidden-dropout 0 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --train-iters 8 --lr 1e-3 --disable-jit-fuser"
)
FP8 = "--fp8-format hybrid --fp8-recipe"
RUNS = {
    "local": "--transformer-impl local",
    "bf16": "",
    "delayed": f"{FP8} delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
    "recomputed": (
        f"{FP8} delayed --fp8-param-gather --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "tensorwise": f"{FP8} tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 0",
    "blockwise": f"{FP8} blockwise --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "attention": f"{FP8} delayed --fp8-dot-product-attention",
    "weights": f"{FP8} delayed --fp8-param-gather",
    "experts": f"{FP8} tensorwise --num-experts 4 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2",
    "experts local": "--transformer-impl local --num-experts 4 --moe-grouped-gemm --moe-aux-loss-coeff 1e-2",
}


def _train(folder: str, talk: str) -> dict[str, Run]:
    warnings.simplefilter("ignore")
    # First, since it cannot be loaded once torch has loaded parts of another cuDNN, where a machine has two.
    assert why_missing("transformer_engine_layers") is None
    runs = {name: train_one(f"{MODEL} {flags}".split()) for name, flags in RUNS.items()}
    half = f"{MODEL} {RUNS['delayed']} --save {folder} --save-interval 4"
    runs["saved"] = train_one(f"{half} --exit-interval 4".split())
    runs["resumed"] = train_one(f"{half} --load {folder}".split())
    runs["resumed in bf16"] = train_one(f"{MODEL} --transformer-impl local --load {folder} --ckpt-step 4".split())
    talk = f"{MODEL.replace('--mock-data', '')} {talk}"
    runs["conversations"] = train_one(talk.split())
    runs["conversations local"] = train_one(f"{talk} --transformer-impl local".split())
    return runs


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.gpu(2))])
def test_launch_lines_train_alike(num_ranks: int, tmp_path: Path) -> None:
    if (reason := why_missing("transformer_engine_layers")) is not None:
        pytest.skip(f"transformer-engine cannot be used: {reason}")
    runs: dict[str, Run] = run_ranks(num_ranks, _train, str(tmp_path), write_sft(tmp_path), backend="nccl")[0]
    assert {name: run.error for name, run in runs.items() if run.error} == {}
    losses = {name: torch.tensor([run.losses[i] for i in sorted(run.losses)]) for name, run in runs.items()}
    for name in RUNS:
        expected = losses["experts local" if "experts" in name else "local"]
        torch.testing.assert_close(losses[name], expected, rtol=2e-2, atol=0, msg=f"{name}: {losses[name]}, {expected}")
    assert (losses["bf16"] - losses["local"]).abs().max() < 5e-3, losses
    assert (losses["conversations"] - losses["conversations local"]).abs().max() < 5e-3, losses
    # Kernels of one machine repeat themselves: the resumed run goes on as the one that was not stopped.
    torch.testing.assert_close(losses["resumed"], losses["delayed"][4:], rtol=1e-4, atol=0)
    torch.testing.assert_close(losses["resumed in bf16"], losses["delayed"][4:], rtol=2e-2, atol=0)
