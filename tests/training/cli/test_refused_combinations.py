"""Each row of the table of refused combinations refuses a command line, by its own message, before anything is allocated."""

from __future__ import annotations

import pytest

from megatron.training.arguments import check_command_line, parse_settings
from megatron.training.cli.combinations_not_served import NOT_SERVED, Refusal
from megatron.training.cli.flag_parser import FlagError
from megatron.training.cli.refused_combinations import REFUSALS
from tests.training.cli.test_flags import MINIMAL

EXPERTS = "--num-experts 4"
NO_BIAS = "--disable-bias-linear"
GRAPH = "--cuda-graph-impl full_iteration"
DELTA = "--swiglu --experimental-attention-variant gdn --linear-attention-freq 2 --linear-num-key-heads 4 --linear-num-value-heads 4"

# contradictions: (flags to add, flag to take out with its value)
CONTRADICTIONS: dict[str, tuple[str, str]] = {
    "no num_layers": ("", "--num-layers"),
    "no hidden_size": ("", "--hidden-size"),
    "no num_attention_heads": ("", "--num-attention-heads"),
    "no seq_length": ("", "--seq-length"),
    "no max_position_embeddings": ("", "--max-position-embeddings"),
    "no micro_batch_size": ("", "--micro-batch-size"),
    "no lr": ("", "--lr"),
    "hidden-size below 1": ("--hidden-size 0", ""),
    "max-position-embeddings below seq-length": ("--max-position-embeddings 4", ""),
    "seq-length not divisible by 2 * context-parallel-size": ("--context-parallel-size 3 --attention-dropout 0", ""),
    "seq-length not divisible for sequence parallelism": (
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --seq-length 6",
        "",
    ),
    "padded-vocab-size not divisible by tensor-model-parallel-size": (
        "--tensor-model-parallel-size 4 --padded-vocab-size 6",
        "",
    ),
    "vocabulary padding below 1": ("--make-vocab-size-divisible-by 0", ""),
    "seq-length below 1": ("--seq-length 0", ""),
    "vocab-size below 1": ("--vocab-size 0", ""),
    "padded-vocab-size below 1": ("--padded-vocab-size 0", ""),
    "rotary percent out of range": ("--position-embedding-type rope --rotary-percent 0", ""),
    "rotary interpolation of 0 or less": ("--position-embedding-type rope --rotary-seq-len-interpolation-factor 0", ""),
    "rotary base below 1": ("--position-embedding-type rope --rotary-base 0", ""),
    "more layers of multi-token prediction than a sample has tokens for": ("--mtp-num-layers 8 --seq-length 8", ""),
    "two activation functions": ("--swiglu --squared-relu", ""),
    "full recomputation without method or layers": ("--recompute-granularity full --recompute-method uniform", ""),
    "neither or both of train-iters and train-samples": ("--train-samples 8", ""),
    "two schedules of the batch size": ("--rampup-batch-size 2 2 8 --global-batch-size 4 --step-batch-size-schedule 0:4", ""),
    "schedule in samples with train-iters": ("--lr-warmup-samples 4", ""),
    "schedule in iterations with train-samples": ("--train-samples 8 --lr-warmup-iters 1", "--train-iters"),
    "two warm-up lengths": ("--lr-warmup-fraction 0.1 --lr-warmup-iters 1", ""),
    "warm-up fraction out of range": ("--lr-warmup-fraction 1.0", ""),
    "warm-up as long as the decay": ("--lr-warmup-iters 20 --lr-decay-iters 20", ""),
    "warm-up as long as the decay, in samples": ("--train-samples 8 --lr-warmup-samples 8", "--train-iters"),
    "WSD without a decay length": ("--lr-decay-style WSD", ""),
    "decoupled-min-lr without decoupled-lr": ("--decoupled-min-lr 1e-5", ""),
    "growing weight decay without start or end": ("--weight-decay-incr-style cosine", ""),
    "constant weight decay with start or end": ("--end-weight-decay 0.1", ""),
    "two sources of the schedule": ("--load x --override-opt-param-scheduler --use-checkpoint-opt-param-scheduler", ""),
    "sharding strategy without use-megatron-fsdp": ("--data-parallel-sharding-strategy optim", ""),
    "use-nccl-ub with another transport": ("--use-nccl-ub --fsdp-transport nccl", ""),
    "use-symm-mem with another transport": ("--use-symm-mem --fsdp-transport nccl", ""),
    "symmetric memory with gloo": ("--fsdp-transport symm --distributed-backend gloo", ""),
    "a SHARP group without SHARP": ("--sharp-enabled-group dp", ""),
    "SHARP for replicas that do not exist": ("--use-sharp --sharp-enabled-group dp_replica", ""),
    "NCCL settings with gloo": ("--use-sharp --distributed-backend gloo", ""),
    "gathers between captured iterations": (
        "--cuda-graph-impl full_iteration --fsdp-all-gather-in-start-param-sync",
        "",
    ),
    "optimizer on the host without adam": ("--optimizer-cpu-offload --optimizer sgd", ""),
    "offload fraction out of range": ("--optimizer-cpu-offload --optimizer-offload-fraction 2", ""),
    "fp16 with bf16": ("--fp16 --bf16", ""),
    "fp16 with FP8": ("--fp16 --fp8-format e4m3", ""),
    "precision-aware optimizer with sgd": ("--bf16 --use-precision-aware-optimizer --optimizer sgd", ""),
    "precision-aware optimizer without fp32 main weights": (
        "--bf16 --use-precision-aware-optimizer --megatron-fsdp-main-params-dtype bf16",
        "",
    ),
    "main-grads-dtype bf16 without bf16": ("--use-precision-aware-optimizer --main-grads-dtype bf16", ""),
    "main-grads-dtype bf16 with gradients in fp32": (
        "--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --megatron-fsdp-main-grads-dtype fp32",
        "",
    ),
    "grad-reduce-in-bf16 without bf16": ("--grad-reduce-in-bf16", ""),
    "two gradient dtypes": ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", ""),
    "no data": ("", "--mock-data"),
    "two data sources": ("--data-path x --train-data-path y", "--mock-data"),
    "split with data paths of each split": ("--train-data-path x --split 9,1,0", "--mock-data"),
    "a loader of one's own": ("--dataloader-type external", ""),
    "fill-in-the-middle samples of mock data": ("--fim-data", ""),
    "conversations without a tokenizer of conversations": ("--sft --data-path x", "--mock-data"),
    "conversations of mock data": ("--sft --tokenizer-type SFTTokenizer --tokenizer-model x", ""),
    "conversations cut in three": ("--sft --fim-data", ""),
    "full validation of a blend by weights": ("--full-validation --data-path 1 a 2 b", "--mock-data"),
    "validation sets with weights": ("--multiple-validation-sets --train-data-path a --valid-data-path 1 a 2 b", "--mock-data"),
    "names of validation sets that are not kept apart": ("--validation-set-names a", ""),
    "another number of names than of validation sets": (
        "--multiple-validation-sets --validation-set-names a a --train-data-path a --valid-data-path a b",
        "--mock-data",
    ),
    "tokenizer without its model": ("--tokenizer-type HuggingFaceTokenizer", ""),
    "GPT2BPETokenizer without its files": ("--vocab-file x", ""),
    "NullTokenizer without vocab-size": ("--tokenizer-type NullTokenizer", ""),
    "negative num-workers": ("--num-workers -1", ""),
    "save-interval below 1": ("--save x --save-interval 0", ""),
    "save-retain-interval that save-interval does not divide": ("--save x --save-interval 2 --save-retain-interval 3", ""),
    "finetune with the checkpoint's schedule": ("--load x --finetune --use-checkpoint-opt-param-scheduler", ""),
    "two ways to divide a pattern": ("--hybrid-layer-pattern M|M --decoder-first-pipeline-num-layers 1", ""),
    "FP8 with local layers": ("--bf16 --fp8-format hybrid --transformer-impl local", ""),
    "FP8 with an odd number of tokens": ("--bf16 --fp8-format hybrid --micro-batch-size 1 --seq-length 100", ""),
    "FP8 with an odd number of tokens in evaluations": (
        "--bf16 --fp8-format hybrid --micro-batch-size 2 --seq-length 24 --eval-micro-batch-size 1",
        "",
    ),
    "an overlap report beside another profile": ("--overlap-report x --profile", ""),
    "the iteration of no overlap report": ("--overlap-report-step 9", ""),
    "the tuner's settings without it": ("--fsdp-tune-seconds 9", ""),
    "the tuner without training": ("--fsdp-tune --skip-train", ""),
    "CUDA graph scope below the iteration": ("--cuda-graph-impl full_iteration --cuda-graph-scope attn mlp", ""),
    "CUDA graph with gloo": ("--cuda-graph-impl full_iteration --distributed-backend gloo", ""),
    "CUDA graph with recomputed dropout": ("--cuda-graph-impl full_iteration --recompute-granularity selective", ""),
    "CUDA graph with sgd or muon": ("--cuda-graph-impl full_iteration --optimizer sgd", ""),
}  # fmt: skip

