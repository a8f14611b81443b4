"""Flags of fp16 and of loss scaling; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse
from typing import Any

_LOSS_SCALING = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
"""Settings of the loss scale that follows overflows."""


def add_loss_scale_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("fp16 and loss scaling")
    group.add_argument(
        "--fp16", action="store_true", help="compute in fp16, with a loss scale that follows overflows (default: fp32)"
    )
    group.add_argument(
        "--loss-scale", type=float, help="constant loss scale, in any dtype (default: none, or in fp16 a changing one)"
    )
    group.add_argument(
        "--initial-loss-scale", type=float, default=2.0**32, help="first loss scale in fp16 (default: 2^32)"
    )
    group.add_argument("--min-loss-scale", type=float, default=1.0, help="least loss scale in fp16 (default: 1)")
    group.add_argument(
        "--loss-scale-window",
        type=float,
        default=1000.0,
        help="steps without overflow after which the loss scale is doubled (default: 1000)",
    )
    group.add_argument(
        "--hysteresis",
        type=int,
        default=2,
        help="overflows, since the loss scale was last doubled, from which on each one halves it (default: 2)",
    )


def loss_scale_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings for an ``OptimizerConfig``."""
    return {"fp16": args.fp16, "loss_scale": args.loss_scale} | {name: getattr(args, name) for name in _LOSS_SCALING}


def scales_dynamically(args: argparse.Namespace) -> bool:
    """Return whether the loss scale follows overflows, which then are no reason to end a run."""
    return bool(args.fp16 and args.loss_scale is None)
