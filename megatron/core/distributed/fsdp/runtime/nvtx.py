"""NVTX ranges for profilers such as Nsight Systems: what the engine does, with the unit's name.

Forward and backward of units (``MFSDP layers.0 forward``) go through ``torch.cuda.nvtx``, also where a tool has put functions of its
own into it. What the engine does within them (``fsdp.gather layers.0``) goes to NVTX alone. All are pushed and popped. A range costs
about half a microsecond; in a build without NVTX (for CPUs) it does nothing.
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

enter, leave = push, pop
"""Begin and end the forward of a unit."""

begin, end = push, pop
"""Begin and end the backward of a unit."""


class UnitRange(str):
    """The NVTX name of a unit's phase, as in Megatron-FSDP: the unit is named relative to its root.

    Attributes:
        own: the engine's, which differs between all units of a context.
    """

    own: str

    def __new__(cls, name: str, phase: str, own: str) -> UnitRange:
        """Name a phase of the unit ``name``, which is "" for the root."""
        made = super().__new__(cls, f"MFSDP {name or '<root>'} {phase}")
        made.own = f"fsdp.{phase} {own}"
        return made


# The original functions of torch.cuda.nvtx, which call the functions above, and the ones seen at the last check.
_torchs_own = followed = torch.cuda.nvtx.range_push


def follow() -> None:
    """Use the current functions of ``torch.cuda.nvtx``, which a tool may have replaced. Call it between passes."""
    global enter, leave, begin, end, followed
    followed = torch.cuda.nvtx.range_push
    enter, leave = (push, pop) if followed is _torchs_own else (followed, torch.cuda.nvtx.range_pop)
    begin, end = enter, leave


@contextmanager
def shown_to(tool: Any) -> Iterator[None]:
    """Send the ranges of this scope to ``tool``, which has ``push``, ``pop``, ``begin`` and ``end``. Enter it between passes."""
    global push, pop, enter, leave, begin, end
    # The tool gets ``begin`` and ``end`` apart from ``push`` and ``pop``: backwards of units overlap, so they do not nest.
    before = push, pop, enter, leave, begin, end
    push, pop, enter, leave, begin, end = tool.push, tool.pop, tool.push, tool.pop, tool.begin, tool.end
    try:
        yield
    finally:
        push, pop, enter, leave, begin, end = before
