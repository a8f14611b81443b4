"""The table of meshes and process groups that the engine is given and never changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.mesh.named_axes import axis_names, group_of_axis, mesh_of_axes


@dataclass(frozen=True)
class FSDPDistributedIndex:
    """The meshes and process groups over which a model is sharded.

    Args:
        device_mesh: mesh of the dense parameters, with axis names.
        dp_shard_dim: name of the axis over which weights are sharded. These names may also be those of axes that
            ``DeviceMesh._flatten`` made of several.
        dp_outer_dim: name of the axis over which the sharded model is replicated (hybrid sharding).
        tp_dim: name of the tensor-parallel axis.
        hybrid_fsdp_group: the process group of the dense parameters over outer and inner axis together.
        hybrid_fsdp_expt_group: the same for expert parameters.
        hsdp_outer_dp_shard: optimizer state is sharded over the outer axis too.
        expt_device_mesh: mesh of the expert parameters, with the same axis names; it may lack that of ``tp_dim``, where
            experts are not split over tensor-parallel ranks.
        fsdp_group_ag: a process group of the sharding axis's ranks for all-gathers alone, so that they run beside
            reductions (collectives of one NCCL communicator run one after the other).
        expt_fsdp_group_ag: the same for expert parameters.

    Raises:
        ValueError: an axis name that the mesh does not have, or a process group whose ranks do not fit the mesh.

    Ranks: made by every rank of the mesh; communicates nothing. The process groups belong to the caller.
    """

    device_mesh: DeviceMesh
    dp_shard_dim: str | None = None
    dp_outer_dim: str | None = None
    tp_dim: str | None = None
    hybrid_fsdp_group: ProcessGroup | None = None
    hybrid_fsdp_expt_group: ProcessGroup | None = None
    hsdp_outer_dp_shard: bool = False
    expt_device_mesh: DeviceMesh | None = None
    fsdp_group_ag: ProcessGroup | None = None
    expt_fsdp_group_ag: ProcessGroup | None = None

    def __post_init__(self) -> None:
        for mesh_name in ("device_mesh", "expt_device_mesh"):
            mesh: DeviceMesh | None = getattr(self, mesh_name)
            if mesh is None:
                continue
            for axis_name in ("dp_shard_dim", "dp_outer_dim", "tp_dim"):
                axis, may_lack = getattr(self, axis_name), axis_name == "tp_dim" and mesh is self.expt_device_mesh
                if axis is not None and not may_lack and axis not in axis_names(mesh):
                    raise ValueError(f"{axis_name} must name an axis of {mesh_name} {axis_names(mesh)}, got {axis!r}")
        self._check_outer()
        for is_expert, group in ((False, self.fsdp_group_ag), (True, self.expt_fsdp_group_ag)):
            if group is None:
                continue
            expected = dist.get_process_group_ranks(self.get_fsdp_group(is_expert))
            if dist.get_process_group_ranks(group) != expected:
                raise ValueError(
                    f"{'expt_fsdp_group_ag' if is_expert else 'fsdp_group_ag'} must hold the ranks {expected} of the "
                    f"sharding axis in that order, got {dist.get_process_group_ranks(group)}"
                )

    def _check_outer(self) -> None:
        if self.hsdp_outer_dp_shard and self.dp_outer_dim is None:
            raise ValueError("hsdp_outer_dp_shard=True needs dp_outer_dim, the axis to shard over, got None")
        for is_expert, group in ((False, self.hybrid_fsdp_group), (True, self.hybrid_fsdp_expt_group)):
            if group is None:
                continue
            name = "hybrid_fsdp_expt_group" if is_expert else "hybrid_fsdp_group"
            if self.dp_outer_dim is None or self.dp_shard_dim is None:
                raise ValueError(
                    f"{name} needs dp_outer_dim and dp_shard_dim, got {self.dp_outer_dim} and {self.dp_shard_dim}"
                )
            mesh = self.get_submesh((self.dp_outer_dim, self.dp_shard_dim), is_expert)
            expected = sorted(mesh.mesh.flatten().tolist())
            if sorted(dist.get_process_group_ranks(group)) != expected:
                raise ValueError(
                    f"{name} must hold the ranks {expected} of both axes, got {dist.get_process_group_ranks(group)}"
                )

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """Return the whole mesh of the dense or the expert parameters."""
        if not is_expert_parallel:
            return self.device_mesh
        if self.expt_device_mesh is None:
            raise ValueError("expert parameters need expt_device_mesh, got None; pass it to FSDPDistributedIndex")
        return self.expt_device_mesh

    def get_submesh(
        self, mesh_dim_names: str | tuple[str, ...] | list[str], is_expert_parallel: bool = False
    ) -> DeviceMesh:
        """Return the submesh of the named axes that holds this rank."""
        names = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        mesh = self.get_root_mesh(is_expert_parallel)
        missing = [name for name in names if name not in axis_names(mesh)]
        if missing:
            raise ValueError(f"submesh axes must be among {axis_names(mesh)}, got {missing}")
        return mesh_of_axes(mesh, names)

    def get_fsdp_group(self, is_expert_parallel: bool = False, independent_all_gather: bool = False) -> ProcessGroup:
        """Return the process group over which weights are sharded.

        With ``independent_all_gather`` it is the one for all-gathers alone, if one was given.
        """
        if independent_all_gather:
            group = self.expt_fsdp_group_ag if is_expert_parallel else self.fsdp_group_ag
            if group is not None:
                return group
        return self._axis_group("dp_shard_dim", is_expert_parallel)

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> ProcessGroup | None:
        """Return the process group over which the sharded model is replicated; None without hybrid sharding."""
        return None if self.dp_outer_dim is None else self._axis_group("dp_outer_dim", is_expert_parallel)

    def get_dp_group(self, is_expert_parallel: bool = False) -> ProcessGroup:
        """Return the process group of all data-parallel ranks: outer and inner together."""
        if self.dp_outer_dim is None:
            return self.get_fsdp_group(is_expert_parallel)
        group = self.hybrid_fsdp_expt_group if is_expert_parallel else self.hybrid_fsdp_group
        if group is None:
            name = "hybrid_fsdp_expt_group" if is_expert_parallel else "hybrid_fsdp_group"
            raise ValueError(f"hybrid sharding over {self.dp_outer_dim!r} needs {name}, got None")
        return group

    def _axis_group(self, axis_field: str, is_expert_parallel: bool) -> ProcessGroup:
        axis = getattr(self, axis_field)
        if axis is None:
            raise ValueError(f"{axis_field} must name an axis of the mesh, got None")
        return group_of_axis(self.get_root_mesh(is_expert_parallel), axis)
