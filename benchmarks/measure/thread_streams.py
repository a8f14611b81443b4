"""Streams of a CPU: reductions run in a thread in their order, so the engine's waits can be measured where there is no GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from megatron.core.distributed.fsdp.comm.process_group import RankOrderTransport
from megatron.core.distributed.fsdp.comm.streams import Edge, Role, Streams
from megatron.core.distributed.fsdp.runtime import context as contexts
from megatron.core.distributed.fsdp.runtime.grad_reducer import GradReducer


@dataclass
class Times:
    """Sums on this rank."""

    waited_s: float = 0.0
    """Compute waited for reductions."""
    outer_s: float = 0.0
    """The thread was in reductions over the ranks that ``is_outer`` says."""
    outer_nbytes: int = 0
    """What such reductions were given."""


class ThreadStreams(Streams):
    """The reduce stream as a thread; all else is done when its call returns.

    Args:
        is_outer: whether ranks of a reduction are those of an outer axis.
    """

    def __init__(self, is_outer: Callable[[list[int]], bool]) -> None:
        super().__init__()
        self.times, self._is_outer = Times(), is_outer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reduce stream")
        self._last: Future[None] | None = None
        self._on_reduce = False
        self._issuer: threading.Thread | None = None

    @contextmanager
    def on(self, role: Role) -> Iterator[None]:
        before, self._on_reduce = self._on_reduce, role is Role.REDUCE
        self._issuer = threading.current_thread()
        try:
            yield
        finally:
            self._on_reduce = before

    def record(self, role: Role, again: Any = None) -> Future[None] | None:
        return self._last if role is Role.REDUCE else None

    def wait(self, edge: Edge, event: Future[None] | None) -> None:
        if event is not None:
            began = time.perf_counter()
            event.result()
            self.times.waited_s += time.perf_counter() - began

    def drain(self) -> None:
        """Wait for all reductions."""
        if self._last is not None:
            self._last.result()

    def issue(self, reduce: Callable[..., None], transport: RankOrderTransport, *given: Any, **named: Any) -> None:
        """Run a reduction: in the thread where it is issued on the reduce stream, and not by another reduction."""
        if self._on_reduce and threading.current_thread() is self._issuer:
            self._last = self._thread.submit(self._run, reduce, transport, *given, **named)
        else:
            reduce(transport, *given, **named)

    def _run(self, reduce: Callable[..., None], transport: RankOrderTransport, *given: Any, **named: Any) -> None:
        began = time.perf_counter()
        reduce(transport, *given, **named)
        if self._is_outer(transport.ranks):
            self.times.outer_s += time.perf_counter() - began
            self.times.outer_nbytes += given[1].nbytes


@contextmanager
def thread_streams(is_outer: Callable[[list[int]], bool]) -> Iterator[ThreadStreams]:
    """Give modules that are sharded and trained within the scope a reduce stream that runs beside compute. CPU, gloo.

    What is reduced must be whole after its reductions: one microbatch per step, so that nothing else runs on that stream.
    """
    streams = ThreadStreams(is_outer)

    def make_streams(device: torch.device, *, one_for_communication: bool = False) -> Streams:
        return streams

    def issuing(name: str) -> Any:
        reduce = getattr(RankOrderTransport, name)

        def issue(transport: RankOrderTransport, *given: Any, **named: Any) -> None:
            streams.issue(reduce, transport, *given, **named)

        return patch.object(RankOrderTransport, name, issue)

    follow_up = GradReducer.follow_up

    def follow(reducer: GradReducer, act: Callable[[], None]) -> None:
        streams.drain()
        follow_up(reducer, act)

    with ExitStack() as scopes:
        scopes.enter_context(patch.object(contexts, "make_streams", make_streams))
        for name in ("all_reduce", "reduce_scatter"):
            scopes.enter_context(issuing(name))
        scopes.enter_context(patch.object(GradReducer, "follow_up", follow))
        try:
            yield streams
        finally:
            streams.drain()
