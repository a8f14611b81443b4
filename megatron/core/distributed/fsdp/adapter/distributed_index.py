"""``FSDPDistributedIndex``: Megatron-FSDP's table of meshes and process groups, and submeshes by the names of axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch.distributed as dist
from einops import rearrange
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.config.torch_versions import flattened_axes
from megatron.core.distributed.fsdp.mesh.group_mesh import made_once, mesh_in_order, pattern_of


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
        fsdp_group_ag: a process group of the sharding axis's ranks only for all-gathers, so that they overlap
            reductions (collectives of one NCCL communicator run one after the other).
        expt_fsdp_group_ag: the same for expert parameters.

    Raises:
        ValueError: the mesh or the sharding axis is missing; two names refer to the same axis; the mesh lacks a named axis;
            hybrid sharding without ``hybrid_fsdp_group``; or the ranks of a process group do not match the mesh.

    Ranks: made by every rank of the mesh; communicates nothing. The process groups belong to the caller.
    Source: the attributes and return values of the class of this name in the package megatron-fsdp.
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
        if self.device_mesh is None:
            raise ValueError(
                "device_mesh must be the mesh of the dense parameters, got None; make it with init_device_mesh"
            )
        named = [name for name in (self.dp_outer_dim, self.dp_shard_dim, self.tp_dim) if name is not None]
        if len(set(named)) < len(named):
            raise ValueError(
                f"dp_outer_dim, dp_shard_dim and tp_dim must name different axes of device_mesh {axis_names(self.device_mesh)}, got {named}"
            )
        for mesh_name in ("device_mesh", "expt_device_mesh"):
            mesh: DeviceMesh | None = getattr(self, mesh_name)
            if mesh is None:
                continue
            for axis_name in ("dp_shard_dim", "dp_outer_dim", "tp_dim"):
                axis, may_lack = getattr(self, axis_name), axis_name == "tp_dim" and mesh is self.expt_device_mesh
                if axis is not None and not may_lack and axis not in axis_names(mesh):
                    raise ValueError(f"{axis_name} must name an axis of {mesh_name} {axis_names(mesh)}, got {axis!r}")
        if self.dp_shard_dim is None:
            raise ValueError(
                f"dp_shard_dim must name the axis of device_mesh {axis_names(self.device_mesh)} over which weights are sharded, got None"
            )
        if self.hsdp_outer_dp_shard and self.dp_outer_dim is None:
            raise ValueError("hsdp_outer_dp_shard=True needs dp_outer_dim, the axis to shard over, got None")
        if self.dp_outer_dim is not None and self.hybrid_fsdp_group is None:
            raise ValueError(
                f"hybrid sharding over {self.dp_outer_dim!r} needs hybrid_fsdp_group, the process group of both data-parallel axes, got "
                "None; flatten them in the mesh, or create the group with new_group"
            )
        self._check_groups(is_expert=False, of_both="hybrid_fsdp_group", of_gathers="fsdp_group_ag")
        self._check_groups(is_expert=True, of_both="hybrid_fsdp_expt_group", of_gathers="expt_fsdp_group_ag")

    def _check_groups(self, *, is_expert: bool, of_both: str, of_gathers: str) -> None:
        """Check that the process groups under these names have the ranks of the mesh's axes."""
        both, gathers = getattr(self, of_both), getattr(self, of_gathers)
        if both is not None:
            if self.dp_outer_dim is None or self.dp_shard_dim is None:
                raise ValueError(
                    f"{of_both} needs dp_outer_dim and dp_shard_dim, got {self.dp_outer_dim} and {self.dp_shard_dim}"
                )
            mesh = self.get_submesh((self.dp_outer_dim, self.dp_shard_dim), is_expert)
            expected, ranks = sorted(mesh.mesh.flatten().tolist()), dist.get_process_group_ranks(both)
            if sorted(ranks) != expected:
                raise ValueError(f"{of_both} must hold the ranks {expected} of both axes, got {ranks}")
        if gathers is not None:
            sharding = self.get_fsdp_group(is_expert)
            if sharding is None:
                raise ValueError(f"{of_gathers} needs expt_device_mesh, over which experts are sharded, got None")
            expected, ranks = dist.get_process_group_ranks(sharding), dist.get_process_group_ranks(gathers)
            if ranks != expected:
                raise ValueError(
                    f"{of_gathers} must hold the ranks {expected} of the sharding axis in that order, got {ranks}"
                )

    @property
    def use_hybrid_fsdp(self) -> bool:
        """Whether there is an outer axis, over which the model is replicated or the optimizer state sharded."""
        return self.dp_outer_dim is not None

    @property
    def fsdp_group(self) -> ProcessGroup:
        """The process group over which dense weights are sharded."""
        group = self._axis_group(self.dp_shard_dim, is_expert_parallel=False)
        assert group is not None, "the constructor checks that there is a sharding axis"
        return group

    @property
    def outer_fsdp_group(self) -> ProcessGroup | None:
        """The process group of the outer axis; None without hybrid sharding."""
        return self._axis_group(self.dp_outer_dim, is_expert_parallel=False)

    @property
    def expt_fsdp_group(self) -> ProcessGroup | None:
        """The process group over which experts are sharded; None without ``expt_device_mesh``."""
        return self._axis_group(self.dp_shard_dim, is_expert_parallel=True)

    @property
    def expt_outer_fsdp_group(self) -> ProcessGroup | None:
        """The process group of the experts' outer axis; None without hybrid sharding or ``expt_device_mesh``."""
        return self._axis_group(self.dp_outer_dim, is_expert_parallel=True)

    @property
    def mesh_library(self) -> dict[tuple[str | bool, ...], DeviceMesh]:
        """The submeshes that Megatron-FSDP registers, keyed by axis names and whether they are for experts."""
        outer, inner, tensor = self.dp_outer_dim, self.dp_shard_dim, self.tp_dim
        patterns = ((tensor,), (outer, inner, tensor), (inner, tensor), (outer, inner), (inner,))
        library: dict[tuple[str | bool, ...], DeviceMesh] = {}
        for is_expert in (False, True):
            mesh = self.get_root_mesh(is_expert)
            for pattern in patterns if mesh is not None else ():
                names = [name for name in pattern if name is not None]
                # Under hybrid sharding, the dense mesh has the axes that the expert mesh lacks.
                home = mesh if set(names) <= set(axis_names(mesh)) or outer not in names else self.device_mesh
                if len(names) == len(pattern) and set(names) <= set(axis_names(home)):
                    library[(*names, is_expert)] = mesh_of_axes(home, names)
        return library

    def get_root_mesh(self, is_expert_parallel: bool = False) -> DeviceMesh:
        """Return the whole mesh of the dense or the expert parameters; None for experts without ``expt_device_mesh``."""
        return self.expt_device_mesh if is_expert_parallel else self.device_mesh  # type: ignore[return-value]

    def get_submesh(
        self, mesh_dim_names: str | tuple[str, ...] | list[str], is_expert_parallel: bool = False
    ) -> DeviceMesh:
        """Return the submesh of the named axes, in any order, that holds this rank.

        Raises:
            ValueError: there is no mesh, or it lacks one of the axes.
        """
        names = tuple(mesh_dim_names) if isinstance(mesh_dim_names, tuple | list) else (mesh_dim_names,)
        registered, mesh = self.mesh_library.get((*names, is_expert_parallel)), self.get_root_mesh(is_expert_parallel)
        if registered is not None:
            return registered
        if mesh is None:
            raise ValueError(
                f"the submesh {names} of experts needs expt_device_mesh, got None; pass it to FSDPDistributedIndex"
            )
        missing = [name for name in names if name not in axis_names(mesh)]
        if missing:
            raise ValueError(f"submesh axes must be among {axis_names(mesh)}, got {missing}")
        return mesh_of_axes(mesh, names)

    def get_fsdp_group(
        self, is_expert_parallel: bool = False, independent_all_gather: bool = False
    ) -> ProcessGroup | None:
        """Return the process group over which weights are sharded; None for experts without ``expt_device_mesh``.

        With ``independent_all_gather``, return the separate group for all-gathers; None if none was given.
        """
        if independent_all_gather:
            return self.expt_fsdp_group_ag if is_expert_parallel else self.fsdp_group_ag
        return self.expt_fsdp_group if is_expert_parallel else self.fsdp_group

    def get_outer_fsdp_group(self, is_expert_parallel: bool = False) -> ProcessGroup | None:
        """Return the process group over which the sharded model is replicated; None without hybrid sharding."""
        return self.expt_outer_fsdp_group if is_expert_parallel else self.outer_fsdp_group

    def get_dp_group(self, is_expert_parallel: bool = False) -> ProcessGroup:
        """Return the process group of all data-parallel ranks, outer and inner together; None if experts have none."""
        if not self.use_hybrid_fsdp:
            return self.get_fsdp_group(is_expert_parallel)  # type: ignore[return-value]
        return self.hybrid_fsdp_expt_group if is_expert_parallel else self.hybrid_fsdp_group  # type: ignore[return-value]

    def get_logical_hybrid_fsdp_rank(self, is_expert_parallel: bool = False) -> int:
        """Return the index of this rank's shard of the optimizer state, which is split over the inner axis first.

        Raises:
            AssertionError: ``hsdp_outer_dp_shard`` is not set; as in Megatron-FSDP.
            ValueError: experts have no process group.
        """
        assert self.hsdp_outer_dp_shard, "get_logical_hybrid_fsdp_rank needs hsdp_outer_dp_shard=True, got False"
        whole, outer = self.get_dp_group(is_expert_parallel), self.get_outer_fsdp_group(is_expert_parallel)
        if whole is None or outer is None:
            raise ValueError("experts need expt_device_mesh and hybrid_fsdp_expt_group, got None")
        inner_size = whole.size() // outer.size()
        return whole.rank() % inner_size * outer.size() + whole.rank() // inner_size

    def _axis_group(self, axis: str | None, is_expert_parallel: bool) -> ProcessGroup | None:
        mesh = self.get_root_mesh(is_expert_parallel)
        return None if axis is None or mesh is None else group_of_axis(mesh, axis)


