"""The index answers where each group is, and refuses what does not fit its mesh."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from megatron.core.distributed.fsdp import FSDPDistributedIndex
from megatron.core.distributed.fsdp.adapter.model_groups import mesh_of_groups
from megatron.core.distributed.fsdp.mesh.group_mesh import GroupMesh
from tests.support.rank_checks import RankChecks

CHECKS = RankChecks(__name__)


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    assert group is not None
    return list(dist.get_process_group_ranks(group))


@CHECKS.on(2)
def one_axis() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    gathers = dist.new_group([0, 1])
    index = FSDPDistributedIndex(mesh, dp_shard_dim="dp", fsdp_group_ag=gathers)
    assert index.get_root_mesh() is mesh and index.get_submesh("dp") is mesh
    assert index.get_fsdp_group() is mesh.get_group("dp") is index.get_dp_group()
    assert index.get_fsdp_group(independent_all_gather=True) is gathers
    assert index.get_outer_fsdp_group() is None
    plain = FSDPDistributedIndex(mesh, dp_shard_dim="dp")
    assert plain.get_fsdp_group(independent_all_gather=True) is None, "so that callers can test for one"
    assert plain.fsdp_group is mesh.get_group("dp") and not plain.use_hybrid_fsdp and plain.outer_fsdp_group is None
    for of_experts in (plain.get_root_mesh(True), plain.get_fsdp_group(True), plain.get_dp_group(True)):
        assert of_experts is None
    assert plain.expt_fsdp_group is plain.expt_outer_fsdp_group is plain.get_outer_fsdp_group(True) is None
    assert plain.mesh_library == {("dp", False): mesh}
    with pytest.raises(AssertionError, match="needs hsdp_outer_dp_shard=True"):
        plain.get_logical_hybrid_fsdp_rank()
    with pytest.raises(dataclasses.FrozenInstanceError):
        index.dp_shard_dim = "other"  # type: ignore[misc]


@CHECKS.on(4)
def ranks_that_share_along_both_axes_have_a_group() -> None:
    """One that exists, also where other ranks, as those of another pipeline stage, have another mesh."""
    rank = dist.get_rank()
    both: Any = SimpleNamespace(optimizer=(Shard(0), Shard(0)))
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    alone = [dist.new_group([each]) for each in range(4)][rank]
    assert isinstance(alone, dist.ProcessGroup)
    mesh = mesh_of_groups(halves[rank // 2], [halves[rank // 2], alone], "cpu", ("outer", "inner"))
    flat = GroupMesh(mesh, (), mesh, both).mesh_of_shards(both)
    assert flat.mesh.tolist() == mesh.mesh.flatten().tolist() and flat.get_group() is halves[rank // 2]
    known = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    assert GroupMesh(known, (), known, both).mesh_of_shards(both).mesh.tolist() == [0, 1, 2, 3]
    line = torch.tensor([rank, (rank + 2) % 4]).sort().values.view(2, 1)
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    other = DeviceMesh.from_group([across, alone], "cpu", mesh=line, mesh_dim_names=("outer", "inner"))
    assert _ranks(GroupMesh(other, (), other, both).mesh_of_shards(both).get_group()) == line.flatten().tolist()
    turned = DeviceMesh("cpu", [[3, 2], [1, 0]])
    with pytest.raises(NotImplementedError, match=r"got none of ranks \[3, 2, 1, 0\]; make it on all ranks before"):
        GroupMesh(turned, (), turned, both).mesh_of_shards(both)


@CHECKS.on(4)
def two_axes_and_experts() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    experts = init_device_mesh("cpu", (4, 1), mesh_dim_names=("outer", "inner"))
    both = dist.new_group([0, 1, 2, 3])
    index = FSDPDistributedIndex(
        mesh, "inner", "outer", hybrid_fsdp_group=both, hsdp_outer_dp_shard=True, expt_device_mesh=experts
    )
    rank = dist.get_rank()
    assert _ranks(index.get_fsdp_group()) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert _ranks(index.get_outer_fsdp_group()) == [rank % 2, rank % 2 + 2]
    assert index.get_dp_group() is both
    assert _ranks(index.get_fsdp_group(is_expert_parallel=True)) == [rank]
    assert _ranks(index.get_outer_fsdp_group(is_expert_parallel=True)) == [0, 1, 2, 3]
    assert index.get_root_mesh(is_expert_parallel=True) is experts
    assert index.get_submesh(("outer", "inner")) is mesh
    assert index.get_submesh("inner").size() == 2 and index.get_submesh(["outer"]).mesh_dim_names == ("outer",)
    assert index.use_hybrid_fsdp and index.get_dp_group(is_expert_parallel=True) is None
    assert index.expt_outer_fsdp_group is experts.get_group("outer") and index.outer_fsdp_group is mesh.get_group(
        "outer"
    )
    assert index.expt_fsdp_group is experts.get_group("inner")
    both_axes = {
        (*names, of): whole for of, whole in ((False, mesh), (True, experts)) for names in [("outer", "inner")]
    }
    assert {key: value for key, value in index.mesh_library.items() if len(key) == 3} == both_axes
    # State is split over the inner axis first: ranks 0 and 2 share the inner axis's first half.
    assert index.get_logical_hybrid_fsdp_rank() == [0, 2, 1, 3][rank]
    with pytest.raises(ValueError, match="experts need expt_device_mesh and hybrid_fsdp_expt_group"):
        index.get_logical_hybrid_fsdp_rank(is_expert_parallel=True)
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    with pytest.raises(ValueError, match=r"hybrid_fsdp_group must hold the ranks \[0, 1, 2, 3\] of both axes, got"):
        FSDPDistributedIndex(mesh, "inner", "outer", hybrid_fsdp_group=halves[rank // 2])
    with pytest.raises(ValueError, match="hybrid_fsdp_group needs dp_outer_dim and dp_shard_dim, got None and inner"):
        FSDPDistributedIndex(mesh, "inner", hybrid_fsdp_group=both)
    with pytest.raises(ValueError, match="hsdp_outer_dp_shard=True needs dp_outer_dim"):
        FSDPDistributedIndex(mesh, "inner", hsdp_outer_dp_shard=True)


@CHECKS.on(2)
def what_is_not_there_is_named() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for field in ("dp_shard_dim", "dp_outer_dim", "tp_dim"):
        with pytest.raises(ValueError, match=rf"{field} must name an axis of device_mesh \('dp',\), got 'other'"):
            FSDPDistributedIndex(mesh, **{field: "other"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dp_shard_dim must name the axis of device_mesh \('dp',\)"):
        FSDPDistributedIndex(mesh)
    with pytest.raises(ValueError, match=r"device_mesh must be the mesh .* got None"):
        FSDPDistributedIndex(None, "dp")  # type: ignore[arg-type]
    for twice in ("tp_dim", "dp_outer_dim"):
        with pytest.raises(ValueError, match=r"must name different axes of device_mesh.*got \['dp', 'dp'\]"):
            FSDPDistributedIndex(mesh, "dp", **{twice: "dp"})  # type: ignore[arg-type]
    hybrid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "dp"))
    with pytest.raises(ValueError, match="hybrid sharding over 'outer' needs hybrid_fsdp_group"):
        FSDPDistributedIndex(hybrid, "dp", "outer")
    with pytest.raises(ValueError, match="expt_fsdp_group_ag needs expt_device_mesh"):
        FSDPDistributedIndex(mesh, "dp", expt_fsdp_group_ag=mesh.get_group("dp"))
    index = FSDPDistributedIndex(mesh, "dp")
    with pytest.raises(ValueError, match=r"the submesh \('dp',\) of experts needs expt_device_mesh"):
        index.get_submesh("dp", is_expert_parallel=True)
    with pytest.raises(ValueError, match=r"submesh axes must be among \('dp',\), got \['tp'\]"):
        index.get_submesh(("dp", "tp"))
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.raises(ValueError, match=r"fsdp_group_ag must hold the ranks \[0, 1\] of the sharding axis.*got"):
        FSDPDistributedIndex(mesh, "dp", fsdp_group_ag=alone)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
