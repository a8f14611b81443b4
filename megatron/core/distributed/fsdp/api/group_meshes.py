"""The meshes of a unit: one for dense parameters, another for those of experts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.buffers.param_slots import ManagedParameter
from megatron.core.distributed.fsdp.config.placement import Placements
from megatron.core.distributed.fsdp.config.torch_versions import concatenated_mesh
from megatron.core.distributed.fsdp.mesh.group_mesh import GroupMesh, group_mesh_of, mesh_in_order
from megatron.core.distributed.fsdp.mesh.model_parallel import DATA_PART, ModelParallel


@dataclass(frozen=True)
class GroupMeshes:
    """The meshes over which a unit's parameters are sharded.

    Args:
        dense: mesh of all parameters but the experts'.
        expert: mesh of the experts' parameters; None: ``dense``.
        placements: on these meshes, where weights and gradients rest.
        own: meshes of single parameters, with the placements on them.
    """

    dense: GroupMesh
    expert: GroupMesh | None
    placements: Placements
    own: Mapping[DeviceMesh, tuple[GroupMesh, Placements]]
    _placed: dict[tuple[DeviceMesh, int], GroupMesh] = field(default_factory=dict)

    def of(self, parameter: torch.Tensor) -> GroupMesh:
        """Return the mesh of a parameter."""
        return self.expert if self.expert is not None and is_expert(parameter) else self.dense

    def of_managed(self, parameter: ManagedParameter) -> GroupMesh:
        """Return the mesh of a parameter, with tensor-parallel axes of its own where it was a DTensor over them.

        Raises:
            ValueError: these axes and the data-parallel ones are not parts of one mesh.
        """
        placed = parameter.placed
        own = self.of(parameter.original) if parameter.mesh is None else self.own[parameter.mesh][0]
        if placed is None:
            return own
        key = placed.mesh, id(own)
        if key not in self._placed:
            mesh = _mesh_with(placed.mesh, own.mesh, parameter.name)
            vars(mesh)[DATA_PART] = own.rows_mesh
            self._placed[key] = replace(own, tensor_mesh=mesh)
        return self._placed[key]

    def placements_of(self, parameter: ManagedParameter) -> Placements:
        """Return where the parameter's weights and gradients rest, if it is trained."""
        return self.placements if parameter.mesh is None else self.own[parameter.mesh][1]

    def grad_divisor(self, parameter: ManagedParameter, divisor: float | Fraction) -> Fraction:
        """Return what divides sums of a parameter's gradients over its mesh: the ranks that average, times ``divisor``.

        Tokens of all ranks of the dense mesh contribute to an expert's gradient, so it is divided by the number of
        those ranks, however many the expert mesh has. One with a mesh of its own by ``shard_placement_fn`` has the mean over that
        mesh alone, as in FSDP2.
        """
        mesh = self.dense if parameter.mesh is None else self.own[parameter.mesh][0]
        return Fraction(divisor) * mesh.num_averaged(self.placements_of(parameter))


def make_group_meshes(
    mesh: DeviceMesh,
    placements: Placements,
    gather_group: ProcessGroup | None,
    kind: str,
    model: ModelParallel,
    own_placements: Mapping[DeviceMesh, Placements],
) -> GroupMeshes:
    """Make the data-parallel meshes of dense and expert parameters, with their transports and tensor-parallel axes.

    Args:
        mesh: mesh of the dense parameters; its tensor-parallel axis, if any, comes before the data-parallel ones.
        gather_group: process group for the all-gathers of dense parameters; None: the mesh's.
        kind: transport along the (inner) axis.
        model: has the expert mesh and the name of the tensor-parallel axis.
        own_placements: on meshes of single parameters.

    Raises:
        ValueError, NotImplementedError: as ``group_mesh_of``, for either mesh; the mesh has no axis of the
            tensor-parallel axis's name, or has it after a data-parallel one.

    Ranks: all of both meshes, in the same order; may block.
    """
    dense = _with_tensor_axis(group_mesh_of(mesh, placements, gather_group, kind), mesh, model)
    own = {
        other: (replace(group_mesh_of(other, kinds, None, kind), model=model), kinds)
        for other, kinds in own_placements.items()
    }
    if model.expert_mesh is None:
        if model.tensor_axis is not None and dense.tensor_mesh is None:
            raise ValueError(
                f"tensor_axis must be an axis of the mesh {mesh.mesh_dim_names}, got {model.tensor_axis!r}; name the mesh's axes"
            )
        return GroupMeshes(dense, None, placements, own)
    expert = group_mesh_of(model.expert_mesh, placements, model.expert_group_ag, kind)
    return GroupMeshes(dense, _with_tensor_axis(expert, model.expert_mesh, model), placements, own)


