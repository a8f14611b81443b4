"""Megatron-LM's import path of restarts inside a process, which are not served: flags that ask for them are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def maybe_wrap_for_inprocess_restart(pretrain: Callable[..., Any]) -> tuple[Callable[..., Any], None]:
    """Return (the function, no store)."""
    return pretrain, None
