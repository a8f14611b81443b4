"""Flags of checkpoints and logs; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

from megatron.training.cli.flag_rows import F, FlagGroup

CHECKPOINT_FLAGS = FlagGroup(
    "checkpoints",
    F("--save", "folder to save to, at the end of training and by --save-interval"),
    F("--save-interval --persistent-save-interval", "iterations between saves"),
    F(
        "--save-retain-interval",
        "delete checkpoints, when the next one is complete, of iterations that this does not divide "
        "(default: keep all)",
    ),
    F("--no-save-optim", "save without optimizer state", default=False),
    F("--no-save-rng", "save without the state of the random generators", default=False),
    F("--async-save", "write while training goes on"),
    F(
        "--ckpt-format",
        "save under Megatron-LM's names: torch_dist or fsdp_dtensor (default: under ours, like the other two)",
        default=None,
    ),
    F("--load", "folder to load from; without a checkpoint in it, training starts from scratch"),
    F("--ckpt-step", "iteration to load (default: the latest)"),
    F("--use-checkpoint-args", "take the model's settings from the checkpoint of --load (Megatron-LM's list of them)"),
    F(
        "--use-mp-args-from-checkpoint-args",
        "with --use-checkpoint-args: take the tensor-, pipeline- and expert-parallel sizes too",
    ),
    F(
        "--no-use-tokenizer-model-from-checkpoint-args --disable-use-tokenizer-model-from-checkpoint-args",
        "with --use-checkpoint-args: the command line names the tokenizer",
    ),
    F("--exit-on-missing-checkpoint", "no checkpoint in --load is an error"),
    F("--no-load-optim", "load without optimizer state", default=False),
    F("--no-load-rng", "seed random generators by --seed instead of restoring their state", default=False),
    F("--no-verify-checkpoint", "load without comparing files with their checksums, which reads them twice (ours)"),
    F(
        "--verify-integrity",
        "compare files with their checksums when they are loaded (always so, but for --no-verify-checkpoint)",
        dest="no_verify_checkpoint",
        default=True,
        const=False,
    ),
    F("--finetune", "load weights alone and start at iteration 0"),
)


LOGGING_FLAGS = FlagGroup(
    "logs",
    F("--log-interval", "iterations between log lines"),
    F("--log-throughput", "log TFLOP/s and tokens/s of a device"),
    F(
        "--log-params-norm",
        "log the norm of the main weights as the optimizer has them: in fp32, or bf16 with "
        "--use-precision-aware-optimizer",
    ),
    F("--log-num-zeros-in-grad", "log the zeros in the gradient"),
    F("--log-progress", "write when jobs start and save to progress.txt, in --save"),
    F(
        "--time-left-interval",
        "seconds between lines with the time that training still takes (0: none, default: 60); they follow log lines",
        type=float,
        default=60,
        metavar="SECONDS",
    ),
    F(
        "--status-page",
        "keep an HTML page with curves, progress and events of the run in this file, and its history next to it",
        metavar="FILE",
        type=str,
    ),
    F(
        "--prometheus-file",
        "keep metrics in this file, which ends with .prom, for the textfile collector of Prometheus's node exporter",
        metavar="FILE",
        type=str,
    ),
    F("--log-memory-interval", "iterations between lines about a GPU's memory"),
    F(
        "--timing-log-level",
        "time no parts of steps (0), forward with backward and the optimizer (1), or each microbatch too (2)",
        choices=[0, 1, 2],
    ),
    F("--timing-log-option", "what lines of times show of the ranks"),
    F("--logging-level", "level of Python's root logger"),
    F("--tensorboard-dir", "folder of TensorBoard logs"),
    F("--tensorboard-queue-size", "events until a flush"),
    F("--tensorboard-log-interval", "iterations between points; they are written with the log line"),
    F("--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard", "leave out the loss scale"),
    F("--log-world-size-to-tensorboard", "write the number of ranks too"),
    F("--log-timers-to-tensorboard", "write time and throughput too"),
    F("--log-memory-to-tensorboard", "write memory too"),
    F("--log-validation-ppl-to-tensorboard", "write validation perplexity too"),
    F("--wandb-project", "log to this project of Weights & Biases", default=""),
    F("--wandb-entity", "account of the project", default=""),
    F("--wandb-exp-name", "name of the run", default=""),
    F("--wandb-save-dir", "folder of the run's local files", default=""),
)