# in the order of the table: (flags that the row refuses, flags that are served instead)
COMBINATIONS: list[tuple[str, str]] = [
    ("--context-parallel-size 4 --num-attention-heads 2", "--context-parallel-size 4 --num-attention-heads 4"),
    (
        "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2",
        "--tensor-model-parallel-size 2 --group-query-attention --num-query-groups 2",
    ),
    (
        f"{EXPERTS} --tensor-model-parallel-size 2",
        f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel {NO_BIAS}",
    ),
    (
        f"{EXPERTS} --moe-shared-expert-intermediate-size 8",
        f"{EXPERTS} --moe-shared-expert-intermediate-size 8 {NO_BIAS}",
    ),
    ("--rope-type yarn", "--rope-type yarn --multi-latent-attention"),
    (
        f"{GRAPH} --rampup-batch-size 8 8 16 --global-batch-size 16",
        f"{GRAPH} --global-batch-size 16",
    ),
    (
        "--optimizer-cpu-offload --bf16 --fp8-format hybrid --fp8-param-gather --use-megatron-fsdp",
        "--optimizer-cpu-offload --bf16 --fp8-format hybrid --use-megatron-fsdp",
    ),
    (f"{GRAPH} --optimizer-cpu-offload", GRAPH),
    (f"{GRAPH} --timing-log-level 1", GRAPH),
    (
        f"{GRAPH} {EXPERTS} --moe-grouped-gemm --bf16",
        f"{GRAPH} {EXPERTS} --moe-grouped-gemm --bf16 --moe-expert-rank-capacity-factor 2",
    ),
    (
        f"{GRAPH} {EXPERTS} {NO_BIAS} --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm",
        f"{EXPERTS} {NO_BIAS} --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm",
    ),
    (f"{GRAPH} --pipeline-model-parallel-size 2", f"{GRAPH} --tensor-model-parallel-size 2"),
    (
        "--context-parallel-size 2 --attention-dropout 0 --reset-attention-mask",
        "--context-parallel-size 2 --attention-dropout 0 --reset-position-ids",
    ),
    (f"{DELTA} --reset-attention-mask", f"{DELTA} --reset-position-ids"),
    (
        f"{DELTA} --context-parallel-size 2 --attention-dropout 0",
        f"{DELTA} --tensor-model-parallel-size 2 --sequence-parallel",
    ),
    (f"{GRAPH} --dataloader-inter-document-masking", GRAPH),
]


