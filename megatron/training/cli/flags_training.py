"""Flags of optimizer, schedule and loop; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse

from megatron.core.optimizer_param_scheduler import LR_DECAY_STYLES, LR_WSD_DECAY_STYLES, WD_INCR_STYLES


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of optimizer, schedule, evaluation and the training loop."""
    _add_optimizer_flags(parser.add_argument_group("optimizer"))
    _add_schedule_flags(parser.add_argument_group("learning rate and weight decay"))
    _add_loop_flags(parser.add_argument_group("training loop"))


def _add_optimizer_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--optimizer",
        choices=["adam", "sgd", "muon", "dist_muon"],
        default="adam",
        help="adam is AdamW; muon, or dist_muon, is Muon for matrices and AdamW for all else (default: adam)",
    )
    group.add_argument("--adam-beta1", type=float, default=0.9, help="decay of the first moment (default: 0.9)")
    group.add_argument("--adam-beta2", type=float, default=0.999, help="decay of the second moment (default: 0.999)")
    group.add_argument("--adam-eps", type=float, default=1e-8, help="added to the denominator (default: 1e-8)")
    group.add_argument(
        "--use-precision-aware-optimizer",
        action="store_true",
        help="keep fp32 main weights as bf16 weights plus 16 bits, which saves 2 bytes per parameter",
    )
    group.add_argument(
        "--main-grads-dtype",
        choices=["fp32", "bf16"],
        default="fp32",
        help="dtype of main gradients with --use-precision-aware-optimizer; bf16: as --megatron-fsdp-main-grads-dtype bf16 "
        "(default: fp32)",
    )
    for flag, what in (("--exp-avg-dtype", "gradients"), ("--exp-avg-sq-dtype", "squared gradients")):
        group.add_argument(
            flag,
            choices=["fp32", "fp16", "bf16", "fp8"],
            default="fp32",
            help=f"dtype in which adam's average of {what} is stored, with --use-precision-aware-optimizer (default: fp32)",
        )
    group.add_argument("--sgd-momentum", type=float, default=0.9, help="momentum of sgd (default: 0.9)")
    _add_muon_flags(group)
    group.add_argument(
        "--clip-grad", type=float, default=1.0, help="largest gradient norm; 0: no clipping (default: 1.0)"
    )
    group.add_argument(
        "--check-weight-hash-across-dp-replicas-interval",
        type=int,
        help="iterations between comparisons of the weights that several ranks hold (default: none)",
    )
    group.add_argument(
        "--no-check-for-nan-in-loss-and-grad",
        dest="check_for_nan_in_loss_and_grad",
        action="store_false",
        help="continue when a loss or gradient is not finite",
    )


def _add_muon_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--muon-momentum", type=float, default=0.9, help="momentum of muon (default: 0.9)")
    group.add_argument(
        "--muon-no-split-qkv",
        dest="muon_split_qkv",
        action="store_false",
        help="orthogonalize queries, keys and values as one matrix",
    )
    group.add_argument(
        "--muon-nesterov", action="store_true", help="orthogonalize the gradient averaged with the momentum"
    )
    group.add_argument(
        "--muon-scale-mode",
        choices=["spectral", "unit_rms_norm", "shape_scaling"],
        default="spectral",
        help="factor of the update of an R x C matrix: sqrt(max(R, C)), sqrt(R / C) or sqrt(max(1, R / C)) "
        "(default: spectral)",
    )
    group.add_argument(
        "--muon-extra-scale-factor",
        type=float,
        default=1.0,
        help="another factor; 0.2 makes updates about as large as AdamW's (default: 1.0)",
    )
    group.add_argument(
        "--muon-fp32-matmul-prec",
        choices=["medium", "high"],
        default="medium",
        help="medium iterates in bf16, high in fp32 of torch's precision high (default: medium)",
    )
    group.add_argument(
        "--muon-coefficient-type",
        default="quintic",
        help="coefficients of Newton-Schulz iterations: simple, quintic, polar_express, cans, aol, deepseekv4, cubic5 "
        "(default: quintic)",
    )
    group.add_argument("--muon-num-ns-steps", type=int, default=5, help="Newton-Schulz iterations (default: 5)")
    group.add_argument(
        "--muon-tp-mode",
        choices=["blockwise", "duplicated", "distributed"],
        default="duplicated",
        help="orthogonalize what tensor parallelism splits part by part, whole on each rank, or whole by all ranks "
        "together (default: duplicated)",
    )