def is_expert(parameter: torch.Tensor) -> bool:
    """Return whether a parameter belongs to an expert: Megatron gives those ``allreduce=False``."""
    return not getattr(parameter, "allreduce", True)


def check_experts(parameters: Sequence[ManagedParameter], meshes: GroupMeshes) -> None:
    """Check that ranks that shard experts together hold the same experts.

    Raises:
        ValueError: they hold different ones; on all ranks.

    Ranks: all of the dense mesh; blocks if the unit has experts that are sharded over it.
    """
    experts = [p for p in parameters if is_expert(p.original) and meshes.of(p.original) is meshes.dense]
    if not experts:
        return
    names = "\n".join(f"{p.name} {tuple(p.original.shape)}" for p in experts)
    own = hashlib.sha256(names.encode()).digest()
    for axis in meshes.dense.axes:
        if any(other != own for other in axis.exchange(own)):
            raise ValueError(
                f"{experts[0].name} belongs to an expert (allreduce=False), so the ranks that shard it must hold the same "
                "experts, got ranks with others, whose weights would be lost; pass the mesh of the ranks that hold the same "
                "ones: fully_shard(..., model_parallel=ModelParallel(expert_mesh=...)), or expt_dp in the pg_collection"
            )


def _mesh_with(tensor_mesh: DeviceMesh, data_mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the mesh of the tensor-parallel axes, then of the data-parallel ones, innermost first.

    Args:
        name: of a parameter over ``tensor_mesh``, for errors.

    Raises:
        ValueError: the meshes are not parts of one mesh, or have a rank in common besides this one.
    """
    try:
        both = concatenated_mesh([tensor_mesh, data_mesh])
    except RuntimeError as error:
        raise ValueError(
            f"the mesh of parameter {name}, which is a DTensor, and that of fully_shard must be different axes of one mesh, got "
            f"{tensor_mesh} and {data_mesh}; take both from init_device_mesh(type, (data, tensor), mesh_dim_names=('dp', 'tp')): "
            "parallelize_module(model, mesh['tp'], plan), fully_shard(model, mesh=mesh['dp'])"
        ) from error
    ahead = list(range(tensor_mesh.ndim))
    return mesh_in_order(both, [*ahead, *reversed(range(tensor_mesh.ndim, both.ndim))])


def _with_tensor_axis(group_mesh: GroupMesh, mesh: DeviceMesh, model: ModelParallel) -> GroupMesh:
    names = mesh.mesh_dim_names or ()
    if model.tensor_axis not in names:
        return replace(group_mesh, model=model)
    data = group_mesh.mesh.mesh_dim_names or ()
    wanted = (model.tensor_axis, *data)
    if [name for name in names if name in wanted] != list(wanted):
        raise ValueError(
            f"the tensor-parallel axis must come before the data-parallel ones {data} in the mesh, got {names}"
        )
    # Axes that cut rows, innermost first.
    axes = [names.index(name) for name in (model.tensor_axis, *(group_mesh.rows_mesh.mesh_dim_names or ()))]
    tensor_mesh = mesh_in_order(mesh, axes)
    return replace(group_mesh, tensor_mesh=tensor_mesh, model=model)
