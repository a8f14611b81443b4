"""The comparison of a unit between the ranks that shard it, before anything is allocated or sent."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.api.module import FsdpModule
from megatron.core.distributed.fsdp.buffers.weight_codec import CAST, codec_of
from megatron.core.distributed.fsdp.comm.process_group import compare_on_ranks
from megatron.core.distributed.fsdp.config.placement import Placements
from megatron.core.distributed.fsdp.layout.granule import granule_of
from megatron.core.distributed.fsdp.mesh.group_mesh import GroupMesh, data_mesh_of, device_of, is_expert
from megatron.core.module_names import named_modules

_REMEDY = "build the same model on all ranks, and call fully_shard on its modules in one order, with the same arguments"


def check_same_unit(
    module: nn.Module,
    own_modules: Sequence[tuple[str, nn.Module]],
    mesh: DeviceMesh,
    placements: Placements,
    *,
    expert_mesh: DeviceMesh | None,
    arguments: Mapping[str, Any],
) -> None:
    """Compare names, shapes, dtypes, granules and order of a unit's parameters, and the arguments, between all ranks.

    Layers of equal shapes look alike when they are sharded, without their names. So the order in which those inside of this module were
    sharded is compared, too: ranks that called ``fully_shard`` on other ones would have mixed up their weights.

    Args:
        own_modules: (name, module) of the unit's tree without nested units.
        mesh: of the dense parameters.
        expert_mesh: of the experts' parameters; None: experts are not compared here.
        arguments: of ``fully_shard``, by name.

    Raises:
        ValueError: on all ranks, if something differs.

    Ranks: all of both meshes; blocks the host.
    """
    unit, device = type(module).__name__, device_of(mesh)
    remedy = f"this is fully_shard of a {unit}: {_REMEDY}"
    # Compared before anything is allocated: later, ranks with other parameters would wait in collectives of other sizes.
    parameters = dict(_parameters(own_modules))
    dense = {"class of the module given to fully_shard": unit, **_calls_inside(module)}
    dense |= {f"{name} of fully_shard": value for name, value in {"placements": placements, **arguments}.items()}
    dense |= _described({name: p for name, p in parameters.items() if not is_expert(p)})
    compare_on_ranks(dense, _groups(mesh, placements), device, remedy=remedy)
    # Experts differ between ranks of the dense mesh: each set of ranks that shares them compares its own.
    if expert_mesh is not None:
        experts = _described({name: p for name, p in parameters.items() if is_expert(p)})
        compare_on_ranks(experts, _groups(expert_mesh, placements), device, remedy=remedy)


def check_experts(shapes: Mapping[str, torch.Size], dense: GroupMesh) -> None:
    """Check that ranks that shard experts together hold the same experts.

    Args:
        shapes: of the unit's experts that are sharded over the dense mesh, by name.

    Raises:
        ValueError: they hold different ones; on all ranks.

    Ranks: all of the dense mesh; blocks if there are such experts.
    """
    if not shapes:
        return
    own = hashlib.sha256("\n".join(f"{name} {tuple(shape)}" for name, shape in shapes.items()).encode()).digest()
    differs = False
    # Over all axes before one raises: a rank whose own line is equal would wait on the next axis for ranks that have raised.
    for axis in dense.axes:
        found = axis.exchange(own)
        differs |= len(set(found)) > 1
        own = hashlib.sha256(b"".join(found)).digest()  # carries a difference to the lines of the next axis
    if differs:
        raise ValueError(
            f"{next(iter(shapes))} belongs to an expert (allreduce=False), so the ranks that shard it must hold the same "
            "experts, got ranks with others, whose weights would be lost; pass the mesh of the ranks that hold the same "
            "ones: fully_shard(..., model_parallel=ModelParallel(expert_mesh=...)), or expt_dp in the pg_collection"
        )


def _calls_inside(module: nn.Module) -> dict[str, str]:
    """Return which modules inside this one were sharded by each call of ``fully_shard``, in order."""
    # Numbers of calls may differ between ranks (a module that one rank sharded elsewhere), so their order is compared, not they.
    names: dict[int, list[tuple[int, str]]] = {}
    for name, inner in named_modules(module):
        if isinstance(inner, FsdpModule):
            origin = inner._fsdp_unit.origin
            names.setdefault(origin.call, []).append((origin.members.index(weakref.ref(inner)), name))
    return {
        f"what call {at + 1} of fully_shard inside of it was for": ", ".join(name for _, name in sorted(names[call]))
        for at, call in enumerate(sorted(names))
    }


def _parameters(own_modules: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in own_modules:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{key}" if prefix else key, parameter


def _described(parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    return {
        f"parameter {name}": (
            tuple(p.shape),
            p.dtype,
            "trained" if p.requires_grad else "frozen",
            str(granule_of(p, name) or "rows"),
            *(() if (codec := codec_of(p, name)) is CAST else (repr(codec),)),
        )
        for name, p in parameters.items()
    }


def _groups(mesh: DeviceMesh, placements: Placements) -> list[ProcessGroup]:
    data_mesh, _ = data_mesh_of(mesh, placements)
    return data_mesh.get_all_groups()
