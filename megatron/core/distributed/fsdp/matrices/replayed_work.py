"""Work on fixed memory that is the same in every step: one launch for the host instead of many."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch


class CaptureSite(NamedTuple):
    """Where works are captured that never run at the same time: a stream, and memory of their graphs."""

    stream: torch.cuda.Stream
    pool: Any


def capture_site(device: torch.device) -> CaptureSite | None:
    """Make a site; None elsewhere than on CUDA."""
    if device.type != "cuda":
        return None
    return CaptureSite(torch.cuda.Stream(device), torch.cuda.graph_pool_handle())


class ReplayedWork:
    """Work that is captured in a CUDA graph when it comes the second time, and replayed from then on.

    The first time libraries and compilers make themselves ready.

    Args:
        work: launches on the current stream; communicates nothing, and reads and writes tensors that keep their memory.
        site: where it is captured; None: it runs each time.
    """

    def __init__(self, work: Callable[[], None], site: CaptureSite | None) -> None:
        self._work, self._site, self._has_run = work, site, False
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._graph is None and self._has_run and self._site is not None:
            self._graph = self._captured(self._site)
        if self._graph is not None:
            self._graph.replay()
            return
        self._work()
        self._has_run = True

    def _captured(self, site: CaptureSite) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # The current stream may be the default one, which cannot be captured. Nothing runs here, so none waits for another.
        # A graph of a model that is gone would be freed by the collector, which no capture permits.
        with torch.cuda.stream(site.stream), no_garbage_collection():
            graph.capture_begin(pool=site.pool, capture_error_mode="thread_local")
            try:
                self._work()
            finally:
                graph.capture_end()
        return graph


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
