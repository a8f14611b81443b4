"""The door for any module: ``fully_shard`` on the layers, then on the root; ``microbatch`` around accumulation."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from fractions import Fraction
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron.core.distributed.fsdp.collectives import SharedTransports, TransportKind
from megatron.core.distributed.fsdp.context import FsdpContext
from megatron.core.distributed.fsdp.layout import group_by_rows
from megatron.core.distributed.fsdp.load import watch_loads
from megatron.core.distributed.fsdp.materialize import materialize, move_buffers
from megatron.core.distributed.fsdp.mixed_precision import SERVED_DTYPES, MixedPrecisionPolicy
from megatron.core.distributed.fsdp.module import FsdpModule, find_context, topmost_fsdp_modules
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, GroupMesh, ManagedParameter
from megatron.core.distributed.fsdp.placement import Placements, strategy_placements
from megatron.core.distributed.fsdp.unit import FsdpUnit

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_shared_context: ContextVar[FsdpContext | None] = ContextVar("fully_shard_context", default=None)


def fully_shard(
    module: ModuleT,
    mesh: DeviceMesh | None = None,
    placements: Placements | None = None,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    grad_divisor: float | Fraction = 1,
    *,
    use_symm_mem: bool = False,
    fsdp_group_ag: ProcessGroup | None = None,
    transport: TransportKind | None = None,
) -> ModuleT:
    """Afterwards the module is a unit: its parameters are sharded, and gathered around its forward and backward.

    Call it on the layers, then on the root. A unit manages the parameters of its tree that no unit inside it does.
    Parameters become DTensors (main weights, in whole rows that may be unevenly split); names, ``state_dict`` keys and
    attributes of parameters stay. Build the optimizer afterwards.

    Args:
        module: changed in place. Parameters on the meta device are made on the mesh's device by the
            ``reset_parameters`` of the modules that own them.
        mesh: devices over which to shard; one axis over all ranks when None.
        placements: where weights, gradients and optimizer state rest; all sharded over ``mesh``'s one axis (ZeRO-3)
            when None.
        mixed_precision_policy: dtypes of main weights, main gradients and gradient communication.
        grad_divisor: what gradients are divided by after the mean over the data-parallel ranks.
        use_symm_mem: gather and reduce through NCCL symmetric memory: the same as ``transport="symm"``.
        fsdp_group_ag: a group of the same ranks for all-gathers alone, so that they run beside reductions.
        transport: what moves the bytes: "nccl" (the mesh's process group, of any backend, and the default), "symm"
            (NCCL symmetric memory), "peer_copy" (copies between the ranks' memory), or "auto", which measures those
            that can serve the mesh, once, and prints what it chose.

    Returns:
        ``module``.

    Raises:
        ValueError: the mesh does not hold this rank or lacks an axis; a parameter is owned by a unit over other ranks,
            or by one around this module; the module is a unit already; ``grad_divisor`` is not positive; the transport
            cannot serve the mesh, or ``use_symm_mem`` contradicts it.
        TypeError: a parameter of a dtype that cannot be trained; a module without forward or whose class cannot be
            extended.
        NotImplementedError: more than one data-parallel axis; parameters that are DTensors already.
        RuntimeError: torch.distributed is not initialised.

    Ranks: all of the mesh, in the same order; weights become those of the mesh's first rank. Blocks for that broadcast.
    Source: ZeRO (arXiv:1910.02054); PyTorch FSDP (arXiv:2304.11277) for units and their order.
    """
    if isinstance(module, FsdpModule):
        raise ValueError(
            f"fully_shard must be called once on a module, got a {type(module).__name__}, which is a unit already"
        )
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise TypeError(
            f"fully_shard needs a module with a forward, around which it gathers weights, got a {type(module).__name__}; "
            "call it on each of the modules in it"
        )
    unit_class = _unit_class(type(module))  # type: ignore[arg-type]
    if not grad_divisor > 0:
        raise ValueError(f"grad_divisor must be positive, got {grad_divisor}")
    kind = _transport_kind(transport, use_symm_mem)
    mesh = mesh if mesh is not None else _default_mesh()
    placements = placements if placements is not None else strategy_placements("optim_grads_params")
    policy = mixed_precision_policy or MixedPrecisionPolicy()
    group_mesh, device = _group_mesh(mesh, placements, fsdp_group_ag, kind)
    made = materialize(module, _own_modules(module), device)
    managed, borrowed = _collect(module, group_mesh, {fresh: meta for meta, fresh in made.items()})
    groups = [
        FsdpParameterGroup(
            parameters,
            group_mesh=group_mesh,
            placements=kinds,
            dtypes=policy.resolve(parameters[0].original.dtype, trainable=parameters[0].original.requires_grad),
            grad_divisor=grad_divisor,
            device=device,
        )
        for parameters, kinds in _group(managed, placements, group_mesh)
    ]
    move_buffers(_own_modules(module), device)
    unit = FsdpUnit(
        type(module).__name__,
        groups,
        borrowed,
        has_nested=any(isinstance(child, FsdpModule) for child in module.modules()),
    )
    module.__class__ = unit_class  # type: ignore[assignment]
    module._fsdp_unit = unit  # type: ignore[assignment]
    watch_loads(unit, _own_modules(module))
    context = _shared_context.get()
    if context is not None:
        context.register(unit)
    return module


@contextmanager
def fully_shard_context(device: torch.device | str | None = None) -> Iterator[FsdpContext]:
    """In the scope, each ``fully_shard`` puts its unit into one context, which sibling roots thus share.

    Args:
        device: where the units live; the current CUDA device, or the CPU without one, when None.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    context = FsdpContext(torch.device(device), is_shared=True)
    token = _shared_context.set(context)
    try:
        yield context
    finally:
        _shared_context.reset(token)


@contextmanager
def microbatch(module: nn.Module | FsdpContext, is_first: bool = True, is_last: bool = True) -> Iterator[None]:
    """The forward and backward of one microbatch of a step.

    Args:
        module: the model, wrapped or holding wrapped modules, or a context of ``fully_shard_context``.
        is_first: main weights may have changed: model weights are synchronised with them, once per group.
        is_last: gradients are reduced as far as the optimizer needs.

    Without the scope every forward is a first and every backward a last one: right, but slower. Scopes nest; what they
    change is restored, also after an exception. Ranks: all, alike.
    """
    with ExitStack() as scopes:
        for context in contexts_of(module):
            scopes.enter_context(context.microbatch(is_first=is_first, is_last=is_last))
        yield


def contexts_of(module: nn.Module | FsdpContext) -> list[FsdpContext]:
    """The contexts of the topmost units in a module, each once.

    Raises:
        ValueError: there are no units in it.
    """
    if isinstance(module, FsdpContext):
        return [module]
    contexts = list(dict.fromkeys(find_context(unit) for unit in topmost_fsdp_modules(module)))
    if not contexts:
        raise ValueError(
            f"{type(module).__name__} must hold sharded modules, got none; call fully_shard on its layers first"
        )
    return contexts


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where this rank's buffers live: the current device of the mesh's type."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed must be initialised before fully_shard; call torch.distributed.init_process_group() "
            "in a program started with torchrun"
        )
    device_type = "cuda" if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()) else "cpu"
    return _mesh_of_all_ranks(device_type, dist.get_world_size(), dist.get_rank())


