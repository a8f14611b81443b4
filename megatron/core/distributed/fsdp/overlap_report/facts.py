"""What the engine knows of a step that a trace does not say: bytes of each unit, and whose the memory is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatStorage
from megatron.core.distributed.fsdp.buffers.gradients import Gradients
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.overlap_report.memory import (
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
    STAGING,
    WEIGHTS,
    KnownMemory,
)
from megatron.core.distributed.fsdp.overlap_report.trace import BACKWARD, FORWARD
from megatron.core.distributed.fsdp.runtime.context import FsdpContext
from megatron.core.distributed.fsdp.runtime.unsharder import Unsharder


@contextmanager
def counting_bytes(contexts: Sequence[FsdpContext]) -> Iterator[Counter[tuple[str, str, str]]]:
    """Count the bytes that other ranks send to this one in the scope, by (act, unit, direction)."""
    nbytes: Counter[tuple[str, str, str]] = Counter()
    groups = {id(group.grads): group for context in contexts for group in context.groups if group.trainable}
    prefetch, reduce = Unsharder.prefetch, Gradients.reduce

    def prefetch_counted(unsharder: Unsharder, group: FsdpParameterGroup, *, forward: bool) -> None:
        weights = group.weights
        version = weights.freshness.version
        is_stale = forward and version != unsharder.state.weight_version
        gathers = weights.needs_gather and (is_stale or not weights.is_unsharded)
        prefetch(unsharder, group, forward=forward)
        acts = {"sync": weights.freshness.version != version, "gather": gathers}
        for act in (act for act, is_done in acts.items() if is_done):
            direction = FORWARD if forward else BACKWARD
            nbytes["gather", _unit_of(group), direction] += weights.received_nbytes(syncs=act == "sync")

    def reduce_counted(grads: Gradients, *, overwrite: bool, is_last: bool, has_input: bool = True) -> None:
        reduce(grads, overwrite=overwrite, is_last=is_last, has_input=has_input)
        if (group := groups.get(id(grads))) is not None:  # not of another model
            nbytes["reduce", _unit_of(group), BACKWARD] += reduced_nbytes(
                grads.input.storage.nbytes,
                [axis.size for axis in group.group_mesh.axes],
                group.placements.optimizer,
                is_last=is_last,
                has_input=has_input,
            )

    with patch.object(Unsharder, "prefetch", prefetch_counted), patch.object(Gradients, "reduce", reduce_counted):
        yield nbytes


def _unit_of(group: FsdpParameterGroup) -> str:
    return group.ranges.gather.partition(" ")[2]


def reduced_nbytes(
    nbytes: int, sizes: Sequence[int], placements: Sequence[Placement], *, is_last: bool, has_input: bool
) -> int:
    """Return the bytes that a reduction receives; an all-reduce is a reduce-scatter and an all-gather. Pure.

    Args:
        nbytes: of the whole gradients.
        sizes, placements: [axes] ranks, and where main gradients rest, the outer axis first.
        is_last: it is reduced over the outer axis, too, if there is one.
        has_input: it is reduced over the inner axis.
    """
    received = 0
    for axis in reversed(range(len(sizes))):
        is_inner, passes = axis == len(sizes) - 1, 1 if isinstance(placements[axis], Shard) else 2
        if has_input if is_inner else is_last:
            received += passes * nbytes * (sizes[axis] - 1) // sizes[axis]
        if isinstance(placements[axis], Shard):
            nbytes //= sizes[axis]
    return received


@contextmanager
def watching_memory(contexts: Sequence[FsdpContext], device: torch.device) -> Iterator[KnownMemory]:
    """Record what the memory of the step in the scope is for. No pass is under way at its begin.

    Yields:
        What is known at the end of the scope. Its times are nanoseconds since 1970.
    """
    known = KnownMemory()
    groups = [group for context in contexts for group in context.groups]
    kinds = {id(storage): kind for group in groups for storage, kind in _storages(group)}
    optimizers: set[torch.optim.Optimizer] = set()
    allocate = FlatStorage.allocate

    def add(tensor: torch.Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type == device.type and storage.nbytes():
            known.blocks.setdefault(storage.data_ptr(), (storage.nbytes(), kind))

    def allocate_noted(storage: FlatStorage) -> None:
        allocate(storage)
        if (kind := kinds.get(id(storage))) is not None:
            known.named.append((time.time_ns(), storage.flat.untyped_storage().data_ptr(), kind))

    for group in groups:
        add(group.weights.main.local, WEIGHTS)
        add(group.weights.model.local, WEIGHTS)
        for storage, kind in _storages(group):
            if storage.allocated:
                add(storage.flat, kind)
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: optimizers.add(optimizer))
    try:
        with patch.object(FlatStorage, "allocate", allocate_noted):
            yield known
    finally:
        handle.remove()
    # Only now, since the first step of an optimizer makes its state. Who makes it in this step has it in the trace, too.
    for optimizer in optimizers:
        for leaf in tree_leaves(list(optimizer.state.values())):
            if isinstance(leaf, torch.Tensor):
                add(getattr(leaf, "_local_tensor", leaf), OPTIMIZER)
    known.unknown_nbytes = max(0, allocated - sum(_nbytes_of_allocator(known, device)))


def _nbytes_of_allocator(known: KnownMemory, device: torch.device) -> Iterator[int]:
    """Yield the bytes of what is known and in memory of PyTorch's allocator; transports have memory of their own."""
    if device.type != "cuda":
        return
    segments = [(each["address"], each["address"] + each["total_size"]) for each in torch.cuda.memory_snapshot()]
    for address, (nbytes, _) in known.blocks.items():
        if any(begin <= address < end for begin, end in segments):
            yield nbytes


def _storages(group: FsdpParameterGroup) -> Iterator[tuple[FlatStorage, str]]:
    if group.weights.full_storage is not None:
        yield group.weights.full_storage, GATHERED
    if group.trainable:
        yield group.grads.input.storage, STAGING
        yield group.grads.main.storage, GRADIENTS
        if group.grads.accumulator.storage is not None:
            yield group.grads.accumulator.storage, GRADIENTS
