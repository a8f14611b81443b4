"""Random initial values of sharded DTensors: those that the whole tensor would get."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from megatron.core.distributed.fsdp.codec.hooked_tensor import memory_of
from megatron.core.distributed.fsdp.dtensor.layers_at_rest import by_torch
from megatron.core.distributed.fsdp.dtensor.tensor_pieces import boxes_of
from megatron.core.distributed.fsdp.dtensor.uneven_shard import UnevenShard

_aten = torch.ops.aten
_FILLS = (
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.cauchy_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
)


def local_rows(parameter: DTensor, full: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``full``, in the local shape of ``parameter``; all of it where that is replicated."""
    parts = []
    for box in boxes_of(parameter):
        index = tuple(slice(begin, begin + size) for begin, size in zip(box.offsets, box.sizes, strict=True))
        parts.append(full[index].flatten())
    return torch.cat(parts).view(parameter._local_tensor.shape)


def _fill(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor, and keep this rank's part of it.

    Each rank draws from its own generator: with equal seeds these are the numbers of the unsharded tensor; with others, the
    parts are as independent as the seeds. Replicas are made equal to the first one.

    Ranks: all of the tensor's mesh.
    """
    target = args[0]
    if not is_engines(target):
        return by_torch(op, args, kwargs)
    local = target._local_tensor
    whole = torch.empty(target.shape, dtype=local.dtype, device=local.device)
    op(whole, *args[1:], **kwargs)
    write_part(target, local_rows(target, whole))
    return target


def write_part(target: DTensor, part: torch.Tensor) -> None:
    """Copy ``part`` to this rank's part of ``target``, the first replica's to all. Ranks: all of the tensor's mesh."""
    mesh = target.device_mesh
    for axis, placement in enumerate(target.placements):
        if isinstance(placement, Replicate) and mesh.size(axis) > 1:
            dist.broadcast(part, group=mesh.get_group(axis), group_src=0)
    memory_of(target._local_tensor).copy_(part)


def draws_whole(mesh: DeviceMesh) -> DeviceMesh:
    """Let random fills of all DTensors on this mesh be those of the whole tensor, also where nothing is sharded."""
    mesh.__dict__["_fsdp_draws_whole"] = True
    return mesh


@contextmanager
def drawing_whole(meshes: Iterable[DeviceMesh]) -> Iterator[None]:
    """Let random fills of DTensors on these meshes be those of the whole tensor within it."""
    unmarked = [mesh for mesh in meshes if "_fsdp_draws_whole" not in vars(mesh)]
    for mesh in unmarked:
        draws_whole(mesh)
    try:
        yield
    finally:
        for mesh in unmarked:
            vars(mesh).pop("_fsdp_draws_whole", None)


def is_engines(target: DTensor) -> bool:
    """Return whether a DTensor is a parameter or gradient of a group, or placed as one."""
    is_marked = "_fsdp_draws_whole" in target.device_mesh.__dict__
    return is_marked or any(isinstance(p, UnevenShard) for p in target.placements)


for _op in _FILLS:
    DTensor._op_dispatcher._custom_op_handlers.setdefault(_op, _fill)  # type: ignore[arg-type]
