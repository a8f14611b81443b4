"""The comparison of a unit between the ranks that shard it, before anything is allocated or sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.distributed.fsdp.api.group_meshes import GroupMeshes, is_expert
from megatron.core.distributed.fsdp.comm.alike import check_alike
from megatron.core.distributed.fsdp.layout.granule import granule_of
from megatron.core.distributed.fsdp.mesh.group_mesh import GroupMesh

_REMEDY = "build the same model on all ranks, and call fully_shard on its modules in one order, with the same arguments"


def check_same_unit(
    module: nn.Module, own_modules: Sequence[tuple[str, nn.Module]], meshes: GroupMeshes, arguments: Mapping[str, Any]
) -> None:
    """Compare names, shapes, dtypes, granules and order of a unit's parameters, and the arguments, between all ranks.

    Args:
        own_modules: (name, module) of the unit's tree without nested units.
        arguments: of ``fully_shard``, by name.

    Raises:
        ValueError: on all ranks, if something differs.

    Ranks: all of the unit's meshes; blocks the host.
    """
    unit = type(module).__name__
    device = torch.device(meshes.dense.mesh.device_type)
    parameters = dict(_parameters(own_modules))
    dense = {"class of the module given to fully_shard": unit}
    dense |= {f"{name} of fully_shard({unit})": value for name, value in arguments.items()}
    dense |= _described(unit, {name: p for name, p in parameters.items() if not is_expert(p)})
    check_alike(dense, _groups(meshes.dense), device, remedy=_REMEDY)
    if meshes.expert is not None:
        experts = {name: p for name, p in parameters.items() if is_expert(p)}
        check_alike(_described(unit, experts), _groups(meshes.expert), device, remedy=_REMEDY)


def _parameters(own_modules: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in own_modules:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{key}" if prefix else key, parameter


def _described(unit: str, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    return {
        f"parameter {name} of {unit}": (
            tuple(p.shape),
            p.dtype,
            "trained" if p.requires_grad else "frozen",
            str(granule_of(p, name) or "rows"),
        )
        for name, p in parameters.items()
    }


def _groups(group_mesh: GroupMesh) -> list[ProcessGroup]:
    return [group_mesh.mesh.get_group(axis) for axis in range(group_mesh.mesh.ndim)]
