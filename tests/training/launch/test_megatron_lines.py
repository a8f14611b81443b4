"""Real launch lines of Megatron-LM train, shrunk to this machine by flags that are appended to them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.megatron_lines import launch_lines
from tests.support.tiny_run import Run, train_all

LINES = (
    "gpt/gpt3_15b_8t_release",
    "gpt/gpt3_mcore_te_tp1_pp4_persistent_ckpt_disable_bias_linear",
    "gpt/gpt3_7b_tp4_pp1_memory_speed",
    "gpt/gpt3_mcore_reruns_enable",
    "gpt/gpt3_mcore_reruns_persistent_1",
    "gpt/gpt3_mcore_te_tp1_pp1_mup",
    "gpt/gpt3_mcore_te_tp1_pp1_resume_torch_dist_uniform_full_recompute",
    "gpt/gpt3_mcore_te_tp1_pp2_cp4_a2a_p2p_nondeterministic",
    "gpt/gpt3_mcore_te_tp1_pp2_rope_embeddings_interleaved_no_fusion",
    "gpt/gpt3_mcore_te_tp1_pp4_swiglu",
    "gpt/gpt3_mcore_te_tp2_pp1_fsdp2_resume_torch_dist",
    "gpt/gpt3_mcore_te_tp2_pp1_gdn_no_nvrx_async",
    "gpt/gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion",
    "gpt/gpt3_mcore_te_tp2_pp2_defer_embedding_wgrad_compute",
    "gpt/gpt3_mcore_te_tp2_pp2_resume_torch_dist",
    "gpt/gpt3_mcore_te_tp4_pp1_resume_torch_dist_qk_layernorm_test_mode",
    "gpt/gpt3_mcore_tp1_pp4",
    "moe/gpt3_mcore_cp2_pp2_ep2_te_4experts2parallel_nondeterministic",
    "moe/gpt3_mcore_te_tp2_pp1_te_8experts2parallel_dist_optimizer",
    "moe/gpt3_mcore_te_tp2_zp_z3_resume_torch_dist_te_8experts2parallel_top2router",
    "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon_param_layout",
    "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_optimizer",
    "mixtral/mixtral_8x7b_alltoall_tp2pp4ep4_release_sm",
)

SHRUNK = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --kv-channels 8 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 99 "
    "--make-vocab-size-divisible-by 2 --distributed-backend gloo --num-workers 0 --eval-iters 1 "
    "--log-interval 1 --wandb-project= --num-distributed-optimizer-instances 1"
)
_DEGREES = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
)


def shrink(argv: Sequence[str], folder: Path, added_first: str = SHRUNK, *, steps: int = 3) -> list[str]:
    """Append flags until the line fits on two ranks: of the degrees of parallelism the first one stays."""

    def value(flag: str) -> int:
        return int(argv[argv.index(flag) + 1]) if flag in argv else 1

    added = [
        *added_first.split(),
        "--save",
        str(folder),
        "--load",
        str(folder),
        "--tensorboard-dir",
        str(folder / "log"),
    ]
    added += ["--data-cache-path", str(folder / "cache"), "--save-interval", str(steps)]
    split = [flag for flag in _DEGREES if value(flag) > 1]
    for place, flag in enumerate(split):
        added += [flag, "2" if place == 0 else "1"]
    for flag, shrunk in {
        "--expert-tensor-parallel-size": "1",
        "--num-query-groups": "2",
        "--moe-ffn-hidden-size": "16",
        "--save-retain-interval": str(steps),
        "--num-experts": "8",
    }.items():
        if flag in argv:
            added += [flag, shrunk]
    in_samples = "--train-samples" in argv
    added += ["--train-samples", str(8 * steps)] if in_samples else ["--train-iters", str(steps)]
    added += (
        ["--step-batch-size-schedule", "0:8"] if "--step-batch-size-schedule" in argv else ["--global-batch-size", "8"]
    )
    return [*argv, *added]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    lines = {line.name: line.argv for line in launch_lines()}
    flags = {name: " ".join(shrink(lines[name], tmp_path_factory.mktemp("line"))) for name in LINES}
    return train_all(2, flags, base="")


@pytest.mark.parametrize("name", LINES)
def test_three_steps_are_trained(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    assert run.error is None, run.error
    assert sorted(run.losses) == [1, 2, 3]
    assert all(3.0 < loss < 6.0 for loss in run.losses.values())
    assert "successfully saved checkpoint from iteration       3" in run.output