@functools.lru_cache(maxsize=1)  # not by process group, which this would keep
def _mesh_of_all_ranks(device_type: str, world_size: int, rank: int) -> DeviceMesh:
    """One mesh for all calls that name none, so that their units share its transports."""
    return init_device_mesh(device_type, (world_size,))


def _transport_kind(transport: TransportKind | None, use_symm_mem: bool) -> str:
    if use_symm_mem and transport not in (None, "auto", "symm"):
        raise ValueError(
            f"use_symm_mem=True means transport='symm', got transport={transport!r} besides; leave one of them out"
        )
    return "symm" if use_symm_mem else transport or "nccl"


def _group_mesh(
    mesh: DeviceMesh, placements: Placements, gather_group: ProcessGroup | None, kind: str
) -> tuple[GroupMesh, torch.device]:
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"the mesh must hold this rank, got rank {dist.get_rank()} and {mesh}; call fully_shard on its ranks only"
        )
    if len(placements.dp_axes) != 1:
        raise NotImplementedError(
            f"one data-parallel axis is served, got {len(placements.dp_axes)}: {placements.dp_axes}"
        )
    (axis,) = placements.dp_axes
    transports = SharedTransports.of(mesh)
    if isinstance(axis, int) and not -mesh.ndim <= axis < mesh.ndim:
        raise ValueError(f"data-parallel axis {axis} must be an axis of the mesh, which has {mesh.ndim}")
    if isinstance(axis, str) and axis not in (mesh.mesh_dim_names or ()):
        raise ValueError(f"data-parallel axis {axis!r} must be among the mesh's {mesh.mesh_dim_names}")
    if mesh.ndim > 1:
        if mesh.mesh_dim_names is None:
            raise ValueError(
                f"a mesh of {mesh.ndim} axes must name them, got none; pass mesh_dim_names to init_device_mesh"
            )
        mesh = mesh[axis if isinstance(axis, str) else mesh.mesh_dim_names[axis]]
    group = mesh.get_group()
    if gather_group is not None:
        own, given = dist.get_process_group_ranks(group), dist.get_process_group_ranks(gather_group)
        if own != given:
            raise ValueError(f"fsdp_group_ag must hold the mesh's ranks {own} in that order, got {given}")
    device = device_of(mesh)
    return GroupMesh(mesh, (transports.get(kind, group, gather_group or group, device),)), device


