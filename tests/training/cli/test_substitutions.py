"""Each row of the table of substitutions takes values as others, says so once, and the settings are those of the others."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.hybrid_layers import MAMBA_SIZES
from megatron.core.transformer.linear_attention_checks import LINEAR_ATTENTION_SIZES
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import build_parser, check_command_line
from megatron.training.cli.substitutions import SUBSTITUTIONS, substitute
from megatron.training.cli.words_of_flags import in_words_of_flags
from tests.training.cli.test_flags import MINIMAL

FIELDS = [field for kind in (TransformerConfig, OptimizerConfig) for field in fields(kind)]
CONTEXT = "--context-parallel-size 2 --attention-dropout 0"
TENSORWISE = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise"
EXPERTS, MLA = "--num-experts 4", "--multi-latent-attention"
SFT = "--sft --tokenizer-type SFTTokenizer --tokenizer-model x --data-path y"
HYBRID = "--hybrid-layer-pattern M-*- --num-layers 4 --mamba-head-dim 8 --mamba-num-groups 1 --hidden-size 64"

# in the order of the table: (flags that the row takes as others, the others)
CASES: list[tuple[str, str]] = [
    (
        "--skip-train --load x --save y",
        "--skip-train --load x --no-load-optim --no-load-rng --override-opt-param-scheduler",
    ),
    (f"{HYBRID} --ckpt-format torch_dist", HYBRID),
    ("--ckpt-format torch_dcp", ""),
    (
        "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
    ),
    ("--use-torch-fsdp2", "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"),
    (
        "--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy no_shard",
        "--use-megatron-fsdp --data-parallel-sharding-strategy no_shard",
    ),
    ("--sequence-parallel", ""),
    ("--apply-query-key-layer-scaling", "--apply-query-key-layer-scaling --attention-softmax-in-fp32"),
    (f"{EXPERTS} --moe-token-dispatcher-type flex", f"{EXPERTS} --moe-token-dispatcher-type alltoall"),
    (
        f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather",
        f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    ),
    ("--fp8-format hybrid", "--fp8-format hybrid --bf16"),
    (
        f"{EXPERTS} --moe-router-pre-softmax --moe-router-score-function sigmoid",
        f"{EXPERTS} --moe-router-score-function sigmoid",
    ),
    (f"{EXPERTS} --moe-router-bias-update-rate 1e-2", EXPERTS),
    (f"{EXPERTS} --moe-router-num-groups 2", EXPERTS),
    ("--expert-tensor-parallel-size 2", ""),
    ("--moe-layer-freq 2", ""),
    ("--moe-ffn-hidden-size 8", ""),
    ("--moe-latent-size 8", ""),
    ("--moe-apply-probs-on-input", ""),
    ("--moe-shared-expert-intermediate-size 8", ""),
    ("--moe-shared-expert-gate", ""),
    ("--moe-grouped-gemm", ""),
    ("--moe-router-topk 1", ""),
    ("--moe-enable-routing-replay", ""),
    ("--moe-router-score-function sigmoid", ""),
    ("--moe-router-pre-softmax", ""),
    ("--moe-router-topk-scaling-factor 2", ""),
    ("--moe-router-num-groups 2 --moe-router-group-topk 1", ""),
    ("--moe-router-group-topk 1", ""),
    ("--moe-router-score-function sigmoid --moe-router-enable-expert-bias", ""),
    ("--moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2", ""),
    ("--moe-router-dtype fp32", ""),
    ("--moe-router-load-balancing-type seq_aux_loss", ""),
    ("--moe-router-force-load-balancing", ""),
    ("--moe-aux-loss-coeff 1", ""),
    ("--moe-z-loss-coeff 1", ""),
    ("--moe-expert-capacity-factor 1", ""),
    ("--moe-expert-rank-capacity-factor 2", ""),
    ("--moe-pad-expert-input-to-capacity", ""),
    ("--moe-token-drop-policy position", ""),
    (f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss", EXPERTS),
    (f"{EXPERTS} --moe-token-drop-policy position", EXPERTS),
    *((f"--{name.replace('_', '-')} 3", "") for name in (*MAMBA_SIZES, *LINEAR_ATTENTION_SIZES)),
    ("--mtp-num-layers 0", ""),
    ("--mtp-loss-scaling-factor 0.5", ""),
    ("--mtp-use-repeated-layer", ""),
    (f"{CONTEXT} --cp-comm-type a2a+p2p", CONTEXT),
    ("--context-parallel-size 2", "--context-parallel-size 2 --cp-comm-type a2a"),
    ("--recompute-method uniform", ""),
    ("--recompute-granularity selective --recompute-num-layers 1", "--recompute-granularity selective"),
    ("--recompute-modules core_attn", ""),
    ("--fp8-recipe tensorwise", ""),
    ("--fp8-margin 1", ""),
    ("--fp8-amax-history-len 2", ""),
    ("--fp8-amax-compute-algo max", ""),
    ("--fp8-dot-product-attention", ""),
    ("--fp8-multi-head-attention", ""),
    ("--fp8-param-gather", ""),
    ("--tp-only-amax-red", ""),
    ("--use-transformer-engine-op-fuser", ""),
    ("--activation-func-fp8-input-store", ""),
    ("--first-last-layers-bf16", ""),
    (f"{TENSORWISE} --fp8-margin 1", TENSORWISE),
    (f"{TENSORWISE} --fp8-amax-history-len 1024", TENSORWISE),
    (f"{TENSORWISE} --fp8-amax-compute-algo max", TENSORWISE),
    (f"{TENSORWISE} --tp-only-amax-red", TENSORWISE),
    ("--num-layers-at-start-in-bf16 2", ""),
    ("--num-layers-at-end-in-bf16 2", ""),
    (
        "--no-gradient-accumulation-fusion --gradient-accumulation-fusion-min-numel 1",
        "--no-gradient-accumulation-fusion",
    ),
    (
        f"{EXPERTS} --moe-grouped-gemm --bf16 --fp8-format hybrid --use-transformer-engine-op-fuser",
        f"{EXPERTS} --moe-grouped-gemm --bf16 --fp8-format hybrid",
    ),
    (
        f"{EXPERTS} --moe-grouped-gemm --bf16 --fp8-format hybrid --overlap-moe-expert-parallel-comm --delay-wgrad-compute",
        f"{EXPERTS} --moe-grouped-gemm --bf16 --fp8-format hybrid",
    ),
    (
        f"{EXPERTS} --recompute-granularity selective --recompute-modules moe_act mlp moe",
        f"{EXPERTS} --recompute-granularity selective --recompute-modules moe mlp",
    ),
    (
        "--recompute-granularity selective --recompute-modules mlp moe",
        "--recompute-granularity selective --recompute-modules mlp",
    ),
    (
        "--recompute-granularity selective --recompute-modules mlp layernorm",
        "--recompute-granularity selective --recompute-modules mlp",
    ),
    (
        "--recompute-granularity selective --recompute-modules mlp mla_up_proj",
        "--recompute-granularity selective --recompute-modules mlp",
    ),
    ("--mup-base-hidden-size 8", ""),
    ("--mup-embedding-mult 2", ""),
    ("--mup-output-mult 2", ""),
    ("--mup-base-head-dim 8", ""),
    ("--mup-attn-scale-power 0.5", ""),
    ("--offload-modules core_attn", ""),
    ("--min-offloaded-tensor-size 4", ""),
    ("--activation-offload-fraction 0.5", ""),
    ("--fine-grained-offloading-max-inflight-offloads 2", ""),
    ("--cross-entropy-fusion-impl te", ""),
    ("--cuda-graph-impl transformer_engine --cuda-graph-scope attn", ""),
    (f"{SFT} --reset-position-ids", SFT),
    (f"{SFT} --reset-attention-mask", SFT),
    (f"{SFT} --dataloader-inter-document-masking", SFT),
    (f"{SFT} --eod-mask-loss", SFT),
    (f"{SFT} --allow-ambiguous-pad-tokens", SFT),
    ("--data-path x", ""),
    ("--fp16", "--fp16 --no-check-for-nan-in-loss-and-grad"),
    ("--bf16 --optimizer-cpu-offload", "--bf16 --optimizer-cpu-offload --use-precision-aware-optimizer"),
    ("--initial-loss-scale 4", ""),
    ("--fp16 --loss-scale 8 --min-loss-scale 4", "--fp16 --loss-scale 8"),
    ("--loss-scale-window 5", ""),
    ("--hysteresis 1", ""),
    ("--optimizer-offload-fraction 0.5", "--optimizer-offload-fraction 0"),
    ("--overlap-cpu-optimizer-d2h-h2d", ""),
    ("--no-pin-cpu-grads", ""),
    ("--no-pin-cpu-params", ""),
    ("--clip-grad inf", "--clip-grad 0"),
    ("--keep-fp8-transpose-cache", ""),
    ("--cuda-graph-warmup-steps 0", ""),
    ("--torch-fsdp2-no-reshard-after-forward", ""),
    ("--use-megatron-fsdp --outer-dp-sharding-strategy optim", "--use-megatron-fsdp"),
    (
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim --fsdp-memory-budget 0.5",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim",
    ),
    (
        "--use-megatron-fsdp --no-overlap-param-gather --suggested-communication-unit-size 100",
        "--use-megatron-fsdp --no-overlap-param-gather",
    ),
    ("--overlap-param-gather", ""),
    ("--no-overlap-param-gather", ""),
    ("--no-data-sharding", ""),
    ("--use-precision-aware-optimizer", ""),
    ("--microbatch-group-size-per-virtual-pipeline-stage 2", ""),
    ("--moe-token-dispatcher-type alltoall", ""),
    (f"{EXPERTS} --moe-expert-rank-capacity-factor 2", EXPERTS),
    ("--cp-comm-type p2p a2a", ""),
    ("--no-overlap-p2p-communication", ""),
    ("--account-for-embedding-in-pipeline-split", ""),
    ("--account-for-loss-in-pipeline-split", ""),
    ("--use-tp-pp-dp-mapping", ""),
    ("--swiglu --no-bias-gelu-fusion", "--swiglu"),
    ("--no-bias-swiglu-fusion", ""),
    ("--no-rope-fusion", ""),
    ("--padded-vocab-size 512 --make-vocab-size-divisible-by 64", "--padded-vocab-size 512"),
    ("--muon-momentum 0.95", ""),
    ("--muon-nesterov", ""),
    ("--muon-scale-mode unit_rms_norm", ""),
    ("--muon-extra-scale-factor 0.2", ""),
    ("--muon-fp32-matmul-prec high", ""),
    ("--muon-coefficient-type simple", ""),
    ("--muon-num-ns-steps 3", ""),
    ("--muon-tp-mode blockwise", ""),
    ("--muon-no-split-qkv", ""),
    ("--optimizer sgd --adam-beta1 0.8", "--optimizer sgd"),
    ("--optimizer sgd --adam-beta2 0.8", "--optimizer sgd"),
    ("--optimizer sgd --adam-eps 1e-5", "--optimizer sgd"),
    ("--sgd-momentum 0.8", ""),
    ("--apply-wd-to-qk-layernorm", ""),
    ("--no-weight-decay-cond-type qwen3_next", ""),
    ("--num-query-groups 2", ""),
    ("--rotary-base 500", ""),
    ("--rotary-percent 0.5", ""),
    ("--rotary-interleaved", ""),
    ("--no-rope-freq 1", ""),
    ("--window-size 3,0 --window-rotary-base 50", "--window-size 3,0"),
    ("--use-rope-scaling", ""),
    ("--rotary-seq-len-interpolation-factor 2", ""),
    ("--position-embedding-type rope --reset-position-ids", "--position-embedding-type rope"),
    ("--yarn-original-max-position-embeddings 8", ""),
    ("--yarn-beta-fast 8", ""),
    ("--yarn-beta-slow 2", ""),
    ("--no-yarn-correction-range-round-to-int", ""),
    (f"{MLA} --kv-channels 8", MLA),
    (f"{MLA} --use-rope-scaling", MLA),
    (f"{MLA} --rotary-seq-len-interpolation-factor 2", MLA),
    ("--q-lora-rank 8", ""),
    ("--kv-lora-rank 8", ""),
    ("--qk-head-dim 8", ""),
    ("--qk-pos-emb-head-dim 8", ""),
    ("--v-head-dim 8", ""),
    ("--original-max-position-embeddings 8", ""),
    ("--beta-fast 8", ""),
    ("--beta-slow 2", ""),
    ("--rotary-scaling-factor 40", ""),
    ("--mscale 0.7", ""),
    ("--mscale-all-dim 1.0", ""),
    ("--fim-rate 1", ""),
    ("--fim-spm-rate 1", ""),
    ("--fim-split-sample x", ""),
    ("--fim-fragment-rate 1", ""),
    ("--fim-no-prefix x", ""),
    *((f"--fim-{name}-token x", "") for name in ("prefix", "middle", "suffix", "pad", "eod")),
    ("--rope-scaling-factor 4", ""),
    ("--lr-wsd-decay-iters 2", ""),
    ("--lr-wsd-decay-samples 2", ""),
    ("--lr-wsd-decay-style cosine", ""),
    ("--save-interval 2", ""),
    ("--save-retain-interval 4", ""),
    ("--async-save", ""),
    ("--no-save-optim", ""),
    ("--no-save-rng", ""),
    ("--log-progress", ""),
    ("--finetune", ""),
    ("--no-load-optim", ""),
    ("--no-load-rng", ""),
    ("--exit-on-missing-checkpoint", ""),
    ("--use-checkpoint-opt-param-scheduler", ""),
    ("--ckpt-step 3", ""),
    ("--no-verify-checkpoint", ""),
    ("--use-mp-args-from-checkpoint-args", ""),
    ("--no-use-tokenizer-model-from-checkpoint-args", ""),
    ("--no-mmap-bin-files", ""),
    ("--allow-gaps-in-corpora", ""),
    ("--tiktoken-pattern v1", ""),
    ("--tiktoken-num-special-tokens 5", ""),
    ("--null-tokenizer-eod-id 5", ""),
    ("--null-tokenizer-pad-id 5", ""),
    ("--sft-tokenizer-prompt-format default", ""),
    ("--tokenizer-hf-no-include-special-tokens", ""),
    ("--tokenizer-special-tokens x", ""),
    ("--no-manual-gc-eval", ""),
    ("--timing-log-option all", ""),
    ("--profile-step-end 20", ""),
    ("--profile-ranks 0", ""),
    ("--profile-step-start 2", ""),
    ("--use-pytorch-profiler", ""),
    ("--profile --pytorch-profiler-collect-shapes", "--profile"),
    ("--profile --pytorch-profiler-collect-callstack", "--profile"),
    ("--profile --pytorch-profiler-collect-chakra", "--profile"),
    ("--record-shapes", ""),
    ("--profile --use-pytorch-profiler --nvtx-ranges", "--profile --use-pytorch-profiler"),
    ("--memory-snapshot-path x.pickle", ""),
    ("--tensorboard-queue-size 5", ""),
    ("--wandb-entity x", ""),
    ("--wandb-save-dir x", ""),
    ("--wandb-exp-name x", ""),
    ("--log-timers-to-tensorboard", ""),
    ("--log-memory-to-tensorboard", ""),
    ("--log-validation-ppl-to-tensorboard", ""),
    ("--log-world-size-to-tensorboard", ""),
    ("--no-log-loss-scale-to-tensorboard", ""),
    ("--tensorboard-log-interval 5", ""),
]


@pytest.mark.parametrize(
    ("index", "case"), list(enumerate(CASES)), ids=[case[0].split("--")[-1].split()[0] for case in CASES]
)
def test_values_are_taken_as_others(index: int, case: tuple[str, str]) -> None:
    given, taken = case
    row = SUBSTITUTIONS[index]
    parser = build_parser()
    base = [flag for flag in MINIMAL if flag != "--mock-data" or SFT not in given]
    args = parser.parse_flags([*base, *given.split()])
    assert row.when(args)
    text = row.text(args)
    assert text in substitute(args)
    said = in_words_of_flags(text, parser)
    assert said.startswith(("--", "data paths")) and "\n" not in said
    assert not any(re.search(rf"\b{field.name}\b(?!=)", said) for field in FIELDS if "_" in field.name)
    others = build_parser().parse_flags([*base, *taken.split()])
    assert substitute(others) == [] and args == others
    line = check_command_line([*base, *given.split()], world_size=4)
    assert line.faults == [] and said in line.said_once


def test_every_row_has_a_case() -> None:
    assert len(CASES) == len(SUBSTITUTIONS)


def test_a_memory_budget_has_no_effect_on_one_rank() -> None:
    flags = [*MINIMAL, "--use-megatron-fsdp", "--fsdp-memory-budget", "1000"]
    alone, two = (check_command_line(flags, world_size=number) for number in (1, 2))
    assert alone.settings is not None and alone.settings.ddp.fsdp_memory_budget is None
    assert [said for said in alone.said_once if "on several ranks" in said] and not two.said_once
    assert two.settings is not None and two.settings.ddp.fsdp_memory_budget == 1000


def test_a_page_and_metrics_have_the_name_of_the_run() -> None:
    """It is in the title of the one and a label of the others, also where Weights & Biases is not used."""
    for watched in ("--status-page page.html", "--prometheus-file run.prom"):
        line = check_command_line([*MINIMAL, "--wandb-exp-name", "x", *watched.split()], world_size=1)
        assert line.settings is not None and line.settings.logging.wandb_exp_name == "x"
        assert not line.said_once


def test_a_run_that_only_evaluates_needs_no_length_and_no_rate() -> None:
    line = " ".join(MINIMAL).replace("--train-iters 4 ", "").replace("--lr 1e-3 ", "")
    assert check_command_line([*line.split(), "--skip-train", "--load", "x"], world_size=1).faults == []
    assert len(check_command_line(line.split(), world_size=1).faults) == 2
