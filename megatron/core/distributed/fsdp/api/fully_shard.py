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
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.api.group_meshes import GroupMeshes, check_experts, make_group_meshes
from megatron.core.distributed.fsdp.api.module import FsdpModule, find_context, topmost_fsdp_modules
from megatron.core.distributed.fsdp.api.state_dict_hooks import watch_loads
from megatron.core.distributed.fsdp.buffers.materialize import materialize, move_buffers
from megatron.core.distributed.fsdp.buffers.param_slots import ManagedParameter
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.comm import TransportKind
from megatron.core.distributed.fsdp.config.mixed_precision import SERVED_DTYPES, MixedPrecisionPolicy
from megatron.core.distributed.fsdp.config.placement import Placements, strategy_placements
from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout
from megatron.core.distributed.fsdp.layout.granule import granule_of
from megatron.core.distributed.fsdp.layout.row_groups import group_by_rows
from megatron.core.distributed.fsdp.mesh.group_mesh import GroupMesh
from megatron.core.distributed.fsdp.mesh.model_parallel import ModelParallel, is_shared_between_stages
from megatron.core.distributed.fsdp.runtime.context import FsdpContext
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit

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
    model_parallel: ModelParallel | None = None,
    forward_prefetch_depth: int | None = None,
    backward_prefetch_depth: int | None = None,
) -> ModuleT:
    """Afterwards the module is a unit: its parameters are sharded, and gathered around its forward and backward.

    Call it on the layers, then on the root. A unit manages the parameters of its tree that no unit inside it does.
    Parameters become DTensors (main weights, split unevenly between rows or, where that would cost more than 2 % of padding,
    between equal parts of rows: ``RowShard``); names, ``state_dict`` keys and attributes of parameters stay. A parameter
    whose attribute ``fsdp_granule`` is a ``Granule`` (blocks of rows, the whole tensor) is cut nowhere else. Build the
    optimizer afterwards.

    Args:
        module: changed in place. Parameters on the meta device are made on the mesh's device by the
            ``reset_parameters`` of the modules that own them.
        mesh: devices over which to shard; one axis over all ranks when None.
        placements: where weights, gradients and optimizer state rest; all sharded over ``mesh``'s one axis (ZeRO-3)
            when None. Two axes, an outer and an inner one, are hybrid sharding: ``hybrid_placements``.
        mixed_precision_policy: dtypes of main weights, main gradients and gradient communication.
        grad_divisor: what gradients are divided by after the mean over the data-parallel ranks.
        use_symm_mem: gather and reduce through NCCL symmetric memory: the same as ``transport="symm"``.
        fsdp_group_ag: a group of the (inner) axis's ranks for all-gathers alone, so that they run beside reductions.
        transport: what moves the bytes along the (inner) axis: "nccl" (the mesh's process group, of any backend, and the default), "symm"
            (NCCL symmetric memory), "peer_copy" (copies between the ranks' memory), or "auto", which measures those
            that can serve the mesh, once, and prints what it chose.
        model_parallel: between which ranks the model is split besides: where experts (parameters with
            ``allreduce=False``) are sharded, and of which larger tensors parameters are parts.
        forward_prefetch_depth: how many further units' weights are gathered ahead when this unit's forward begins, in the
            order in which units run; 0 gathers each when it is needed. None: as many as for the root module, and there 1.
            Each costs the memory of one more unsharded unit.
        backward_prefetch_depth: the same, when this unit's backward begins.

    Returns:
        ``module``.

    Raises:
        ValueError: the mesh does not hold this rank or lacks an axis; a parameter is owned by a unit over other ranks,
            or by one around this module; the module is a unit already; ``grad_divisor`` is not positive; a prefetch depth is
            negative; the transport cannot serve the mesh, or ``use_symm_mem`` contradicts it; ranks that shard experts together hold other ones.
        TypeError: a parameter of a dtype that cannot be trained; a module without forward or whose class cannot be
            extended.
        NotImplementedError: more than two data-parallel axes, or weights or gradients sharded over an outer one;
            parameters that are DTensors already.
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
    prefetch_depth = (forward_prefetch_depth, backward_prefetch_depth)
    for name, depth in zip(("forward_prefetch_depth", "backward_prefetch_depth"), prefetch_depth, strict=True):
        if depth is not None and depth < 0:
            raise ValueError(f"{name} must be 0 or more units, got {depth}")
    kind = _transport_kind(transport, use_symm_mem)
    mesh = mesh if mesh is not None else _default_mesh()
    placements = placements if placements is not None else strategy_placements("optim_grads_params")
    policy = mixed_precision_policy or MixedPrecisionPolicy()
    meshes = make_group_meshes(mesh, placements, fsdp_group_ag, kind, model_parallel or ModelParallel())
    device = meshes.device
    made = materialize(module, _own_modules(module), device)
    managed, borrowed = _collect(module, meshes, {fresh: meta for meta, fresh in made.items()})
    check_experts(managed, meshes)
    groups = [
        FsdpParameterGroup(
            parameters,
            layout=layout,
            group_mesh=group_mesh,
            placements=kinds,
            dtypes=policy.resolve(parameters[0].original.dtype, trainable=parameters[0].original.requires_grad),
            grad_divisor=meshes.grad_divisor(group_mesh, placements, grad_divisor),
            device=device,
        )
        for parameters, layout, kinds, group_mesh in _group(managed, placements, meshes)
    ]
    move_buffers(_own_modules(module), device)
    unit = FsdpUnit(
        type(module).__name__,
        groups,
        borrowed,
        has_nested=any(isinstance(child, FsdpModule) for child in module.modules()),
        own_prefetch_depth=prefetch_depth,
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
    root: nn.Module, meshes: GroupMeshes, made_from: Mapping[nn.Parameter, nn.Parameter]
) -> tuple[list[ManagedParameter], list[FsdpParameterGroup]]:
    """The parameters to manage, in order, and the groups of other units that hold weights tied to this one's."""
    managed: dict[nn.Parameter, ManagedParameter] = {}
    borrowed: dict[FsdpParameterGroup, None] = {}
    for prefix, module in _own_modules(root):
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            owner = group_of(parameter)
            if owner is not None:
                mesh = meshes.of(parameter).mesh
                if owner.group_mesh.mesh != mesh:
                    raise ValueError(
                        f"parameter {name} is owned by a unit over {owner.group_mesh.mesh} and must not be owned again over "
                        f"{mesh}; shard tied weights over the same mesh"
                    )
                if owner.param_slots.has(module._parameters, key):
                    raise ValueError(
                        f"parameter {name} must belong to one unit, got one that a unit around this "
                        f"{type(root).__name__} owns; call fully_shard on inner modules first, then on the root"
                    )
                owner.add_slot(parameter, module._parameters, key)
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
            managed.setdefault(parameter, own).param_slots.append((module._parameters, key))
    return list(managed.values()), list(borrowed)


