"""Submeshes by the names of axes, in any order, where several axes may have been flattened into one with a name of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from einops import rearrange
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.config.torch_versions import flattened_axes
from megatron.core.distributed.fsdp.mesh.group_mesh import mesh_in_order, pattern_of


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of a mesh's axes, and of what ``_flatten`` made of several of them."""
    return (*(mesh.mesh_dim_names or ()), *flattened_axes(mesh))


def group_of_axis(mesh: DeviceMesh, name: str) -> ProcessGroup:
    """Return the process group of an axis that ``axis_names`` has. Ranks: each alone."""
    return mesh.get_group(name) if name in (mesh.mesh_dim_names or ()) else flattened_axes(mesh)[name].get_group()


def mesh_of_axes(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return the mesh over these axes, in this order, that holds this rank; over the same process groups, made once.

    Raises:
        ValueError: two of them are made of the same axis, or one does not go through its ranks in the mesh's order.

    Ranks: all of the mesh, alike; does not block.
    """
    own = mesh.mesh_dim_names or ()
    if all(name in own for name in names):
        return mesh_in_order(mesh, [own.index(name) for name in names])
    made: dict[tuple[str, ...], DeviceMesh] = mesh.__dict__.setdefault("_fsdp_meshes_of_axes", {})
    key = tuple(names)
    if key not in made:
        made[key] = _made(mesh, key)
    return made[key]


def _made(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    groups = [group_of_axis(mesh, name) for name in names]
    own_ranks = [dist.get_process_group_ranks(group) for group in groups]
    parts = [_varying(mesh, ranks) for ranks in own_ranks]
    order = [axis for part in parts for axis in part]
    here = _place(mesh, dist.get_rank())
    if len(set(order)) == len(order):
        left = sorted(order)
        ranks = _at(mesh.mesh, {axis: here[axis] for axis in range(mesh.ndim) if axis not in order})
        merged = " ".join(f"({pattern_of(part)})" for part in parts)
        ranks = rearrange(ranks, f"{pattern_of(left)} -> {merged}").contiguous()
        own = dict(enumerate(of_axis.index(dist.get_rank()) for of_axis in own_ranks))
        lines = [_at(ranks, {k: v for k, v in own.items() if k != axis}).tolist() for axis in own]
        if lines == own_ranks:
            return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=names)
    raise ValueError(
        f"the axes {list(names)} must be made of different axes of {mesh}, each in the mesh's order, got the ranks {own_ranks}"
    )


def _varying(mesh: DeviceMesh, ranks: Sequence[int]) -> list[int]:
    """Return the axes of the mesh along which these ranks lie."""
    places = [_place(mesh, rank) for rank in ranks]
    return [axis for axis in range(mesh.ndim) if len({place[axis] for place in places}) > 1]


def _at(tensor: torch.Tensor, indices: Mapping[int, int]) -> torch.Tensor:
    """Return a tensor at these indices of some dims, which it has no more then."""
    for dim in sorted(indices, reverse=True):
        tensor = tensor.select(dim, indices[dim])
    return tensor


def _place(mesh: DeviceMesh, rank: int) -> list[int]:
    place: list[int] = torch.nonzero(mesh.mesh == rank)[0].tolist()
    return place
