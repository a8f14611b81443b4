"""NVTX ranges of callers, off until ``configure_nvtx_profiling(True)``; a torch without CUDA has none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch


class _Ranges:
    """The ranges that are open."""

    enabled = False
    names: list[str]

    def __init__(self) -> None:
        self.names = []


_ranges = _Ranges()


def configure_nvtx_profiling(enabled: bool) -> None:
    """Let ``nvtx_range_push`` and ``nvtx_range_pop`` mark ranges, or do nothing."""
    _ranges.enabled = enabled and torch.cuda.is_available()


def nvtx_range_push(msg: str | None = None, suffix: str | None = None) -> None:
    """Open a range; None: with the caller's name."""
    if _ranges.enabled:
        _ranges.names.append(_name(msg, suffix))
        torch.cuda.nvtx.range_push(_ranges.names[-1])


def nvtx_range_pop(msg: str | None = None, suffix: str | None = None) -> None:
    """Close the innermost range, which must have this name.

    Raises:
        RuntimeError: no range is open.
        ValueError: the innermost range has another name.
    """
    if not _ranges.enabled:
        return
    if not _ranges.names:
        raise RuntimeError("a range must be open to be closed, got none; call nvtx_range_push first")
    name, opened = _name(msg, suffix), _ranges.names.pop()
    if name != opened:
        raise ValueError(f"the innermost range must be closed first, got {name!r} within {opened!r}")
    torch.cuda.nvtx.range_pop()


def nvtx_decorator(message: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that marks each call of a function; None: with the function's name."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name = message or function.__qualname__

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            nvtx_range_push(name)
            try:
                return function(*args, **kwargs)
            finally:
                nvtx_range_pop(name)

        return marked

    return decorate


def _name(msg: str | None, suffix: str | None) -> str:
    if msg is None:
        frame = inspect.currentframe()
        for _ in range(2):
            frame = None if frame is None else frame.f_back
        msg = "range" if frame is None else frame.f_code.co_qualname
    return msg if suffix is None else f"{msg}.{suffix}"
