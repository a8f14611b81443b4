"""Settings of the tuner of a launch line."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_FILE = "fsdp_tuned.json"
MICRO_BATCH, IN_PLACE = "micro-batch-size", "in-place-gradients"
ALSO = (MICRO_BATCH, IN_PLACE)
"""What is chosen only if it is asked for, since numbers change: sums have another order."""


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
