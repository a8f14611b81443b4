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
    """A range's name, as Megatron-FSDP has it: of the unit within its root.

    Attributes:
        own: the engine's, which differs between all units of a context.
    """

    own: str

    def __new__(cls, name: str, phase: str, own: str) -> UnitRange:
        """Name a phase of the unit ``name``, which is "" for the root."""
        made = super().__new__(cls, f"MFSDP {name or '<root>'} {phase}")
        made.own = f"fsdp.{phase} {own}"
        return made


# What torch.cuda.nvtx has of its own, which ends in the functions above; and what it had when that was asked last.
_torchs_own = followed = torch.cuda.nvtx.range_push


def follow() -> None:
    """Use what ``torch.cuda.nvtx`` has now for the ranges of units. No pass is under way."""
    global enter, leave, begin, end, followed
    followed = torch.cuda.nvtx.range_push
    enter, leave = (push, pop) if followed is _torchs_own else (followed, torch.cuda.nvtx.range_pop)
    begin, end = enter, leave


@contextmanager
def shown_to(tool: Any) -> Iterator[None]:
    """Hand the ranges of the scope to ``tool``, which has ``push``, ``pop``, ``begin`` and ``end``. No pass is under way."""
    global push, pop, enter, leave, begin, end
    before = push, pop, enter, leave, begin, end
    push, pop, enter, leave, begin, end = tool.push, tool.pop, tool.push, tool.pop, tool.begin, tool.end
    try:
        yield
    finally:
        push, pop, enter, leave, begin, end = before
