"""A combination of flags that is refused."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """A combination of flags that is refused before anything is allocated."""

    what: str
    """The combination; of a row that is not served, as the documentation names it."""

    when: Callable[[Namespace], bool]
    message: str
    """What the user reads; formatted with the values of the flags."""

    reason: str = ""
    """Why a lawful combination is not served; empty where flags contradict each other."""

    remedy: str = ""
    """What to change on the command line, where ``reason`` is given."""

    spoils: tuple[str, ...] = ()
    """Settings without which components cannot be checked."""
