"""Real launch lines of Megatron-LM train on two GPUs with transformer-engine, shrunk by flags that are appended to them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from megatron.core.extensions import why_missing
from tests.support.launch import run_ranks, served_transports
from tests.support.megatron_lines import launch_lines
from tests.support.tiny_run import Run, train_one
from tests.training.launch.test_megatron_lines import SHRUNK, shrink

pytestmark = [pytest.mark.gpu(2), pytest.mark.filterwarnings("ignore")]

LINES = (
    *(["example/fsdp_llama3_8b_fp8"] if served_transports("symm") else []),  # which asks for symmetric memory
    "gpt/gpt3_weekly_mcore_tp4_cp2_current_scaling_native_fp8_tp_sp_cp_tp_overlap",
    "gpt/gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion",
    "moe/gpt3_mcore_te_tp2_zp_z3_resume_torch_dist_te_8experts2parallel_top2router",
    "mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release_sm",
)
# Sizes that FP8 GEMMs and fused attention take.
_WIDE = (
    f"{SHRUNK} --hidden-size 256 --ffn-hidden-size 512 --kv-channels 64 --seq-length 128 --max-position-embeddings 128 "
    "--make-vocab-size-divisible-by 32 --distributed-backend nccl"
)


def _train(argv_by_name: dict[str, list[str]]) -> dict[str, Run]:
    warnings.simplefilter("ignore")
    assert why_missing("transformer_engine_layers") is None
    return {name: train_one(argv) for name, argv in argv_by_name.items()}


def test_five_steps_are_trained(tmp_path: Path) -> None:
    if (reason := why_missing("transformer_engine_layers")) is not None:
        pytest.skip(f"transformer-engine cannot be used: {reason}")
    lines = {line.name: line.argv for line in launch_lines()}
    argv = {name: shrink(lines[name], tmp_path / str(index), _WIDE, steps=5) for index, name in enumerate(LINES)}
    for name in argv:
        argv[name] += ["--moe-ffn-hidden-size", "256"] if "--moe-ffn-hidden-size" in argv[name] else []
    runs: dict[str, Run] = run_ranks(2, _train, argv, backend="nccl")[0]
    assert {name: run.error for name, run in runs.items() if run.error} == {}
    for name, run in runs.items():
        assert sorted(run.losses) == [1, 2, 3, 4, 5], name
        assert all(3.0 < loss < 6.0 for loss in run.losses.values()), name
        # It can be used, and is where lines multiply in FP8.
        is_in_bf16 = "--fp8-format" not in argv[name]
        assert ("transformer-engine is not used (in bf16" in run.output) == is_in_bf16, name
        assert run.output.count("transformer-engine is not used") == is_in_bf16, name
