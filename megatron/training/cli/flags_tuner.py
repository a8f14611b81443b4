"""Flags of the tuner; all are ours."""

from __future__ import annotations

from megatron.training.cli.flag_rows import F, FlagGroup
from megatron.training.tuner.config import ALSO, DEFAULT_FILE, TuningConfig

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
