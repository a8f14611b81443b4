"""The data-parallel ranks over which a unit's parameter groups are sharded, with a transport for each mesh axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from einops import rearrange
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from megatron.core.distributed.fsdp.comm.choose import Fastest, SharedTransports
from megatron.core.distributed.fsdp.comm.transport import MemoryKind, Transport
from megatron.core.distributed.fsdp.config.engine_options import EngineOptions
from megatron.core.distributed.fsdp.config.placement import Placements
from megatron.core.distributed.fsdp.config.torch_versions import concatenated_mesh, existing_group, spans_all_ranks
from megatron.core.distributed.fsdp.mesh.model_parallel import DATA_PART, ModelParallel, PlacedParameter


@dataclass(frozen=True)
class GroupMesh:
    """The data-parallel axes of a parameter group, outermost first, and a transport for each.

    Buffers are allocated by the innermost axis's transport, which moves whole buffers; outer axes move parts of them.

    Args:
        rows_mesh: the same axes, innermost first, for DTensors, in which an axis cuts what those before it leave.
            [Note: cuts go inside out].
        placements: where weights and gradients of trained parameters rest.
        num_averaged: ranks over which gradients are averaged, not summed.
        tensor_mesh: the tensor-parallel axis followed by those of ``rows_mesh``, for DTensors where there is one.
        model: the ranks over which the model is split in addition.
    """

    mesh: DeviceMesh
    axes: tuple[Transport, ...]
    rows_mesh: DeviceMesh
    placements: Placements
    num_averaged: int = 1
    tensor_mesh: DeviceMesh | None = None
    model: ModelParallel = field(default_factory=ModelParallel)

    @property
    def tensor_size(self) -> int | None:
        """Number of tensor-parallel ranks; None where there is no such axis."""
        return None if self.tensor_mesh is None else self.tensor_mesh.size(0)

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device, kind: MemoryKind) -> torch.Tensor:
        """Allocate [numel] elements for buffers of ``kind`` from the innermost axis's transport.

        Ranks: all of that axis, with the same arguments.
        """
        # From the transport, not torch.empty: other ranks may read this memory. See [Note: transports].
        return self.axes[-1].empty(numel, dtype, device, kind)

    def reserve(self, numel: int, dtype: torch.dtype, device: torch.device, kind: MemoryKind) -> None:
        """Prepare the innermost axis's transport for buffers [numel] of ``kind`` outside of its memory, before there is a plan.

        Ranks: all of that axis, with the same arguments.
        """
        self.axes[-1].reserve(numel, dtype, device, kind)

    def num_shards(self, placements: Placements) -> int:
        """Count the ranks that share a buffer: those of the axes over which any kind of tensor is sharded."""
        kinds = zip(placements.parameter, placements.gradient, placements.optimizer, strict=True)
        sharded = [any(isinstance(p, Shard) for p in of_axis) for of_axis in kinds]
        return math.prod(axis.size for axis, is_sharded in zip(self.axes, sharded, strict=True) if is_sharded)

    def mesh_of_shards(self, placements: Placements) -> DeviceMesh:
        """Return a mesh of one axis over the ranks that share main weights; over the innermost axis, where none share.

        Raises:
            NotImplementedError: they share along both axes, no process group has these ranks, and none can be made here: the mesh
                has no names, or other ranks, which would have to take part, have another mesh.

        Ranks: all of the mesh.
        """
        axes = [axis for axis, placement in enumerate(placements.optimizer) if isinstance(placement, Shard)]
        if len(axes) < 2:
            (axis,) = axes or [self.mesh.ndim - 1]
            return _mesh_of_axis(self.mesh, axis)
        return _mesh_of_all(self.mesh)


@dataclass(frozen=True)
class GroupMeshes:
    """The meshes over which a unit's parameters are sharded.

    Args:
        dense: mesh of all parameters but the experts'.
        expert: mesh of the experts' parameters.
        own: meshes of single parameters.
    """

    dense: GroupMesh
    expert: GroupMesh
    own: Mapping[DeviceMesh, GroupMesh]
    _placed: dict[tuple[DeviceMesh, int], GroupMesh] = field(default_factory=dict)

    def of(
        self, parameter: torch.Tensor, name: str, own: DeviceMesh | None = None, placed: PlacedParameter | None = None
    ) -> GroupMesh:
        """Return the mesh of a parameter, with its tensor-parallel axes where it was a DTensor over them.

        Args:
            name: of the parameter, for errors.
            own: the parameter's mesh where it is not the unit's.
            placed: how the parameter is split where it was a DTensor.

        Raises:
            ValueError: the tensor-parallel axes and the data-parallel ones are not parts of one mesh.
        """
        found = self.own[own] if own is not None else self.expert if is_expert(parameter) else self.dense
        if placed is None:
            return found
        # One mesh for all parameters placed in this way: groups are formed by the identity of their mesh.
        key = placed.mesh, id(found)
        if key not in self._placed:
            mesh = _mesh_with(placed.mesh, found.mesh, name)
            # Checkpoints join parameters that were DTensors with the model's others over this part.
            vars(mesh)[DATA_PART] = found.rows_mesh
            self._placed[key] = replace(found, tensor_mesh=mesh)
        return self._placed[key]


def make_group_meshes(
    mesh: DeviceMesh,
    placements: Placements,
    options: EngineOptions,
    fastest: Fastest | None,
    model: ModelParallel,
    own_placements: Mapping[DeviceMesh, Placements],
) -> GroupMeshes:
    """Make the data-parallel meshes of dense and expert parameters, with their transports and tensor-parallel axes.

    Args:
        mesh: mesh of the dense parameters; its tensor-parallel axis, if any, comes before the data-parallel ones.
        options: have the transport along the (inner) axis, and the process group for all-gathers of dense parameters.
        fastest: chooses the transport where "auto" is asked for.
        model: has the expert mesh and the name of the tensor-parallel axis.
        own_placements: on meshes of single parameters.

    Raises:
        ValueError, NotImplementedError: as ``group_mesh_of``, for each mesh; no mesh has the tensor-parallel axis.

    Ranks: all of the meshes, in the same order; may block.
    """
    make = partial(group_mesh_of, kind=options.transport, fastest=fastest, model=model)
    dense = make(mesh, placements, options.gather_group)
    # FSDP2 gives a parameter with a mesh of its own by ``shard_placement_fn`` the mean over that mesh.
    own = {other: make(other, kinds, None) for other, kinds in own_placements.items()}
    if model.expert_mesh is not None:
        expert = make(model.expert_mesh, placements, model.expert_group_ag)
        # Tokens of all ranks of the dense mesh contribute to an expert's gradient, however few ranks its own mesh has.
        return GroupMeshes(dense, replace(expert, num_averaged=dense.num_averaged), own)
    if model.tensor_axis is not None and dense.tensor_mesh is None:
        raise ValueError(
            f"tensor_axis must be an axis of the mesh {mesh.mesh_dim_names}, got {model.tensor_axis!r}; name the mesh's axes"
        )
    return GroupMeshes(dense, dense, own)


def group_mesh_of(
    mesh: DeviceMesh,
    placements: Placements,
    gather_group: ProcessGroup | None,
    kind: str,
    fastest: Fastest | None,
    model: ModelParallel,
) -> GroupMesh:
    """Build the data-parallel part of a mesh with a transport for each axis.

    The innermost axis, which moves whole weights and gradients every microbatch, gets the transport that was asked for.
    The outer axis, which moves parts of them once a step, gets the process group's.

    Args:
        gather_group: a process group of the innermost axis's ranks, for all-gathers only.
        kind: of the innermost axis's transport.
        fastest: chooses it where ``kind`` is "auto".

    Raises:
        ValueError: the mesh does not hold this rank, or lacks an axis; axes are not in the mesh's order, or the
            tensor-parallel one is not the first; ``gather_group`` has other ranks; the transport cannot serve the axis.
        NotImplementedError: three axes or more; weights or gradients that are sharded over the outer axis.

    Ranks: all of the mesh, in the same order; may block.
    """
    data_mesh, axes = data_mesh_of(mesh, placements)
    transports = SharedTransports.of(mesh)
    group = data_mesh.get_group(data_mesh.ndim - 1)
    if gather_group is not None:
        # The order counts too: a rank's segment lies at its place in the group, and another order would exchange rows.
        own, given = dist.get_process_group_ranks(group), dist.get_process_group_ranks(gather_group)
        if own != given:
            raise ValueError(f"fsdp_group_ag must hold the mesh's ranks {own} in that order, got {given}")
    device = device_of(mesh)
    # In the same order on all ranks: choosing a transport may communicate.
    outer_groups = [data_mesh.get_group(axis) for axis in range(data_mesh.ndim - 1)]
    outer = [transports.get("nccl", outer_group, outer_group, device) for outer_group in outer_groups]
    inner = transports.get(kind, group, gather_group or group, device, fastest)
    names, tensor_mesh = mesh.mesh_dim_names or (), None
    if model.tensor_axis in names:
        tensor = names.index(model.tensor_axis)
        if tensor >= axes[0]:
            raise ValueError(
                f"the tensor-parallel axis must come before the data-parallel ones {data_mesh.mesh_dim_names} in the mesh, "
                f"got {names}"
            )
        # Behind the tensor-parallel axis, which cuts first. See [Note: parts of a model].
        tensor_mesh = mesh_in_order(mesh, [tensor, *axes[::-1]])
    num_averaged = count_averaged((*outer, inner), placements)
    rows_mesh = mesh_in_order(mesh, axes[::-1])
    return GroupMesh(data_mesh, (*outer, inner), rows_mesh, placements, num_averaged, tensor_mesh, model)


def count_averaged(axes: Sequence[Transport], placements: Placements) -> int:
    """Count the ranks of these axes over which gradients are averaged, not summed."""
    sums = [isinstance(p, Partial) and p.reduce_op == "sum" for p in placements.gradient]
    return math.prod(axis.size for axis, is_sum in zip(axes, sums, strict=True) if not is_sum)


def is_expert(parameter: torch.Tensor) -> bool:
    """Return whether a parameter belongs to an expert: Megatron gives those ``allreduce=False``."""
    return not getattr(parameter, "allreduce", True)


def data_mesh_of(mesh: DeviceMesh, placements: Placements) -> tuple[DeviceMesh, list[int]]:
    """Return the data-parallel part of a mesh, and which axes of it these are, outermost first.

    Raises:
        ValueError, NotImplementedError: as ``group_mesh_of``.

    Ranks: each on its own; does not block.
    """
    # Checked first: on a rank outside of the mesh, asking for its groups and submeshes raises errors that do not name the cause.
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"the mesh must hold this rank, got rank {dist.get_rank()} and {mesh}; call fully_shard on its ranks only"
        )
    _check_outer(placements)
    axes = [_axis_index(mesh, axis) for axis in placements.dp_axes]
    return _sub_mesh(mesh, axes), axes


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank's buffers: the current one of the mesh's type."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _mesh_of_axis(mesh: DeviceMesh, axis: int) -> DeviceMesh:
    """Return the mesh of one axis that holds this rank, made once."""
    # Not a submesh by its name, which the mesh may lack.
    make = partial(DeviceMesh.from_group, mesh.get_group(axis), mesh.device_type)
    return mesh if mesh.ndim == 1 else made_once(mesh, axis, make)


def made_once(mesh: DeviceMesh, key: Hashable, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    """Return the mesh that ``make`` makes of a part of ``mesh``, the same one for each call with this key."""
    # Kept by the mesh that it is made of, so that both end together. See [Note: cuts go inside out].
    made: dict[Hashable, DeviceMesh] = vars(mesh).setdefault("_fsdp_meshes", {})
    if key not in made:
        made[key] = make()
    return made[key]


def _mesh_of_all(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of one axis over all ranks of a mesh: over a process group that has them, else over one of torch's."""
    ranks = mesh.mesh.flatten().tolist()
    group = existing_group(ranks, dist.get_backend(mesh.get_group(0)))
    if group is not None:
        return DeviceMesh.from_group(group, mesh.device_type)
    # ``_flatten`` makes a group by a collective of all ranks, which ranks outside of the mesh would not join.
    if mesh.mesh_dim_names is None or not spans_all_ranks(mesh):
        raise NotImplementedError(
            f"ranks that share main weights along both axes of a mesh need a process group, got none of ranks {ranks}; make it "
            "on all ranks before sharding: torch.distributed.new_group(ranks)"
        )
    flat: DeviceMesh = mesh._flatten()
    return flat