def _own_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of the tree without nested units, root first, each module once."""
    found: dict[nn.Module, str] = {root: ""}
    _add_children(root, "", found)
    return [(name, module) for module, name in found.items()]


def _add_children(module: nn.Module, prefix: str, found: dict[nn.Module, str]) -> None:
    # Not a closure that calls itself: that is a cycle, and would keep the module until the collector comes.
    for name, child in module.named_children():
        if child not in found and not isinstance(child, FsdpModule):
            found[child] = prefix + name
            _add_children(child, f"{prefix}{name}.", found)


def _collect(
    root: nn.Module, group_mesh: GroupMesh, made_from: Mapping[nn.Parameter, nn.Parameter]
) -> tuple[list[ManagedParameter], list[FsdpParameterGroup]]:
    """The parameters to manage, in order, and the groups of other units that hold weights tied to this one's."""
    managed: dict[nn.Parameter, ManagedParameter] = {}
    borrowed: dict[FsdpParameterGroup, None] = {}
    for prefix, module in _own_modules(root):
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            owner = _owner_of(parameter)
            if owner is not None:
                if owner.group_mesh.mesh != group_mesh.mesh:
                    raise ValueError(
                        f"parameter {name} is owned by a unit over {owner.group_mesh.mesh} and must not be owned again over "
                        f"{group_mesh.mesh}; shard tied weights over the same mesh"
                    )
                if owner.holders.has(module._parameters, key):
                    raise ValueError(
                        f"parameter {name} must belong to one unit, got one that a unit around this "
                        f"{type(root).__name__} owns; call fully_shard on inner modules first, then on the root"
                    )
                owner.add_holder(parameter, module._parameters, key)
                borrowed[owner] = None
                continue
            if isinstance(parameter, DTensor):
                raise NotImplementedError(
                    f"parameter {name} must be a plain tensor, got a DTensor of {parameter.placements}"
                )
            if parameter.requires_grad and parameter.dtype not in SERVED_DTYPES:
                raise TypeError(
                    f"parameter {name} must have one of the dtypes {list(SERVED_DTYPES)} to be trained, got {parameter.dtype}"
                )
            own = ManagedParameter(name, parameter, made_from.get(parameter))
            managed.setdefault(parameter, own).holders.append((module._parameters, key))
    return list(managed.values()), list(borrowed)


def _owner_of(parameter: nn.Parameter) -> FsdpParameterGroup | None:
    reference = getattr(parameter, "_fsdp_group", None)
    return None if reference is None else reference()


def _group(
    managed: Sequence[ManagedParameter], placements: Placements, group_mesh: GroupMesh
) -> list[tuple[list[ManagedParameter], Placements]]:
    """Parameters that can share a buffer: of one dtype, all trainable or all frozen, with rows or without."""
    kinds: dict[tuple[Any, ...], list[ManagedParameter]] = {}
    for parameter in managed:
        original = parameter.original
        kinds.setdefault((original.dtype, original.requires_grad, original.dim() == 0), []).append(parameter)
    groups = []
    for (_, trainable, is_scalar), members in kinds.items():
        own = placements.replicated() if is_scalar else placements
        own = own if trainable else own.frozen()
        num_ranks = group_mesh.size if _shards(own.optimizer) else 1
        for indices in group_by_rows([p.original.shape for p in members], num_ranks=num_ranks):
            groups.append(([members[i] for i in indices], own))
    return groups


def _shards(placements: Sequence[Any]) -> bool:
    return any(isinstance(placement, Shard) for placement in placements)


@functools.cache
def _unit_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A class that is ``cls`` and an ``FsdpModule``."""
    if issubclass(cls, torch.jit.ScriptModule):
        raise TypeError(f"fully_shard needs a module whose class can be extended, got the ScriptModule {cls.__name__}")
    return type(
        f"Fsdp{cls.__name__}",
        (FsdpModule, cls),
        {"__module__": cls.__module__, "__qualname__": f"Fsdp{cls.__qualname__}"},
    )
