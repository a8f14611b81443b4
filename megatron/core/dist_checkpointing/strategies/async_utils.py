"""Saves that go on during training: requests, and the queue that runs them in threads and completes them on all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class AsyncRequest(NamedTuple):
    """What one rank does during training, and what follows when all ranks have done theirs.

    Source: Megatron-Core's class of this name (names and behavior).
    """

    async_fn: Callable[..., Any] | None
    """Called with the arguments below in a thread, without collectives; None: there is nothing to do."""
    async_fn_args: tuple[Any, ...] | list[Any]
    finalize_fns: list[Callable[[], Any]] | tuple[Callable[[], Any], ...]
    """Called in turn in the thread of training, on all ranks."""
    async_fn_kwargs: Mapping[str, Any] = {}
    is_frozen: bool = False

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Call ``fn`` after the other functions.

        Raises:
            RuntimeError: the request was scheduled already.
        """
        if self.is_frozen or not isinstance(self.finalize_fns, list):
            raise RuntimeError("functions must be added to a request before it is scheduled, got one that is")
        self.finalize_fns.append(fn)

    def freeze(self) -> AsyncRequest:
        """Return the request as no function can be added to it any more."""
        return self._replace(is_frozen=True, finalize_fns=tuple(self.finalize_fns))

    def run(self) -> None:
        """Do what this rank does during training. Ranks: each on its own."""
        if self.async_fn is not None:
            self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)

    def finalize(self) -> None:
        """Do what follows. Ranks: all, when all have run."""
        for function in self.finalize_fns:
            function()

    def execute_sync(self) -> None:
        """Do all of it now. Ranks: all; blocks."""
        self.run()
        dist.barrier()
        self.finalize()


class AsyncCallsQueue:
    """Requests in the order in which they were scheduled; each runs in this queue's thread, one after the other.

    Args:
        persistent: accepted; there is one thread.
    """

    def __init__(self, persistent: bool = False) -> None:
        self._calls: deque[tuple[int, AsyncRequest, Future[None]]] = deque()
        self._num_scheduled, self._threads = 0, self._one_thread()

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Run a request during training; return its number. Ranks: all, in the same order."""
        self._num_scheduled += 1
        request = async_request.freeze()
        self._calls.append((self._num_scheduled, request, self._threads.submit(request.run)))
        return self._num_scheduled

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Finalize the requests that all ranks have run, in order; return their numbers.

        Args:
            blocking: wait until all scheduled requests have run.
            no_dist: do not ask the other ranks.

        Raises:
            Exception: what a request raised on this rank.

        Ranks: all.
        """
        finalized = []
        while self._calls:
            number, request, call = self._calls[0]
            if blocking:
                call.exception()
            is_done = call.done()
            if not (is_done if no_dist or blocking else _on_all_ranks(is_done)):
                break
            self._calls.popleft()
            call.result()
            if blocking and not no_dist:
                dist.barrier()
            request.finalize()
            finalized.append(number)
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Return how many requests are scheduled and not finalized. Ranks: each on its own."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalize all requests, or with ``abort`` forget them. Ranks: all."""
        if abort:
            self._calls.clear()
        self.maybe_finalize_async_calls(blocking=True)
        self._threads.shutdown(wait=not abort, cancel_futures=abort)
        self._threads = self._one_thread()

    @staticmethod
    def _one_thread() -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix="async-save")  # started with the first request


def _on_all_ranks(is_done: bool) -> bool:
    if not dist.is_initialized():
        return is_done
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    running = torch.tensor(int(not is_done), device=device)
    dist.all_reduce(running)
    return not running.item()


async_calls = AsyncCallsQueue()
"""The queue of this process."""