def test_tokens_of_sequence_parallel_ranks_are_a_multiple_of_eight_in_fp8() -> None:
    flags = "--bf16 --fp8-format hybrid --micro-batch-size 2 --tensor-model-parallel-size 4 --kv-channels 32 --ffn-hidden-size 64"
    needs = "needs microbatches of a multiple of 16 tokens"
    assert not any(needs in fault for fault in check_command_line(MINIMAL + flags.split(), world_size=4).faults)
    faults = check_command_line([*MINIMAL, *flags.split(), "--sequence-parallel"], world_size=4).faults
    assert any(needs in fault for fault in faults)


def test_every_row_has_a_case() -> None:
    assert [row.what for row in REFUSALS if row not in NOT_SERVED] == list(CONTRADICTIONS)
    assert len(NOT_SERVED) == len(COMBINATIONS)


def _minimal_without(flag: str) -> list[str]:
    """The minimal command line without a flag and its value."""
    argv = list(MINIMAL)
    if flag:
        start = argv.index(flag)
        end = start + 1 if start + 1 == len(argv) or argv[start + 1].startswith("--") else start + 2
        argv[start:end] = []
    return argv


@pytest.mark.parametrize("row", [row for row in REFUSALS if row not in NOT_SERVED], ids=lambda row: row.what)
def test_contradicting_flags_are_refused(row: Refusal) -> None:
    added, removed = CONTRADICTIONS[row.what]
    with pytest.raises(FlagError) as caught:
        parse_settings(_minimal_without(removed) + added.split(), world_size=1)
    opening = row.message.split("{")[0]
    assert opening and opening in str(caught.value)


