"""The engine on a machine without devices: its memory and its schedule, planned and not run.

Buffers, plan and collectives are those of a run, since the engine's own code makes them. What differs between a CPU and a
device is exchanged here, in one place: sums are those of NCCL and of one kernel, and streams are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from megatron.core.distributed.fsdp.buffers import materialize
from megatron.core.distributed.fsdp.codec.fp8_codec import Fp8Codec
from megatron.core.distributed.fsdp.comm import process_group, transport
from megatron.core.distributed.fsdp.comm.peer_copy import SCRATCH_NBYTES
from megatron.core.distributed.fsdp.comm.peer_memory import PAGE_NBYTES
from megatron.core.distributed.fsdp.comm.streams import Edge, Role, Streams
from megatron.core.distributed.fsdp.flat_optimizer import adamw_update
from megatron.core.distributed.fsdp.runtime import context as contexts
from megatron.core.distributed.fsdp.runtime import unit as unit_module
from megatron.core.distributed.fsdp.runtime.context import FsdpContext

Fused = Callable[..., Any]
"""``fused(name, function, *args, **kwargs)`` calls a function that is one kernel on a device."""

__all__ = ["Edge", "Role", "Streams", "peer_copy_nbytes", "stand_ins", "storages_by_kind", "timed_kernels"]


def stand_ins(fused: Fused, streams: Callable[[], Streams]) -> list[AbstractContextManager[Any]]:
    """Return scopes in which the engine does on the CPU what it does on a CUDA device."""
    plain, by_rank_order = process_group.ProcessGroupTransport, process_group.RankOrderTransport

    def make_streams(device: torch.device, *, one_for_communication: bool = False) -> Streams:
        return streams()

    def exchange(transport: process_group.ProcessGroupTransport, value: Any) -> list[Any]:
        return [value] * transport.size  # there are no other ranks

    def one_write(codec: Fp8Codec, target: torch.Tensor, weights: torch.Tensor, *_: Any, nominal: torch.dtype) -> None:
        fused("write_bytes", _nothing, target, weights)

    def one_maximum(codec: Fp8Codec, amax: torch.Tensor, weights: torch.Tensor, *_: Any) -> None:
        fused("raise_amax", _nothing, weights)

    def one_sum(out: torch.Tensor, pieces: Sequence[torch.Tensor], scale: float, accumulate: bool) -> None:
        fused("sum_pieces", _nothing, out, pieces, accumulate)

    def is_unfilled(tensor: torch.Tensor) -> bool:
        return getattr(tensor, "_local_tensor", tensor).is_meta  # memory that nobody has written may hold NaN

    return [
        patch.object(materialize, "is_unfilled", is_unfilled),
        patch.object(unit_module, "is_unfilled", is_unfilled),
        patch.object(contexts, "make_streams", make_streams),
        patch.object(by_rank_order, "reduce_scatter", plain.reduce_scatter),
        patch.object(by_rank_order, "all_reduce", plain.all_reduce),
        patch.object(plain, "exchange", exchange),
        patch.object(adamw_update.AdamWUpdate, "update", _as_one_kernel(fused, _nothing)),
        patch.object(transport, "_kernel", lambda: one_sum),
        patch.object(Fp8Codec, "write", one_write),
        patch.object(Fp8Codec, "raise_amax", one_maximum),
    ]


def timed_kernels(fused: Fused) -> list[AbstractContextManager[Any]]:
    """Return scopes in which the engine's own kernels are called through ``fused``, under the names that they have in plans."""
    make_kernel = transport._kernel

    def one_kernel() -> Any:
        kernel = make_kernel()
        return None if kernel is None else partial(fused, "sum_pieces", kernel)

    update = _as_one_kernel(fused, adamw_update.AdamWUpdate._launch)
    return [patch.object(adamw_update.AdamWUpdate, "_launch", update), patch.object(transport, "_kernel", one_kernel)]


def _as_one_kernel(fused: Fused, update: Callable[..., object]) -> Callable[..., None]:
    """Return an optimizer's update as one kernel, which reads the gradient, and reads and writes the optimizer's state."""

    def one_update(own: Any, shard: adamw_update.FlatShard, grad: torch.Tensor, *args: Any, **options: Any) -> None:
        def run(grad: torch.Tensor, state: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            update(own, shard, grad, *args, **options)
            return state

        moments = (shard.exp_avg, shard.exp_avg_sq, shard.exp_avg_scales, shard.exp_avg_sq_scales)
        state = (shard.main, *moments, shard.remainder, shard.model)
        fused("update_kernel", run, grad, [part for part in state if part is not None])

    return one_update


def _nothing(*args: Any, **options: Any) -> None:
    """Stand for a kernel that reads or writes these."""


_SHARED = ("main weights", "model weights", "gradient staging")


def peer_copy_nbytes(context: FsdpContext, sizes: Mapping[int, int]) -> int:
    """Return what peer copy takes besides: memory that peers read is in whole pages, and pieces are copied before they are summed.

    Args:
        sizes: bytes by the address of a storage.
    """
    shared = [sizes.get(key, 0) for key, kind in storages_by_kind(context).items() if kind in _SHARED]
    return SCRATCH_NBYTES + sum(-size % PAGE_NBYTES for size in shared)


def storages_by_kind(context: FsdpContext) -> dict[int, str]:
    """Return what each memory of the engine is for, by the address of its storage."""
    kinds: dict[int, str] = {}

    def put(kind: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            kinds.setdefault(tensor.untyped_storage()._cdata, kind)

    for group in context.groups:
        weights = group.weights
        put("main weights", weights.main.local)
        put("model weights", weights.model.local)
        if weights.full_storage is not None:
            put("gathered weights", weights.full_storage.flat)
        if group.trainable:
            put("gradient staging", group.grads.input.storage.flat)
            put("main gradients", group.grads.main.storage.flat)
            sums = group.grads.accumulator.storage
            put("partial gradients", None if sums is None else sums.flat)
    return kinds
