"""Flags of checkpoints and logs; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``CheckpointConfig``."""
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--save", help="folder to save to, at the end of training and by --save-interval")
    group.add_argument(
        "--save-interval", "--persistent-save-interval", dest="save_interval", type=int, help="iterations between saves"
    )
    group.add_argument(
        "--save-retain-interval",
        type=int,
        help="delete checkpoints, when the next one is complete, of iterations that this does not divide (default: keep all)",
    )
    group.add_argument("--no-save-optim", action="store_true", help="save without optimizer state")
    group.add_argument("--no-save-rng", action="store_true", help="save without the state of the random generators")
    group.add_argument("--async-save", action="store_true", help="write while training goes on")
    group.add_argument(
        "--ckpt-format",
        choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
        help="save under Megatron-LM's names: torch_dist or fsdp_dtensor (default: under ours, like the other two)",
    )
    group.add_argument("--load", help="folder to load from; without a checkpoint in it, training starts from scratch")
    group.add_argument("--ckpt-step", type=int, help="iteration to load (default: the latest)")
    group.add_argument(
        "--use-checkpoint-args",
        action="store_true",
        help="take the model's settings from the checkpoint of --load (Megatron-LM's list of them)",
    )
    group.add_argument(
        "--use-mp-args-from-checkpoint-args",
        action="store_true",
        help="with --use-checkpoint-args: take the tensor-, pipeline- and expert-parallel sizes too",
    )
    group.add_argument(
        "--no-use-tokenizer-model-from-checkpoint-args",
        "--disable-use-tokenizer-model-from-checkpoint-args",
        dest="use_tokenizer_model_from_checkpoint_args",
        action="store_false",
        help="with --use-checkpoint-args: the command line names the tokenizer",
    )
    group.add_argument("--exit-on-missing-checkpoint", action="store_true", help="no checkpoint in --load is an error")
    group.add_argument("--no-load-optim", action="store_true", help="load without optimizer state")
    group.add_argument(
        "--no-load-rng", action="store_true", help="seed random generators by --seed instead of restoring their state"
    )
    group.add_argument(
        "--no-verify-checkpoint",
        action="store_true",
        help="load without comparing files with their checksums, which reads them twice (ours)",
    )
    group.add_argument(
        "--verify-integrity",
        dest="no_verify_checkpoint",
        action="store_false",
        help="compare files with their checksums when they are loaded (always so, but for --no-verify-checkpoint)",
    )
    group.add_argument("--finetune", action="store_true", help="load weights alone and start at iteration 0")


def add_logging_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``LoggingConfig``."""
    group = parser.add_argument_group("logs")
    group.add_argument("--log-interval", type=int, default=100, help="iterations between log lines (default: 100)")
    group.add_argument("--log-throughput", action="store_true", help="log TFLOP/s and tokens/s of a device")
    group.add_argument(
        "--log-params-norm",
        action="store_true",
        help="log the norm of the main weights as the optimizer has them: in fp32, or bf16 with --use-precision-aware-optimizer",
    )
    group.add_argument("--log-num-zeros-in-grad", action="store_true", help="log the zeros in the gradient")
    group.add_argument(
        "--log-progress", action="store_true", help="write when jobs start and save to progress.txt, in --save"
    )
    group.add_argument(
        "--time-left-interval",
        type=float,
        default=60,
        metavar="SECONDS",
        help="seconds between lines with the time that training still takes (0: none, default: 60); they follow log lines",
    )
    group.add_argument(
        "--status-page",
        metavar="FILE",
        help="keep an HTML page with curves, progress and events of the run in this file, and its history beside it",
    )
    group.add_argument(
        "--prometheus-file",
        metavar="FILE",
        help="keep metrics in this file, which ends with .prom, for the textfile collector of Prometheus's node exporter",
    )
    group.add_argument("--log-memory-interval", type=int, help="iterations between lines about a GPU's memory")
    group.add_argument(
        "--timing-log-level",
        type=int,
        choices=[0, 1, 2],
        default=0,
        help="time no parts of steps (0), forward with backward and the optimizer (1), or each microbatch too (2)",
    )
    group.add_argument(
        "--timing-log-option",
        choices=["max", "minmax", "all"],
        default="minmax",
        help="what lines of times show of the ranks (default: minmax)",
    )
    group.add_argument("--logging-level", type=int, help="level of Python's root logger")
    group.add_argument("--tensorboard-dir", help="folder of TensorBoard logs")
    group.add_argument("--tensorboard-queue-size", type=int, default=1000, help="events until a flush (default: 1000)")
    group.add_argument(
        "--tensorboard-log-interval",
        type=int,
        default=1,
        help="iterations between points; they are written with the log line (default: 1)",
    )
    group.add_argument(
        "--no-log-loss-scale-to-tensorboard",
        "--disable-log-loss-scale-to-tensorboard",
        dest="log_loss_scale_to_tensorboard",
        action="store_false",
        help="leave out the loss scale",
    )
    group.add_argument("--log-world-size-to-tensorboard", action="store_true", help="write the number of ranks too")
    group.add_argument("--log-timers-to-tensorboard", action="store_true", help="write time and throughput too")
    group.add_argument("--log-memory-to-tensorboard", action="store_true", help="write memory too")
    group.add_argument(
        "--log-validation-ppl-to-tensorboard", action="store_true", help="write validation perplexity too"
    )
    group.add_argument("--wandb-project", default="", help="log to this project of Weights & Biases")
    group.add_argument("--wandb-entity", default="", help="account of the project")
    group.add_argument("--wandb-exp-name", default="", help="name of the run")
    group.add_argument("--wandb-save-dir", default="", help="folder of the run's local files")
