"""Torch has one profiler in a process: while a report records, no other one may begin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.autograd.profiler import profile as recorder

_BEGINS = (
    "_prepare_trace",
    "_start_trace",
)  # each way to begin a profile leads there, also of one that was made before


def check_no_profiler() -> None:
    """Check that nothing is being profiled.

    Raises:
        RuntimeError: something is.
    """
    if torch._C._autograd._profiler_enabled():
        raise RuntimeError(
            "no profiler of torch may run when the steps of an overlap report begin, got one that runs: a process has one profiler; "
            "end it before, or report another step"
        )


@contextmanager
def refusing_profilers() -> Iterator[None]:
    """Refuse profilers that begin within the scope, which would end the process with a segmentation fault.

    Torch's own functions raise a ``RuntimeError`` then.
    """

    def refuse(*args: Any, **named: Any) -> NoReturn:
        raise RuntimeError(
            "no profiler of torch may begin while an overlap report records its steps, got a second one: a process has one profiler; "
            "profile other steps, or make one report at a time"
        )

    own = {name: getattr(recorder, name) for name in _BEGINS}
    for name in _BEGINS:
        setattr(recorder, name, refuse)
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(recorder, name, function)
