"""Tells ``LoggingStreams`` what the engine's work reads and writes, so that races between streams are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from megatron.core.distributed.fsdp import FsdpParameterGroup
from megatron.core.distributed.fsdp.buffers.storage import FlatStorage
from megatron.core.distributed.fsdp.runtime import context as context_module
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder
from tests.support.logging_streams import LoggingStreams


@contextmanager
def watched_schedule(streams: LoggingStreams) -> Iterator[LoggingStreams]:
    """In the scope, contexts are made with ``streams``, and everything that groups do is work on their buffers."""

    def gather(group: FsdpParameterGroup) -> tuple[str, Any, Any]:
        return "gather", (group.model_weight.local,), (group.full_weight.local,)

    def sync(group: FsdpParameterGroup) -> tuple[str, Any, Any]:
        if group.main_weight is group.model_weight:
            return "sync", (), ()
        return "sync", (group.main_weight.local,), (group.model_weight.local,)

    def stage(group: FsdpParameterGroup) -> tuple[str, Any, Any]:
        return "stage", (), (group.staging_storage.flat,)

    def accumulate(group: FsdpParameterGroup) -> tuple[str, Any, Any]:
        return "accumulate", (group.staging_storage.flat,), (group._partial_storage.flat,)

    def reduce(group: FsdpParameterGroup) -> tuple[str, Any, Any]:
        partial = (group._partial_storage.flat,) if group._holds_partial else ()
        outer = () if group._hsdp_accumulator is None else (group._hsdp_accumulator.storage.flat,)
        return "reduce", (), (group.staging_storage.flat, *partial, *outer, group.main_grad_storage.flat)

    with ExitStack() as patches:
        patches.enter_context(patch.object(context_module, "make_streams", lambda device: streams))
        for method, accesses in (
            ("gather", gather),
            ("sync", sync),
            ("stage_grads", stage),
            ("accumulate_partial", accumulate),
            ("reduce", reduce),
        ):
            patches.enter_context(_watched(streams, FsdpParameterGroup, method, accesses))
        patches.enter_context(_watched_use(streams))
        patches.enter_context(_watched_memory(streams))
        yield streams


def _name(group: FsdpParameterGroup) -> str:
    return group.prefix.removeprefix("blocks.").rstrip(".") or "root"


def _watched(streams: LoggingStreams, owner: type, method: str, accesses: Callable[[Any], tuple[str, Any, Any]]) -> Any:
    original = getattr(owner, method)

    def watched(group: FsdpParameterGroup, **options: Any) -> None:
        what, reads, writes = accesses(group)
        original(group, **options)
        streams.work(f"{what} {_name(group)}", reads=reads, writes=writes)

    return patch.object(owner, method, watched)


@contextmanager
def _watched_use(streams: LoggingStreams) -> Iterator[None]:
    """Compute reads gathered weights from ``acquire`` to ``release``; where they lie is asked at both."""
    acquire, release = Unsharder.acquire, Unsharder._reshard_now

    def watched_acquire(unsharder: Unsharder, group: FsdpParameterGroup, *, forward: bool) -> None:
        acquire(unsharder, group, forward=forward)
        streams.work(f"{'forward' if forward else 'backward'} {_name(group)}", reads=(group.full_weight.local,))

    def watched_release(unsharder: Unsharder, group: FsdpParameterGroup) -> None:
        if group.is_gathered and group.gathered is None:  # compute has waited for it, so it may have used it
            streams.work(f"end {_name(group)}", reads=(group.full_weight.local,))
        release(unsharder, group)

    with patch.object(Unsharder, "acquire", watched_acquire), patch.object(Unsharder, "_reshard_now", watched_release):
        yield


@contextmanager
def _watched_memory(streams: LoggingStreams) -> Iterator[None]:
    """Memory that is given back may be written by whatever compute does next: the allocator is that of its stream."""
    allocate, free, move = FlatStorage.allocate, FlatStorage.free, FlatStorage.move

    def watched_allocate(storage: FlatStorage) -> None:
        if not storage.allocated:
            allocate(storage)
            streams.work("allocate", writes=(storage.flat,))

    def watched_free(storage: FlatStorage) -> None:
        if storage.allocated and not storage.in_arena:
            streams.work("free", writes=(storage.flat,))
        free(storage)

    def watched_move(storage: FlatStorage, flat: torch.Tensor | None) -> None:
        move(storage, flat)
        streams.work("move", writes=(storage.flat,))  # an arena was zeroed; memory of its own is the allocator's

    with (
        patch.object(FlatStorage, "allocate", watched_allocate),
        patch.object(FlatStorage, "free", watched_free),
        patch.object(FlatStorage, "move", watched_move),
    ):
        yield


def watch_optimizer(
    streams: LoggingStreams, optimizer: torch.optim.Optimizer, groups: list[FsdpParameterGroup]
) -> None:
    """Afterwards each step is work that reads main gradients and writes main weights."""

    def step(*_: Any) -> None:
        gradients = tuple(group.main_grad_storage.flat for group in groups if group.has_main_grad)
        streams.work("optimizer", reads=gradients, writes=tuple(group.main_weight.local for group in groups))

    optimizer.register_step_pre_hook(step)