def _add_schedule_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--lr", type=float, help="largest learning rate")
    group.add_argument("--min-lr", type=float, default=0.0, help="learning rate after the decay (default: 0)")
    group.add_argument("--decoupled-lr", type=float, help="largest learning rate of embedding and output layer")
    group.add_argument("--decoupled-min-lr", type=float, help="smallest learning rate of embedding and output layer")
    group.add_argument(
        "--lr-decay-style", choices=LR_DECAY_STYLES, default="linear", help="shape of the decay (default: linear)"
    )
    group.add_argument("--lr-decay-iters", type=int, help="iteration at which the decay ends (default: --train-iters)")
    group.add_argument("--lr-decay-samples", type=int, help="sample at which the decay ends (default: --train-samples)")
    group.add_argument(
        "--lr-wsd-decay-style",
        choices=LR_WSD_DECAY_STYLES,
        default="exponential",
        help="shape of the decay phase of WSD",
    )
    group.add_argument("--lr-wsd-decay-iters", type=int, help="iterations of the decay phase of WSD")
    group.add_argument("--lr-wsd-decay-samples", type=int, help="samples of the decay phase of WSD")
    group.add_argument("--lr-warmup-fraction", type=float, help="warm-up as a fraction of the decay")
    group.add_argument("--lr-warmup-iters", type=int, default=0, help="iterations of warm-up (default: 0)")
    group.add_argument("--lr-warmup-samples", type=int, default=0, help="samples of warm-up (default: 0)")
    group.add_argument(
        "--lr-warmup-init", type=float, default=0.0, help="learning rate where warm-up starts (default: 0)"
    )
    group.add_argument("--weight-decay", type=float, default=0.01, help="weight decay of matrices (default: 0.01)")
    group.add_argument(
        "--apply-wd-to-qk-layernorm", action="store_true", help="decay the weights of queries' and keys' norms too"
    )
    group.add_argument(
        "--no-weight-decay-cond-type",
        choices=("apply_wd_to_qk_layernorm", "qwen3_next"),
        help="the older spelling of --apply-wd-to-qk-layernorm, under either name",
    )
    group.add_argument("--start-weight-decay", type=float, help="weight decay at the start, if it grows")
    group.add_argument("--end-weight-decay", type=float, help="weight decay at the end, if it grows")
    group.add_argument(
        "--weight-decay-incr-style", choices=WD_INCR_STYLES, default="constant", help="how weight decay grows"
    )
    group.add_argument(
        "--override-opt-param-scheduler",
        "--override-opt_param-scheduler",
        dest="override_opt_param_scheduler",
        action="store_true",
        help="the command line's schedule replaces that of the checkpoint",
    )
    group.add_argument(
        "--use-checkpoint-opt-param-scheduler",
        "--use-checkpoint-opt_param-scheduler",
        dest="use_checkpoint_opt_param_scheduler",
        action="store_true",
        help="the checkpoint's schedule replaces that of the command line",
    )


def _add_loop_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--eval-interval", type=int, help="iterations between evaluations (default: none before the end of training)"
    )
    group.add_argument("--eval-iters", type=int, default=100, help="global batches of an evaluation (default: 100)")
    group.add_argument("--start-eval-at-iter", type=int, help="no evaluation before this iteration (default: none)")
    group.add_argument(
        "--full-validation",
        action="store_true",
        help="a validation reads each sample of its data once, instead of --eval-iters batches",
    )
    group.add_argument(
        "--multiple-validation-sets",
        action="store_true",
        help="each corpus of --valid-data-path is a validation set with a loss of its own; they are not blended",
    )
    group.add_argument(
        "--validation-set-names",
        nargs="+",
        help="names in the log for --multiple-validation-sets (default: 0, 1 and so on)",
    )
    group.add_argument(
        "--skip-train",
        action="store_true",
        help="evaluate the model of --load on validation and test data, and end: nothing is trained or saved",
    )
    group.add_argument("--exit-interval", type=int, help="save and end after an iteration that is a multiple of this")
    group.add_argument("--exit-duration-in-mins", type=int, help="save and end after this many whole minutes")
    group.add_argument("--exit-signal-handler", action="store_true", help="save and end on SIGTERM")
    group.add_argument("--manual-gc", action="store_true", help="collect garbage on all ranks at the same iterations")
    group.add_argument("--manual-gc-interval", type=int, default=0, help="iterations between collections (0: none)")
    group.add_argument(
        "--no-manual-gc-eval",
        "--disable-manual-gc-eval",
        dest="manual_gc_eval",
        action="store_false",
        help="do not collect around evaluations",
    )
    group.add_argument(
        "--empty-unused-memory-level",
        type=int,
        choices=[0, 1, 2],
        default=0,
        help="free cached CUDA memory after (1) or before and after (2) each step (default: 0, never)",
    )