def _group(
    managed: Sequence[ManagedParameter], placements: Placements, meshes: GroupMeshes
) -> list[tuple[list[ManagedParameter], FlatLayout, Placements, GroupMesh]]:
    """Parameters that share a buffer, and where they lie in it: of one mesh and dtype, all trainable or all frozen, with rows or without.

    What another pipeline stage holds too is by itself: so both stages cut it alike, whatever else they have.
    """
    kinds: dict[tuple[Any, ...], list[ManagedParameter]] = {}
    for parameter in managed:
        original = parameter.original
        alone = parameter if is_shared_between_stages(original, meshes.dense.model) else None
        mesh = meshes.of(original)
        key = (original.dtype, original.requires_grad, original.dim() == 0, mesh is meshes.dense, alone)
        kinds.setdefault(key, []).append(parameter)
    groups = []
    for (_, trainable, is_scalar, *_), members in kinds.items():
        own = placements.replicated() if is_scalar else placements
        own = own if trainable else own.frozen()
        mesh = meshes.of(members[0].original)
        shapes = [p.original.shape for p in members]
        granules = [granule_of(p.original, p.name) for p in members]
        for found in group_by_rows(shapes, num_ranks=mesh.num_shards(own), granules=granules):
            groups.append(([members[i] for i in found.members], found.layout, own, mesh))
    return groups


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
