"""Flags of the tuner; all are ours."""

from __future__ import annotations

import argparse

from megatron.training.tuner.config import ALSO, DEFAULT_FILE, TuningConfig


def add_tuner_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``TuningConfig``."""
    group = parser.add_argument_group("tuner")
    group.add_argument(
        "--fsdp-tune",
        nargs="?",
        const="",
        metavar="FILE",
        help="before training, measure which settings of the engine are fastest, of those that this command line does not give; "
        "write them to FILE and train with them; a later run of the same kind reads FILE and measures nothing (default FILE: "
        f"{DEFAULT_FILE} in --save, else in the current folder). Losses stay bitwise as they are with the same flags given by hand",
    )
    group.add_argument(
        "--fsdp-tune-seconds",
        type=float,
        help=f"begin no measurement after these (default: {TuningConfig.seconds:.0f})",
    )
    group.add_argument(
        "--fsdp-tune-also",
        nargs="+",
        choices=ALSO,
        help="also choose these, which change the order of sums and so the last bits of losses; the micro batch size changes "
        "what dropout draws, too (the global batch stays)",
    )
