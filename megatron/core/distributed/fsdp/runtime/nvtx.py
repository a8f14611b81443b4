"""NVTX ranges for profilers such as Nsight Systems: what the engine does, with the unit's name.

Operations nest: they are pushed and popped (``fsdp.gather layers.0``). Phases of units overlap: they are begun and ended. A range
costs about half a microsecond; in a build without NVTX (for CPUs) it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_nvtx: Any = getattr(torch._C, "_nvtx", None)

# Functions in C, under these names: several hundred calls a step. Without NVTX they do nothing, which ``bool`` does at the least cost.
push: Callable[[str], object] = getattr(_nvtx, "rangePushA", bool)
"""Begin an operation of this name."""

pop: Callable[[], object] = getattr(_nvtx, "rangePop", bool)
"""End the operation that was pushed last."""

begin: Callable[[str], int] = getattr(_nvtx, "rangeStartA", bool)
"""Begin a phase of this name; return what ends it."""

end: Callable[[int], object] = getattr(_nvtx, "rangeEnd", bool)
"""End the phase."""


@contextmanager
def shown_to(tool: Any) -> Iterator[None]:
    """Hand the ranges of the scope to ``tool``, which has the functions of ``torch._C._nvtx``. No pass is under way."""
    global push, pop, begin, end
    before = push, pop, begin, end
    push, pop, begin, end = tool.rangePushA, tool.rangePop, tool.rangeStartA, tool.rangeEnd
    try:
        yield
    finally:
        push, pop, begin, end = before
