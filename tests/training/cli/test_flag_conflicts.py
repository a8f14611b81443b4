"""Each row of the table of conflicts: a command line that it refuses, by its own message."""

from __future__ import annotations

import pytest

from megatron.training.arguments import parse_settings
from megatron.training.cli.flag_conflicts import CONFLICTS
from megatron.training.cli.flag_parser import FlagError
from tests.training.cli.test_flags import MINIMAL

# row: (flags to add, flags to take out with their value)
CASES: dict[str, tuple[str, str]] = {
    "no num_layers": ("", "--num-layers"),
    "no hidden_size": ("", "--hidden-size"),
    "no num_attention_heads": ("", "--num-attention-heads"),
    "no seq_length": ("", "--seq-length"),
    "no max_position_embeddings": ("", "--max-position-embeddings"),
    "no micro_batch_size": ("", "--micro-batch-size"),
    "no lr": ("", "--lr"),
    "positions shorter than samples": ("--max-position-embeddings 4", ""),
    "samples that context parallelism cannot cut": ("--context-parallel-size 3 --attention-dropout 0", ""),
    "samples that sequence parallelism cannot cut": (
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --seq-length 6",
        "",
    ),
    "a vocabulary that tensor parallelism cannot cut": (
        "--tensor-model-parallel-size 4 --make-vocab-size-divisible-by 6",
        "",
    ),
    "query groups without grouped attention": ("--num-query-groups 2", ""),
    "rotary settings without rotary positions": ("--rotary-base 500000", ""),
    "rope scaling factor without rope scaling": ("--position-embedding-type rope --rope-scaling-factor 4", ""),
    "two activations": ("--swiglu --squared-relu", ""),
    "selective recomputation by layers": ("--recompute-granularity selective --recompute-num-layers 1", ""),
    "full recomputation without layers": ("--recompute-granularity full --recompute-method uniform", ""),
    "recomputed modules without selective recomputation": ("--recompute-modules core_attn", ""),
    "no length of training": ("--train-samples 8", ""),
    "samples in a schedule of iterations": ("--lr-warmup-samples 4", ""),
    "iterations in a schedule of samples": ("--train-samples 8 --lr-warmup-iters 1", "--train-iters"),
    "warm-up given twice": ("--lr-warmup-fraction 0.1 --lr-warmup-iters 1", ""),
    "a warm-up of all or more": ("--lr-warmup-fraction 1.0", ""),
    "wsd without its last phase": ("--lr-decay-style WSD", ""),
    "last phase without wsd": ("--lr-wsd-decay-iters 2", ""),
    "style of the last phase without wsd": ("--lr-wsd-decay-style cosine", ""),
    "decoupled floor without decoupled rate": ("--decoupled-min-lr 1e-5", ""),
    "growing weight decay without its ends": ("--weight-decay-incr-style cosine", ""),
    "ends of a constant weight decay": ("--end-weight-decay 0.1", ""),
    "two schedules": ("--load x --override-opt-param-scheduler --use-checkpoint-opt-param-scheduler", ""),
    "sharding without the engine": ("--data-parallel-sharding-strategy optim", ""),
    "an optimizer that is sharded and not": ("--use-megatron-fsdp --use-distributed-optimizer", ""),
    "gather without anything sharded": ("--overlap-param-gather", ""),
    "symmetric memory and another transport": ("--use-nccl-ub --fsdp-transport nccl", ""),
    "symmetric memory on CPUs": ("--fsdp-transport symm --distributed-backend gloo", ""),
    "precision-aware optimizer without bf16": ("--use-precision-aware-optimizer", ""),
    "precision-aware optimizer of another kind": ("--bf16 --use-precision-aware-optimizer --optimizer sgd", ""),
    "precision-aware optimizer and main weights that are not fp32": (
        "--bf16 --use-precision-aware-optimizer --megatron-fsdp-main-params-dtype bf16",
        "",
    ),
    "bf16 reduction of fp32 training": ("--grad-reduce-in-bf16", ""),
    "two dtypes of gradients": ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", ""),
    "no data": ("", "--mock-data"),
    "two sources of data": ("--data-path x", ""),
    "a split of what is split": ("--train-data-path x --split 9,1,0", "--mock-data"),
    "a tokenizer without its file": ("--tokenizer-type HuggingFaceTokenizer", ""),
    "a file without its tokenizer": ("--tokenizer-model x", ""),
    "a null tokenizer without its size": ("--tokenizer-type NullTokenizer", ""),
    "negative workers": ("--num-workers -1", ""),
    "save_interval without save": ("--save-interval 2", ""),
    "async_save without save": ("--async-save", ""),
    "no_save_optim without save": ("--no-save-optim", ""),
    "no_save_rng without save": ("--no-save-rng", ""),
    "exit_signal_handler without save": ("--exit-signal-handler", ""),
    "a save interval of nothing": ("--save x --save-interval 0", ""),
    "finetune without load": ("--finetune", ""),
    "no_load_optim without load": ("--no-load-optim", ""),
    "no_load_rng without load": ("--no-load-rng", ""),
    "exit_on_missing_checkpoint without load": ("--exit-on-missing-checkpoint", ""),
    "use_checkpoint_opt_param_scheduler without load": ("--use-checkpoint-opt-param-scheduler", ""),
    "a step without load": ("--ckpt-step 3", ""),
    "finetuning from where it ended": ("--load x --finetune --use-checkpoint-opt-param-scheduler", ""),
    "a wandb account without a project": ("--wandb-exp-name x", ""),
    "scalars without a writer": ("--log-timers-to-tensorboard", ""),
    "graphs of layers": ("--cuda-graph-impl local", ""),
    "a scope without its graph": ("--cuda-graph-scope full_iteration", ""),
    "another scope than the whole iteration": ("--cuda-graph-impl full_iteration --cuda-graph-scope attn mlp", ""),
    "warm-up of no graph": ("--cuda-graph-warmup-steps 3", ""),
    "graphs on CPUs": ("--cuda-graph-impl full_iteration --distributed-backend gloo", ""),
    "recomputed dropout in a graph": ("--cuda-graph-impl full_iteration --recompute-granularity selective", ""),
    "sgd in a graph": ("--cuda-graph-impl full_iteration --optimizer sgd", ""),
}  # fmt: skip


def test_every_row_has_a_case() -> None:
    assert [row.name for row in CONFLICTS] == list(CASES)


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: row.name)
def test_row(row: object) -> None:
    added, removed = CASES[row.name]  # type: ignore[attr-defined]
    argv = list(MINIMAL)
    if removed:
        start = argv.index(removed)
        end = start + 1 if start + 1 == len(argv) or argv[start + 1].startswith("--") else start + 2
        argv[start:end] = []
    with pytest.raises(FlagError) as caught:
        parse_settings(argv + added.split(), world_size=1)
    opening = row.message.split("{")[0]  # type: ignore[attr-defined]
    assert opening and opening in str(caught.value)