# ---- submeshes by the names of axes, several of which may have been flattened into one with its own name ----


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of a mesh's axes, and of what ``_flatten`` made of several of them."""
    return (*(mesh.mesh_dim_names or ()), *flattened_axes(mesh))


def group_of_axis(mesh: DeviceMesh, name: str) -> ProcessGroup:
    """Return the process group of an axis that ``axis_names`` has. Ranks: each on its own."""
    return mesh.get_group(name) if name in (mesh.mesh_dim_names or ()) else flattened_axes(mesh)[name].get_group()


def mesh_of_axes(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return the mesh over these axes, in this order, that holds this rank; over the same process groups, made once.

    Raises:
        ValueError: two of them are made of the same axis, or one does not go through its ranks in the mesh's order.

    Ranks: all of the mesh, with the same arguments; does not block.
    """
    own = mesh.mesh_dim_names or ()
    if all(name in own for name in names):
        return mesh_in_order(mesh, [own.index(name) for name in names])
    return made_once(mesh, tuple(names), partial(_made, mesh, tuple(names)))


def _made(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    groups = [group_of_axis(mesh, name) for name in names]
    own_ranks = [dist.get_process_group_ranks(group) for group in groups]
    places = dict(zip(mesh.mesh.flatten().tolist(), product(*map(range, mesh.shape)), strict=True))
    here = places[dist.get_rank()]
    # The axes of the mesh along which the ranks of each group lie.
    parts = [[axis for axis in range(mesh.ndim) if len({places[r][axis] for r in ranks}) > 1] for ranks in own_ranks]
    order = [axis for part in parts for axis in part]
    if len(set(order)) == len(order):
        index: list[Any] = [slice(None) if axis in order else at for axis, at in enumerate(here)]
        ranks = mesh.mesh[tuple(index)]
        merged = " ".join(f"({pattern_of(part)})" for part in parts)
        ranks = rearrange(ranks, f"{pattern_of(sorted(order))} -> {merged}").contiguous()
        at = [of_axis.index(dist.get_rank()) for of_axis in own_ranks]
        lines = [ranks.movedim(axis, -1)[tuple(at[:axis] + at[axis + 1 :])].tolist() for axis in range(len(at))]
        if lines == own_ranks:
            return DeviceMesh.from_group(groups, mesh.device_type, mesh=ranks, mesh_dim_names=names)
    raise ValueError(
        f"the axes {list(names)} must be made of different axes of {mesh}, each in the mesh's order, got the ranks {own_ranks}"
    )