@pytest.mark.parametrize(
    ("row", "case"), list(zip(NOT_SERVED, COMBINATIONS, strict=True)), ids=[row.what for row in NOT_SERVED]
)
def test_a_combination_is_refused_and_its_alternative_is_served(row: Refusal, case: tuple[str, str]) -> None:
    refused, served = case
    with pytest.raises(FlagError) as caught:
        parse_settings(MINIMAL + refused.split(), world_size=4)
    assert row.message in str(caught.value)
    parse_settings(MINIMAL + served.split(), world_size=4)


def test_exchanges_overlap_with_shared_experts_or_with_another_microbatch() -> None:
    flags = f"{EXPERTS} {NO_BIAS} --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm"
    faults = check_command_line(MINIMAL + f"{flags} --moe-shared-expert-overlap".split(), world_size=2).faults
    assert faults == [
        "--overlap-moe-expert-parallel-comm must go without --moe-shared-expert-overlap, got both; leave out "
        "--moe-shared-expert-overlap, which has no effect"
    ]
    assert check_command_line(MINIMAL + flags.split(), world_size=2).faults == []


def test_full_recomputation_alone_is_one_fault() -> None:
    """The components would say the same of method and layers once more each."""
    for flags in ("", "--recompute-method block", "--recompute-num-layers 1"):
        (fault,) = check_command_line(
            [*MINIMAL, "--recompute-granularity", "full", *flags.split()], world_size=1
        ).faults
        assert fault.startswith("--recompute-granularity full needs --recompute-method and --recompute-num-layers")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--position-embedding-type rope --rotary-percent 1.5",
            "--rotary-percent must be above 0 and at most 1, got 1.5",
        ),
        (
            "--position-embedding-type rope --kv-channels 7",
            "--kv-channels times --rotary-percent must be even, got 7 * 1.0",
        ),
        ("--seq-length 0", "--seq-length must be at least 1, got 0"),
        ("--softmax-scale 0", "--softmax-scale must be above 0, got 0.0"),
        (
            "--no-pad-vocab-size --tokenizer-type NullTokenizer --vocab-size 97 --tensor-model-parallel-size 2",
            "--no-pad-vocab-size needs ids that --tensor-model-parallel-size (2) divides, got 97",
        ),
    ],
)
def test_numbers_that_no_model_can_have_are_refused(flags: str, message: str) -> None:
    assert any(message in fault for fault in check_command_line(MINIMAL + flags.split(), world_size=2).faults)
