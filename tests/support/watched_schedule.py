"""Tells ``LoggingStreams`` what the engine's work reads and writes, so that races between streams are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from megatron.core.distributed.fsdp import FsdpParameterGroup
from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatStorage
from megatron.core.distributed.fsdp.buffers.gradients import Gradients
from megatron.core.distributed.fsdp.buffers.parameter_group import group_of
from megatron.core.distributed.fsdp.buffers.weights import Weights
from megatron.core.distributed.fsdp.runtime import context as context_module
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder
from tests.support.logging_streams import LoggingStreams

Accesses = tuple[str, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


@contextmanager
def watched_schedule(streams: LoggingStreams) -> Iterator[LoggingStreams]:
    """In the scope, contexts are made with ``streams``, and everything that groups do is work on their buffers."""

    def gather(weights: Weights) -> Accesses:
        return "gather", (weights.model.local,), (weights.full.local,)

    def sync(weights: Weights) -> Accesses:
        if weights.main is weights.model:
            return "sync", (), ()
        return "sync", (weights.main.local,), (weights.model.local,)

    def copy_in(grads: Gradients) -> Accesses:
        return "copy in", (), ((grads.main if grads.input.is_main else grads.input).storage.flat,)

    def accumulate(grads: Gradients) -> Accesses:
        assert grads.accumulator.storage is not None
        return "accumulate", (grads.input.storage.flat,), (grads.accumulator.storage.flat,)

    def reduce(grads: Gradients) -> Accesses:
        sums = grads.accumulator
        uses_sums = sums.storage is not None and (sums.has_sums or not sums.sums_locally)
        kept = (sums.storage.flat,) if uses_sums else ()
        return "reduce", (), (grads.input.storage.flat, *kept, grads.main.storage.flat)

    with ExitStack() as patches:
        patches.enter_context(patch.object(context_module, "make_streams", lambda device, **_: streams))
        for owner, method, accesses in (
            (Weights, "gather", gather),
            (Weights, "sync", sync),
            (Gradients, "copy_in", copy_in),
            (Gradients, "accumulate_partial", accumulate),
            (Gradients, "reduce", reduce),
        ):
            patches.enter_context(_watched(streams, owner, method, accesses))
        patches.enter_context(_watched_use(streams))
        patches.enter_context(_watched_memory(streams))
        yield streams


def _name(group: FsdpParameterGroup) -> str:
    return group.prefix.removeprefix("blocks.").rstrip(".") or "root"


def _watched(streams: LoggingStreams, owner: type, method: str, accesses: Callable[[Any], Accesses]) -> Any:
    original = getattr(owner, method)

    def watched(buffers: Any, **options: Any) -> None:
        what, reads, writes = accesses(buffers)
        sharded = buffers.sharded if isinstance(buffers, Weights) else buffers._sharded
        group = group_of(sharded[0])
        assert group is not None
        if method == "gather":  # which records the end of its work itself
            streams.work(f"{what} {_name(group)}", reads=reads, writes=writes)
        original(buffers, **options)
        if method != "gather":
            streams.work(f"{what} {_name(group)}", reads=reads, writes=writes)

    return patch.object(owner, method, watched)


@contextmanager
def _watched_use(streams: LoggingStreams) -> Iterator[None]:
    """Compute reads unsharded weights from ``unshard`` to ``reshard``; where they lie is asked at both."""
    unshard, reshard = Unsharder.unshard, Unsharder.reshard

    def watched_unshard(unsharder: Unsharder, group: FsdpParameterGroup, *, forward: bool) -> None:
        unshard(unsharder, group, forward=forward)
        streams.work(f"{'forward' if forward else 'backward'} {_name(group)}", reads=(group.weights.full.local,))

    def watched_reshard(unsharder: Unsharder, group: FsdpParameterGroup) -> None:
        if (
            group.weights.is_unsharded and not group.weights.gathered.is_pending
        ):  # compute has waited for it, so it may have used it
            streams.work(f"end {_name(group)}", reads=(group.weights.full.local,))
        reshard(unsharder, group)

    with patch.object(Unsharder, "unshard", watched_unshard), patch.object(Unsharder, "reshard", watched_reshard):
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
    """Log each step as work that reads main gradients and writes main weights."""

    def step(*_: Any) -> None:
        gradients = tuple(group.grads.main.storage.flat for group in groups if group.trainable and group.grads.has_main)
        streams.work("optimizer", reads=gradients, writes=tuple(group.weights.main.local for group in groups))

    optimizer.register_step_pre_hook(step)
