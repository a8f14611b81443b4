"""Flags of fp16 and of loss scaling; names, types and defaults are Megatron-LM's."""

from __future__ import annotations

import argparse

from megatron.training.cli.flag_rows import F, FlagGroup

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
