"""What the engine knows of a step that a trace does not say: bytes of each unit, and whose the memory is."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatStorage
from megatron.core.distributed.fsdp.buffers.gradients import Gradients
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.overlap_report.memory import GATHERED, GRADIENTS, OPTIMIZER, STAGING, WEIGHTS
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

    Unsharder.prefetch = prefetch_counted  # type: ignore[assignment, method-assign]
    Gradients.reduce = reduce_counted  # type: ignore[assignment, method-assign]
    try:
        yield nbytes
    finally:
        Unsharder.prefetch, Gradients.reduce = prefetch, reduce  # type: ignore[method-assign]


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


class MemoryWatch:
    """Notes whose memory is where, in one step.

    Attributes:
        at_begin: {address: (bytes, kind)} of what is there when the step begins.
        allocated: bytes that PyTorch's allocator had handed out then; None where it does not count.
        named: [(nanoseconds since 1970, address, kind)] of what was allocated later.
    """

    def __init__(self, contexts: Sequence[FsdpContext], device: torch.device) -> None:
        self._contexts, self._device = contexts, device
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self.at_begin: dict[int, tuple[int, str]] = {}
        self.named: list[tuple[int, int, str]] = []
        self.unknown_nbytes = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the step of the scope. No pass is under way."""
        kinds = {id(storage): kind for group in self._groups() for storage, kind in _storages(group)}
        self.at_begin = {}
        for tensor, kind in self._engine_tensors():
            self._add(tensor, kind)
        allocated = torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

        def note(storage: FlatStorage) -> None:
            allocate(storage)
            kind = kinds.get(id(storage))
            if kind is not None:
                self.named.append((time.time_ns(), storage.flat.untyped_storage().data_ptr(), kind))

        def note_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._optimizers[id(optimizer)] = optimizer

        handle = register_optimizer_step_pre_hook(note_optimizer)
        allocate = FlatStorage.allocate
        FlatStorage.allocate = note  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            FlatStorage.allocate = allocate  # type: ignore[method-assign]
            handle.remove()
        for optimizer in self._optimizers.values():
            for tensor in _tensors(optimizer.state):
                self._add(tensor, OPTIMIZER)
        self._optimizers.clear()
        self.unknown_nbytes = max(0, allocated - sum(self._of_allocator()))

    def _groups(self) -> list[FsdpParameterGroup]:
        return [group for context in self._contexts for group in context.groups]

    def _engine_tensors(self) -> Iterator[tuple[torch.Tensor, str]]:
        for group in self._groups():
            yield group.weights.main.local, WEIGHTS
            yield group.weights.model.local, WEIGHTS
            for storage, kind in _storages(group):
                if storage.allocated:
                    yield storage.flat, kind

    def _add(self, tensor: torch.Tensor, kind: str) -> None:
        if tensor.device.type != self._device.type:
            return
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self.at_begin.setdefault(storage.data_ptr(), (storage.nbytes(), kind))

    def _of_allocator(self) -> Iterator[int]:
        """Yield the bytes of what is known and in memory of PyTorch's allocator; transports have memory of their own."""
        if self._device.type != "cuda":
            return
        segments = [(each["address"], each["address"] + each["total_size"]) for each in torch.cuda.memory_snapshot()]
        for address, (nbytes, _) in self.at_begin.items():
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


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        local = getattr(value, "_local_tensor", value)
        yield local
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
