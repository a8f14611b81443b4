"""Writes of the whole tensor's values to a sharded DTensor: random initial values, and writes by index.

A random fill is the one that the whole tensor would get. A write by index (``weight[[1, 3]] = 0``, ``torch.nn.init.sparse_``) is the
one to the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from megatron.core.distributed.fsdp.dtensor.tensor_pieces import boxes_of
from megatron.core.distributed.fsdp.dtensor.wrapped_memory import memory_of


def local_rows(parameter: DTensor, full: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``full``, in the local shape of ``parameter``; all of it where that is replicated."""
    parts = []
    for box in boxes_of(parameter):
        index = tuple(slice(begin, begin + size) for begin, size in zip(box.offsets, box.sizes, strict=True))
        parts.append(full[index].flatten())
    return torch.cat(parts).view(parameter._local_tensor.shape)


def fill(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor, and keep this rank's part of it.

    Each rank draws from its own generator: with equal seeds these are the numbers of the unsharded tensor; with others, the
    parts are as independent as the seeds. Replicas are made equal to the first one.

    Ranks: all of the tensor's mesh.
    """
    target = args[0]
    local = target._local_tensor
    whole = torch.empty(target.shape, dtype=local.dtype, device=local.device)
    op(whole, *args[1:], **kwargs)
    write_part(target, local_rows(target, whole))
    return target


def index_put(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Write what plain ``values`` at plain ``indices`` of the whole tensor leave for this rank's part of it.

    Where ranks differ, the parts are each rank's, and replicas are made equal to the first one.

    Ranks: all of the tensor's mesh.
    """
    target, indices, values, *rest = args
    accumulates = rest[0] if rest else kwargs.get("accumulate", False)
    whole = torch.zeros(target.shape, dtype=target.dtype, device=target.device)
    op(whole, indices, values, accumulates)
    is_written = torch.zeros(target.shape, dtype=torch.bool, device=target.device)
    op(is_written, indices, torch.ones((), dtype=torch.bool, device=target.device))
    local, part = memory_of(target._local_tensor, writes=False), local_rows(target, whole)
    write_part(target, torch.where(local_rows(target, is_written), local + part if accumulates else part, local))
    return target


def write_part(target: DTensor, part: torch.Tensor) -> None:
    """Copy ``part`` to this rank's part of ``target``, the first replica's to all. Ranks: all of the tensor's mesh."""
    mesh = target.device_mesh
    for axis, placement in enumerate(target.placements):
        if isinstance(placement, Replicate) and mesh.size(axis) > 1:
            dist.broadcast(part, group=mesh.get_group(axis), group_src=0)
    memory_of(target._local_tensor).copy_(part)
