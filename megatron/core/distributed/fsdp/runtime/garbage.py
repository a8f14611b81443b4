"""Scopes in which Python collects no garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python's collector from running in the scope; what was set before is set again after it.

    For captures of CUDA graphs, in which no memory of earlier steps or models may be freed, and for measurements.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
