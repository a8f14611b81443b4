"""Flags of optimizer, schedule and loop; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

from megatron.core.optimizer_param_scheduler import LR_DECAY_STYLES, LR_WSD_DECAY_STYLES, WD_INCR_STYLES
from megatron.training.cli.flag_rows import F, FlagGroup

OPTIMIZER_FLAGS = FlagGroup(
    "optimizer",
    F(
        "--optimizer",
        "adam is AdamW; muon, or dist_muon, is Muon for matrices and AdamW for all else",
        choices=["adam", "sgd", "muon", "dist_muon"],
    ),
    F("--adam-beta1", "decay of the first moment"),
    F("--adam-beta2", "decay of the second moment"),
    F("--adam-eps", "added to the denominator (default: 1e-8)"),
    F(
        "--use-precision-aware-optimizer",
        "keep fp32 main weights as bf16 weights plus 16 bits, which saves 2 bytes per parameter",
    ),
    F(
        "--main-grads-dtype",
        "dtype of main gradients with --use-precision-aware-optimizer; bf16: as --megatron-fsdp-main-grads-dtype bf16",
    ),
    F("--exp-avg-dtype", "dtype in which adam's average of gradients is stored, with --use-precision-aware-optimizer"),
    F(
        "--exp-avg-sq-dtype",
        "dtype in which adam's average of squared gradients is stored, with --use-precision-aware-optimizer",
    ),
    F("--sgd-momentum", "momentum of sgd"),
    F("--muon-momentum", "momentum of muon"),
    F("--muon-no-split-qkv", "orthogonalize queries, keys and values as one matrix"),
    F("--muon-nesterov", "orthogonalize the gradient averaged with the momentum"),
    F(
        "--muon-scale-mode",
        "factor of the update of an R x C matrix: sqrt(max(R, C)), sqrt(R / C) or sqrt(max(1, R / C))",
    ),
    F("--muon-extra-scale-factor", "another factor; 0.2 makes updates about as large as AdamW's"),
    F(
        "--muon-fp32-matmul-prec",
        "medium iterates in bf16, high in fp32 of torch's precision high",
        choices=["medium", "high"],
    ),
    F(
        "--muon-coefficient-type",
        "coefficients of Newton-Schulz iterations: simple, quintic, polar_express, cans, aol, deepseekv4, cubic5",
    ),
    F("--muon-num-ns-steps", "Newton-Schulz iterations"),
    F(
        "--muon-tp-mode",
        "orthogonalize what tensor parallelism splits part by part, whole on each rank, or whole by all ranks together",
    ),
    F("--clip-grad", "largest gradient norm; 0: no clipping"),
    F(
        "--check-weight-hash-across-dp-replicas-interval",
        "iterations between comparisons of the weights that several ranks hold (default: none)",
    ),
    F("--no-check-for-nan-in-loss-and-grad", "continue when a loss or gradient is not finite"),
)


SCHEDULE_FLAGS = FlagGroup(
    "learning rate and weight decay",
    F("--lr", "largest learning rate"),
    F("--min-lr", "learning rate after the decay (default: 0)"),
    F("--decoupled-lr", "largest learning rate of embedding and output layer"),
    F("--decoupled-min-lr", "smallest learning rate of embedding and output layer"),
    F("--lr-decay-style", "shape of the decay", choices=LR_DECAY_STYLES),
    F("--lr-decay-iters", "iteration at which the decay ends (default: --train-iters)"),
    F("--lr-decay-samples", "sample at which the decay ends (default: --train-samples)"),
    F("--lr-wsd-decay-style", "shape of the decay phase of WSD", choices=LR_WSD_DECAY_STYLES),
    F("--lr-wsd-decay-iters", "iterations of the decay phase of WSD"),
    F("--lr-wsd-decay-samples", "samples of the decay phase of WSD"),
    F("--lr-warmup-fraction", "warm-up as a fraction of the decay"),
    F("--lr-warmup-iters", "iterations of warm-up"),
    F("--lr-warmup-samples", "samples of warm-up"),
    F("--lr-warmup-init", "learning rate where warm-up starts (default: 0)"),
    F("--weight-decay", "weight decay of matrices"),
    F("--apply-wd-to-qk-layernorm", "decay the weights of queries' and keys' norms too"),
    F(
        "--no-weight-decay-cond-type",
        "the older spelling of --apply-wd-to-qk-layernorm, under either name",
        choices=("apply_wd_to_qk_layernorm", "qwen3_next"),
    ),
    F("--start-weight-decay", "weight decay at the start, if it grows"),
    F("--end-weight-decay", "weight decay at the end, if it grows"),
    F("--weight-decay-incr-style", "how weight decay grows", choices=WD_INCR_STYLES),
    F(
        "--override-opt-param-scheduler --override-opt_param-scheduler",
        "the command line's schedule replaces that of the checkpoint",
    ),
    F(
        "--use-checkpoint-opt-param-scheduler --use-checkpoint-opt_param-scheduler",
        "the checkpoint's schedule replaces that of the command line",
    ),
)


LOOP_FLAGS = FlagGroup(
    "training loop",
    F("--eval-interval", "iterations between evaluations (default: none before the end of training)"),
    F("--eval-iters", "global batches of an evaluation"),
    F("--start-eval-at-iter", "no evaluation before this iteration (default: none)"),
    F("--full-validation", "a validation reads each sample of its data once, instead of --eval-iters batches"),
    F(
        "--multiple-validation-sets",
        "each corpus of --valid-data-path is a validation set with a loss of its own; they are not blended",
    ),
    F("--validation-set-names", "names in the log for --multiple-validation-sets (default: 0, 1 and so on)"),
    F("--skip-train", "evaluate the model of --load on validation and test data, and end: nothing is trained or saved"),
    F("--exit-interval", "save and end after an iteration that is a multiple of this"),
    F("--exit-duration-in-mins", "save and end after this many whole minutes"),
    F("--exit-signal-handler", "save and end on SIGTERM"),
    F("--manual-gc", "collect garbage on all ranks at the same iterations"),
    F("--manual-gc-interval", "iterations between collections (0: none, default: 0)"),
    F("--no-manual-gc-eval --disable-manual-gc-eval", "do not collect around evaluations"),
    F(
        "--empty-unused-memory-level",
        "free cached CUDA memory after (1) or before and after (2) each step (default: 0, never)",
        choices=[0, 1, 2],
    ),
)
