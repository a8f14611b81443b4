"""Marks on the host's time line, for Nsight Systems and the like: what the engine does, with the unit's name.

Acts nest and are pushed and popped (``fsdp.gather layers.0``); phases of units do not, and are begun and ended. A mark
costs about half a microsecond; in a build without NVTX (for CPUs) it does nothing.
"""

from __future__ import annotations

from typing import Any

import torch

_nvtx: Any = getattr(torch._C, "_nvtx", None)


def push(name: str) -> None:
    """Afterwards an act of this name is under way."""
    if _nvtx is not None:
        _nvtx.rangePushA(name)


def pop() -> None:
    """Afterwards the act that was pushed last is over."""
    if _nvtx is not None:
        _nvtx.rangePop()


def begin(name: str) -> int:
    """Afterwards a phase of this name is under way; what is returned ends it."""
    return int(_nvtx.rangeStartA(name)) if _nvtx is not None else 0


def end(mark: int) -> None:
    """Afterwards the phase is over."""
    if _nvtx is not None:
        _nvtx.rangeEnd(mark)
