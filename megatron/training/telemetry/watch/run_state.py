"""What is known of a run at the moment."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

UNKNOWN_S = 600.0
"""Seconds until the next word where nothing tells: before the first log line, and in the first pause of its kind."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What does not change during a run."""

    run: str
    """Its name."""

    rank: int = 0
    texts: Sequence[tuple[str, str]] = ()
    """Title and text: launch line, versions and others."""

    peak_tflops: float | None = None
    """Of a device, in bf16; None: not known."""


@dataclass(kw_only=True)
class State:
    """What changes with each word from training."""

    start: str = field(default_factory=lambda: secrets.token_hex(8))
    """A name that no other start of a run has."""

    what: str = "start"
    """What runs: "training", a kind of pause, "end" or "failure"."""

    since: float = field(default_factory=time.time)
    expected_s: float = UNKNOWN_S
    """Seconds until the next word."""

    text: str = ""
    """Why training ended."""

    iteration: int = 0
    last_iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    fraction_done: float = 0.0
    seconds_left: float | None = None
    progress: str = ""
    """A sentence."""

    latest: dict[str, float | None] = field(default_factory=dict)
    """Values of the last log line."""

    engine_memory: dict[str, int] = field(default_factory=dict)
    """Bytes by kind."""

    silent: list[tuple[int, str, float, str]] = field(default_factory=list)
    """Ranks without signs of life: rank, host, when the last sign was given, and where the rank was then."""

    exposed: tuple[float, float, int] | None = None
    """Of the last overlap report: milliseconds that a step waits for communication, those of the step, and its iteration."""

    links: list[tuple[str, str]] = field(default_factory=list)
    """Title and address of other pages of the run, from the page on."""
