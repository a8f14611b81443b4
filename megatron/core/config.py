"""Megatron-Core's switch of what it calls experimental; nothing here asks it, code that its decorators mark does."""

from __future__ import annotations

ENABLE_EXPERIMENTAL = False


def set_experimental_flag(flag: bool) -> None:
    """Let functions and classes that are marked as experimental be called, or not."""
    global ENABLE_EXPERIMENTAL
    ENABLE_EXPERIMENTAL = flag


def is_experimental_enabled() -> bool:
    """Return whether functions and classes that are marked as experimental may be called."""
    return ENABLE_EXPERIMENTAL
