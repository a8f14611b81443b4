"""Settings of the tuner of a launch line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.training.cli.flag_parser import split_by_flag

DEFAULT_FILE = "fsdp_tuned.json"
MICRO_BATCH, IN_PLACE, LAYERS = "micro-batch-size", "in-place-gradients", "layers-per-unit"
ALSO = (MICRO_BATCH, IN_PLACE, LAYERS)
"""What is chosen only if it is asked for, since numbers change: sums have another order."""

AUTO = (
    "--fsdp-memory-budget",
    "--fsdp-forward-prefetch-depth",
    "--fsdp-backward-prefetch-depth",
    "--suggested-communication-unit-size",
)
"""Flags that may have the value ``auto``: the tuner then chooses these alone."""


def autos_on(words: Sequence[str]) -> set[str]:
    """Return the flags of a launch line that leave their value to the tuner, or to the start as ``--fsdp-transport`` does."""
    given = {flag: values for flag, values in split_by_flag(words) if flag in (*AUTO, "--fsdp-transport")}
    return {flag for flag, values in given.items() if flag is not None and values == ["auto"]}


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """Settings of ``--fsdp-tune``."""

    file: str | None = None
    """What was chosen is kept there, and read by later runs; None: nothing is tuned."""

    seconds: float = 600.0
    """After these no further measurement begins."""

    also: tuple[str, ...] = ()
    """Of ``ALSO``: choices that change numbers."""

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"--fsdp-tune-seconds must be positive, got {self.seconds}")


@dataclass(frozen=True, kw_only=True)
class LaunchLine:
    """The words of the command line."""

    words: tuple[str, ...] = ()
    """The tuner adds to them."""
