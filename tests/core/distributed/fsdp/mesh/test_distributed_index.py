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
from megatron.core.distributed.fsdp.mesh.group_mesh import GroupMesh, mesh_of_groups
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
    assert plain.get_fsdp_group(independent_all_gather=True) is plain.get_fsdp_group()
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
    flat = GroupMesh(mesh, (), mesh).mesh_of_shards(both)
    assert flat.mesh.tolist() == mesh.mesh.flatten().tolist() and flat.get_group() is halves[rank // 2]
    known = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    assert GroupMesh(known, (), known).mesh_of_shards(both).mesh.tolist() == [0, 1, 2, 3]
    line = torch.tensor([rank, (rank + 2) % 4]).sort().values.view(2, 1)
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    other = DeviceMesh.from_group([across, alone], "cpu", mesh=line, mesh_dim_names=("outer", "inner"))
    assert _ranks(GroupMesh(other, (), other).mesh_of_shards(both).get_group()) == line.flatten().tolist()
    turned = DeviceMesh("cpu", [[3, 2], [1, 0]])
    with pytest.raises(NotImplementedError, match=r"got none of ranks \[3, 2, 1, 0\]; make it on all ranks before"):
        GroupMesh(turned, (), turned).mesh_of_shards(both)


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
    with pytest.raises(ValueError, match="needs hybrid_fsdp_expt_group, got None"):
        index.get_dp_group(is_expert_parallel=True)
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
    index = FSDPDistributedIndex(mesh)
    with pytest.raises(ValueError, match="dp_shard_dim must name an axis of the mesh, got None"):
        index.get_fsdp_group()
    with pytest.raises(ValueError, match="expert parameters need expt_device_mesh"):
        index.get_root_mesh(is_expert_parallel=True)
    with pytest.raises(ValueError, match=r"submesh axes must be among \('dp',\), got \['tp'\]"):
        index.get_submesh(("dp", "tp"))
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.raises(ValueError, match=r"fsdp_group_ag must hold the ranks \[0, 1\] of the sharding axis.*got"):
        FSDPDistributedIndex(mesh, "dp", fsdp_group_ag=alone)


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
