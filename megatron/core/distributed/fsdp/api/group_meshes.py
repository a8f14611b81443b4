"""Over which mesh each parameter of a unit is sharded: dense ones over one, experts' over another."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial

from megatron.core.distributed.fsdp.buffers.param_slots import ManagedParameter
from megatron.core.distributed.fsdp.config.placement import Placements
from megatron.core.distributed.fsdp.mesh.group_mesh import GroupMesh, group_mesh_of, mesh_in_order
from megatron.core.distributed.fsdp.mesh.model_parallel import ModelParallel


@dataclass(frozen=True)
class GroupMeshes:
    """The meshes of a unit's groups.

    Args:
        dense: of parameters that are no experts'.
        expert: of experts' parameters; None: theirs is ``dense`` too.
        device: where this rank's buffers live.
    """

    dense: GroupMesh
    expert: GroupMesh | None
    device: torch.device

    def of(self, parameter: torch.Tensor) -> GroupMesh:
        """The mesh of a parameter."""
        return self.expert if self.expert is not None and is_expert(parameter) else self.dense

    def grad_divisor(self, mesh: GroupMesh, placements: Placements, divisor: float | Fraction) -> Fraction:
        """What gradients over ``mesh`` are divided by besides the mean over it, where dense ones are by ``divisor``.

        An expert's gradient has the losses of all ranks of the dense mesh in it, and is divided by their number.
        """
        averaged = (_num_averaged(placements, self.dense), _num_averaged(placements, mesh))
        return Fraction(divisor) * Fraction(*averaged)


def make_group_meshes(
    mesh: DeviceMesh, placements: Placements, gather_group: ProcessGroup | None, kind: str, model: ModelParallel
) -> GroupMeshes:
    """The data-parallel parts of the dense and the expert mesh, with transports, and their tensor-parallel axes.

    Raises:
        ValueError, NotImplementedError: as ``group_mesh_of``, of either mesh; the tensor-parallel axis is not before the
            data-parallel ones; the expert mesh does not lie within the ranks of the other.

    Ranks: all of both meshes, in the same order; may block.
    """
    dense, device = group_mesh_of(mesh, placements, gather_group, kind)
    dense = _with_tensor_axis(dense, mesh, model)
    if model.expert_mesh is None:
        if model.tensor_axis is not None and dense.tensor_mesh is None:
            raise ValueError(
                f"tensor_axis must be an axis of the mesh {mesh.mesh_dim_names}, got {model.tensor_axis!r}; name the mesh's axes"
            )
        return GroupMeshes(dense, None, device)
    expert, _ = group_mesh_of(model.expert_mesh, placements, model.expert_group_ag, kind)
    return GroupMeshes(dense, _with_tensor_axis(expert, model.expert_mesh, model), device)


def is_expert(parameter: torch.Tensor) -> bool:
    """True for parameters of experts, in Megatron's words: those that are not all-reduced over all ranks."""
    return not getattr(parameter, "allreduce", True)


def check_experts(parameters: Sequence[ManagedParameter], meshes: GroupMeshes) -> None:
    """Afterwards ranks that shard experts together hold the same experts.

    Raises:
        ValueError: they hold others, by name; on all ranks.

    Ranks: all of the dense mesh; blocks where the unit has experts that are sharded over it.
    """
    experts = [p for p in parameters if is_expert(p.original) and meshes.of(p.original) is meshes.dense]
    if not experts:
        return
    names = "\n".join(f"{p.name} {tuple(p.original.shape)}" for p in experts)
    own = hashlib.sha256(names.encode()).digest()
    for axis in meshes.dense.axes:
        if any(other != own for other in axis.exchange(own)):
            raise ValueError(
                f"{experts[0].name} belongs to an expert (allreduce=False), and ranks that would shard it together hold other "
                "experts, whose weights would be lost; pass the mesh of the ranks that hold the same ones: "
                "fully_shard(..., model_parallel=ModelParallel(expert_mesh=...)), or expt_dp in the pg_collection"
            )


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
    # What cuts rows comes inside out.
    axes = [names.index(name) for name in (model.tensor_axis, *(group_mesh.rows_mesh.mesh_dim_names or ()))]
    tensor_mesh = mesh_in_order(mesh, axes)
    return replace(group_mesh, tensor_mesh=tensor_mesh, model=model)


def _num_averaged(placements: Placements, mesh: GroupMesh) -> int:
    """Ranks over which gradients are averaged, not summed."""
    size = 1
    for placement, axis in zip(placements.gradient, mesh.axes, strict=True):
        if not (isinstance(placement, Partial) and placement.reduce_op == "sum"):
            size *= axis.size
    return size