def _mesh_with(tensor_mesh: DeviceMesh, data_mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the mesh of the tensor-parallel axes, then of the data-parallel ones, innermost first.

    Args:
        name: of a parameter over ``tensor_mesh``, for errors.

    Raises:
        ValueError: the meshes are not parts of one mesh, or have more ranks than this one in common.
    """
    try:
        both = concatenated_mesh([tensor_mesh, data_mesh])
    except RuntimeError as error:
        raise ValueError(
            f"the mesh of parameter {name}, which is a DTensor, and that of fully_shard must be different axes of one mesh, got "
            f"{tensor_mesh} and {data_mesh}; take both from init_device_mesh(type, (data, tensor), mesh_dim_names=('dp', 'tp')): "
            "parallelize_module(model, mesh['tp'], plan), fully_shard(model, mesh=mesh['dp'])"
        ) from error
    # Remade also where the order is that of ``both``: for a reduction over two axes torch 2.13 looks in the mesh that these are
    # parts of for a flattened one, and raises KeyError where that mesh has them in another order.
    return _remade(both, [*range(tensor_mesh.ndim), *reversed(range(tensor_mesh.ndim, both.ndim))])


def mesh_in_order(mesh: DeviceMesh, axes: Sequence[int]) -> DeviceMesh:
    """Return the submesh of these axes, in this order, that holds this rank; over the same process groups, made once."""
    if list(axes) == sorted(axes):
        return _sub_mesh(mesh, axes)
    return made_once(mesh, tuple(axes), partial(_remade, mesh, axes))


def _remade(mesh: DeviceMesh, axes: Sequence[int]) -> DeviceMesh:
    """Return a new mesh of these axes, in this order, that holds this rank, and that torch takes for no part of another one."""
    upwards = sorted(axes)
    own = _sub_mesh(mesh, upwards)
    names = mesh.mesh_dim_names or tuple(f"axis_{axis}" for axis in range(mesh.ndim))
    # Torch reads the layout off the tensor's strides.
    ranks = rearrange(own.mesh, f"{pattern_of(upwards)} -> {pattern_of(axes)}").contiguous()
    groups = [mesh.get_group(axis) for axis in axes]
    in_order = tuple(names[axis] for axis in axes)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=in_order)


def pattern_of(axes: Sequence[int]) -> str:
    """Return an einops pattern that names the axes of a mesh."""
    return " ".join(f"axis{axis}" for axis in axes)


def _check_outer(placements: Placements) -> None:
    if len(placements.dp_axes) > 2:
        raise NotImplementedError(
            f"one data-parallel axis, or an outer and an inner one, are served, got {placements.dp_axes}"
        )
    if len(placements.dp_axes) == 1:
        return
    # Weights are gathered and gradients scattered once per microbatch, over the inner axis; the outer one sees shards of them.
    parameter, gradient = placements.parameter[0], placements.gradient[0]
    if not (isinstance(parameter, Replicate) and isinstance(gradient, Partial)):
        raise NotImplementedError(
            f"over the outer axis {placements.dp_axes[0]!r} weights must be Replicate() and gradients Partial(), got "
            f"{parameter} and {gradient}; shard them over the inner axis, or over one axis of all ranks"
        )


def _axis_index(mesh: DeviceMesh, axis: int | str) -> int:
    names = mesh.mesh_dim_names or ()
    if isinstance(axis, str):
        if axis not in names:
            raise ValueError(f"data-parallel axis {axis!r} must be among the mesh's {mesh.mesh_dim_names}")
        return names.index(axis)
    if not -mesh.ndim <= axis < mesh.ndim:
        raise ValueError(f"data-parallel axis {axis} must be an axis of the mesh, which has {mesh.ndim}")
    return axis % mesh.ndim


def _sub_mesh(mesh: DeviceMesh, axes: Sequence[int]) -> DeviceMesh:
    """Return the submesh of these axes that holds this rank."""
    if any(later <= earlier for earlier, later in pairwise(axes)):
        raise ValueError(
            f"data-parallel axes must be in the mesh's order, outermost first, got axes {list(axes)} of {mesh}"
        )
    if len(axes) == mesh.ndim:
        return mesh
    if mesh.mesh_dim_names is None:
        raise ValueError(
            f"a mesh of {mesh.ndim} axes must name them, got none; pass mesh_dim_names to init_device_mesh"
        )
    names = tuple(mesh.mesh_dim_names[axis] for axis in axes)
    return mesh[names]
