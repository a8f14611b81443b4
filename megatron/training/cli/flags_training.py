"""Flags of the optimizer, schedule, loop, CUDA graphs, offloading, profiles and the tuner; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse
from argparse import Namespace

from megatron.core.full_cuda_graph import FullCudaGraphConfig
from megatron.core.optimizer_param_scheduler import LR_DECAY_STYLES, LR_WSD_DECAY_STYLES, WD_INCR_STYLES
from megatron.core.transformer.offload.offloaded_modules import OFFLOAD_MODULES
from megatron.training.cli.flag_rows import F, FlagGroup
from megatron.training.tuner.config import ALSO, DEFAULT_FILE, TuningConfig

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


LOSS_SCALE_FLAGS = FlagGroup(
    "fp16 and loss scaling",
    F("--fp16", "compute in fp16, with a loss scale that follows overflows (default: fp32)"),
    F("--loss-scale", "constant loss scale, in any dtype (default: none, or in fp16 a changing one)"),
    F("--initial-loss-scale", "first loss scale in fp16 (default: 2^32)", default=2.0**32),
    F("--min-loss-scale", "least loss scale in fp16 (default: 1)"),
    F(
        "--loss-scale-window",
        "steps without overflow after which the loss scale is doubled (default: 1000)",
        default=1000.0,
    ),
    F("--hysteresis", "overflows, since the loss scale was last doubled, from which on each one halves it"),
)


def scales_dynamically(args: argparse.Namespace) -> bool:
    """Return whether the loss scale follows overflows, which then are no reason to end a run."""
    return bool(args.fp16 and args.loss_scale is None)


OFFLOAD_FLAGS = FlagGroup(
    "offloading to the host's memory",
    F("--optimizer-cpu-offload", "keep Adam's state and fp32 main weights in the host's memory, and update them there"),
    F(
        "--optimizer-offload-fraction",
        "fraction of the parameters whose state is there, by whole units from the last one on (default: 1)",
    ),
    F(
        "--overlap-cpu-optimizer-d2h-h2d",
        "updates on the host run during the next forward; each unit waits for its own",
    ),
    F("--no-pin-cpu-grads", "gradients are copied to pageable memory of the host, which takes the host's time"),
    F("--no-pin-cpu-params", "main weights are copied from pageable memory of the host, which takes the host's time"),
    F("--cpu-offloading-num-layers", "layers, from the first one on, whose activations rest in the host's memory"),
    F("--fine-grained-activation-offloading", "what --offload-modules save for backward rests in the host's memory"),
    F(
        "--offload-modules",
        f"modules of each layer: {', '.join(OFFLOAD_MODULES)} (the last two are all of the experts)",
    ),
    F("--min-offloaded-tensor-size", "elements; smaller activations stay on the device"),
    F("--activation-offload-fraction", "fraction of these modules that offload, from the first layer on (default: 1)"),
    F(
        "--fine-grained-offloading-max-inflight-offloads",
        "layers whose activations may be on the device while they are copied (default: 1)",
    ),
)


GRAPH_IMPLEMENTATIONS = ("none", "local", "transformer_engine", "full_iteration")


GRAPH_FLAGS = FlagGroup(
    "CUDA graphs",
    F(
        "--cuda-graph-impl",
        "full_iteration: replay forward, backward, reductions, clipping and update as one graph",
        choices=GRAPH_IMPLEMENTATIONS,
    ),
    F(
        "--cuda-graph-scope",
        "full_iteration, with --cuda-graph-impl local: the older spelling of --cuda-graph-impl full_iteration",
        dest="cuda_graph_scope",
    ),
    F("--cuda-graph-warmup-steps", "eager steps before the capture, at least 2"),
)


def captures_iterations(args: Namespace) -> bool:
    """Return whether the flags ask for a graph of the whole iteration, in either spelling."""
    whole = ["full_iteration"]
    spellings = (("full_iteration", None), ("full_iteration", whole), ("local", whole))
    return (args.cuda_graph_impl, args.cuda_graph_scope) in spellings


def full_cuda_graph_config(args: Namespace) -> FullCudaGraphConfig:
    """Map the flags of CUDA graphs."""
    return FullCudaGraphConfig(enabled=captures_iterations(args), warmup_steps=args.cuda_graph_warmup_steps)


TUNER_FLAGS = FlagGroup(
    "tuner",
    F(
        "--fsdp-tune",
        "before training, measure which settings of the engine are fastest, of those that this command line does not give; "
        "write them to FILE and train with them; a later run of the same kind reads FILE and measures nothing (default FILE: "
        f"{DEFAULT_FILE} in --save, else in the current folder). Losses stay bitwise as they are with the same flags given by hand",
        nargs="?",
        const="",
        metavar="FILE",
    ),
    F("--fsdp-tune-seconds", f"begin no measurement after these (default: {TuningConfig.seconds:.0f})", type=float),
    F(
        "--fsdp-tune-also",
        "also choose these, which change the order of sums and so the last bits of losses; the micro "
        "batch size changes what dropout draws, too (the global batch stays)",
        nargs="+",
        choices=ALSO,
    ),
)


PROFILING_FLAGS = FlagGroup(
    "profiles",
    F(
        "--profile",
        "profile steps: for an nsys around the process, or with --use-pytorch-profiler into a file and a summary",
    ),
    F("--profile-step-start", "profile the iterations after this one"),
    F("--profile-step-end", "the last of them"),
    F("--profile-ranks", "ranks to profile (default: all)"),
    F("--use-pytorch-profiler", "write torch_profile/rank-N.json.gz and .txt next to --tensorboard-dir, or in --save"),
    F("--pytorch-profiler-collect-shapes", "with the shapes of inputs"),
    F("--pytorch-profiler-collect-callstack", "with the lines of Python"),
    F("--pytorch-profiler-collect-chakra", "write torch's execution trace to chakra/ too"),
    F(
        "--overlap-report",
        "write a page, a picture and numbers of one iteration: for each unit compute, gathers, "
        "reductions and the time in which nothing computes, and the memory by kind",
        metavar="FOLDER",
        type=str,
    ),
    F(
        "--overlap-report-step",
        "the iteration of --overlap-report (default: the twelfth of this run)",
        type=int,
        metavar="ITERATION",
    ),
    F("--nvtx-ranges", "mark iterations for nsys; units are always marked"),
    F("--record-shapes", "mark operators with their shapes for nsys"),
    F(
        "--record-memory-history",
        "record allocations; write a snapshot and a summary after --profile-step-end, at the end of "
        "training if that is earlier, and where memory runs out",
    ),
    F("--memory-snapshot-path", "file of the snapshot; the rank is put before its suffix"),
)
