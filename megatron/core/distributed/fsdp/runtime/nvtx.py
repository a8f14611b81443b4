"""NVTX ranges for profilers such as Nsight Systems: what the engine does, with the unit's name.

Operations nest: they are pushed and popped (``fsdp.gather layers.0``). Phases of units overlap: they are begun and ended. A range
costs about half a microsecond; in a build without NVTX (for CPUs) it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_nvtx: Any = getattr(torch._C, "_nvtx", None)


def push(name: str) -> None:
    """Begin an operation of this name."""
    if _nvtx is not None:
        _nvtx.rangePushA(name)


def pop() -> None:
    """End the operation that was pushed last."""
    if _nvtx is not None:
        _nvtx.rangePop()


def begin(name: str) -> int:
    """Begin a phase of this name; return what ends it."""
    return int(_nvtx.rangeStartA(name)) if _nvtx is not None else 0


def end(mark: int) -> None:
    """End the phase."""
    if _nvtx is not None:
        _nvtx.rangeEnd(mark)


@contextmanager
def shown_to(tool: Any) -> Iterator[None]:
    """Hand the ranges of the scope to ``tool``, which has the functions of ``torch._C._nvtx``. No pass is under way."""
    global _nvtx
    before, _nvtx = _nvtx, tool
    try:
        yield
    finally:
        _nvtx = before
