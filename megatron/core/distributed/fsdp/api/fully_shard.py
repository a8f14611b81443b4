"""``fully_shard`` for the layers of a model, then for its root, and ``microbatch`` for gradient accumulation."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from fractions import Fraction
from itertools import count
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from megatron.core.distributed.fsdp.api.casts import cast_inputs_and_outputs
from megatron.core.distributed.fsdp.api.conversions import leave_fast_path, stay_in_place, watch_conversions
from megatron.core.distributed.fsdp.api.forward_methods import register_known_methods
from megatron.core.distributed.fsdp.api.fsdp2_arguments import (
    check_modules,
    check_offload,
    follow_placement_fn,
    placements_of,
    placements_of_own_meshes,
    policy_of,
    takes_least_memory,
)
from megatron.core.distributed.fsdp.api.fsdp2_errors import Fsdp2ValueError
from megatron.core.distributed.fsdp.api.fsdp2_methods import tell_composable_functions
from megatron.core.distributed.fsdp.api.group_meshes import GroupMeshes, check_experts, make_group_meshes
from megatron.core.distributed.fsdp.api.module import FsdpModule, find_context, names_of_class, topmost_fsdp_modules
from megatron.core.distributed.fsdp.api.state_dict_hooks import watch_loads
from megatron.core.distributed.fsdp.buffers.aliases import refuse_aliases, remember, stretches_of
from megatron.core.distributed.fsdp.buffers.materialize import materialize, move_buffers
from megatron.core.distributed.fsdp.buffers.module_tree import ModuleTree, is_ignored
from megatron.core.distributed.fsdp.buffers.param_slots import ManagedParameter
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup, TrainingSettings, group_of
from megatron.core.distributed.fsdp.buffers.sharded_grad import refuse_earlier_hooks
from megatron.core.distributed.fsdp.codec.hooked_tensor import hook_codec
from megatron.core.distributed.fsdp.codec.quantized_parameters import plain_of
from megatron.core.distributed.fsdp.codec.weight_codec import codec_of
from megatron.core.distributed.fsdp.comm.registry import TransportKind
from megatron.core.distributed.fsdp.comm.streams import make_streams
from megatron.core.distributed.fsdp.config.mixed_precision import SERVED_DTYPES, MixedPrecisionPolicy
from megatron.core.distributed.fsdp.config.placement import Placements
from megatron.core.distributed.fsdp.config.surface import Surface
from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout
from megatron.core.distributed.fsdp.layout.granule import Granule, granule_of
from megatron.core.distributed.fsdp.layout.row_groups import group_by_rows
from megatron.core.distributed.fsdp.mesh.group_mesh import GroupMesh, device_of
from megatron.core.distributed.fsdp.mesh.model_parallel import ModelParallel, is_shared_between_stages
from megatron.core.distributed.fsdp.mesh.placed_parameter import taken_apart
from megatron.core.distributed.fsdp.runtime.context import FsdpContext
from megatron.core.distributed.fsdp.runtime.observer import Observer
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit, check_prefetch_depth

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")
ModuleT = TypeVar("ModuleT", bound=nn.Module | Sequence[nn.Module])

_CALLS = count()
_shared_context: ContextVar[FsdpContext | None] = ContextVar("fully_shard_context", default=None)


def _outside_inference_mode(call: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Let what the call makes serve training too, also if inference mode is on."""

    @functools.wraps(call)
    def outside(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        if not torch.is_inference_mode_enabled():
            return call(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return call(*args, **kwargs)

    return outside


@_outside_inference_mode
def fully_shard(
    module: ModuleT,
    mesh: DeviceMesh | None = None,
    placements: Placements | str | None = None,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    grad_divisor: float | Fraction = 1,
    *,
    use_symm_mem: bool = False,
    fsdp_group_ag: ProcessGroup | None = None,
    transport: TransportKind | None = None,
    model_parallel: ModelParallel | None = None,
    forward_prefetch_depth: int | None = None,
    backward_prefetch_depth: int | None = None,
    init_fn: Callable[[nn.Module], object] | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    shard_placement_fn: Callable[..., Any] | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    least_memory: bool | None = None,
    surface: Surface | None = None,
) -> ModuleT:
    """Shard the parameters of a module, and unshard them around its forward and backward.

    Call it on the layers, then on the root, and build the optimizer afterwards. The module becomes a unit, whose
    parameters are gathered and reduced together: those of its tree that belong to no unit inside it. Parameters become
    DTensors, the main weights. They are split unevenly between rows or, where that would cost more than 2 % of padding,
    between equal parts of rows (``RowShard``); a parameter whose attribute ``fsdp_granule`` is a ``Granule`` (rows,
    blocks of rows, the whole tensor) is cut only between granules. Names, ``state_dict`` keys and attributes of
    parameters do not change.

    Args:
        module: changed in place; or a list of modules, which become one unit. Parameters on the meta device are allocated on the mesh's device and initialised by
            ``init_fn``, or by the ``reset_parameters`` of the modules that own them. Those of modules without one must be filled
            before the first forward.
        mesh: devices over which to shard; None: one axis over all ranks.
        placements: where weights, gradients and optimizer state rest, or a strategy's name (``optim``); None: all are sharded over the mesh's one axis
            (ZeRO-3), or over the inner one of two (HSDP, as in FSDP2). See ``hybrid_placements`` for other ones.
        mixed_precision_policy: dtypes of main weights, main gradients and gradient communication; None: fp32 main
            weights and gradients, communicated in the parameter's dtype.
        grad_divisor: divides gradients, besides the mean over the data-parallel ranks.
        use_symm_mem: the same as ``transport="symm"``.
        fsdp_group_ag: a process group of the (inner) axis's ranks for all-gathers only, which then overlap reductions.
        transport: how bytes move along the (inner) axis: "nccl" (the mesh's process group, of any backend), "symm"
            (NCCL symmetric memory), "peer_copy" (copies between the ranks' memory), or "auto", which measures once
            those that can serve the mesh and prints its choice. None: "nccl".
        model_parallel: how else the model is split: over which ranks experts (parameters with ``allreduce=False``) are
            sharded, and which parameters are parts of larger tensors.
        forward_prefetch_depth: how many further units are prefetched when this unit's forward begins, in the order in
            which units run; 0 prefetches none. Each one takes the memory of one more unsharded unit. None: the root's
            depth, which is 1 by default.
        backward_prefetch_depth: the same, when this unit's backward begins.
        init_fn: fills modules that were built on the meta device, for models whose initial values are not those of
            ``reset_parameters``. Called with each module of the unit, children first. What it leaves out must be filled
            before the first forward, by ``load_state_dict`` or by ``torch.nn.init`` on the sharded parameters, which
            gives them the values of the whole tensor. ``lambda module: None`` leaves all to be loaded.
        reshard_after_forward: as in FSDP2, instead of placements. False keeps weights whole between steps (ZeRO-2). A number
            of ranks means True, which is said once.
        mp_policy: FSDP2's policy, or the engine's, under FSDP2's name. With FSDP2's, main weights are in the parameter's
            dtype.
        offload_policy: FSDP2's. ``CPUOffloadPolicy`` is served on ranks of the CPU, whose shards are in the host's memory.
        shard_placement_fn: FSDP2's. Ranks own rows whatever dim it names, which is said once. A mesh that it names for a parameter
            (``ShardPlacementResult``) is served.
        least_memory: take no more memory than FSDP2: where main weights have another dtype than modules compute in, they are cast for
            each all-gather, and none rest in the compute dtype; gradients get memory for their reduction when a unit's backward ends,
            which they leave before the next unit's, instead of ranges that are there all the time. Costs a few percent of speed.
            Transport "nccl" alone. None: where ``mp_policy`` is FSDP2's, and the transport is "nccl".
        ignored_params: parameters of the unit to leave as they are: not sharded, nor moved, nor their gradients reduced.
        surface: the classes to build with; None: the core's own, whose ranks compare nothing.

    Returns:
        ``module``, whose class is now a subclass of its own class and of ``FsdpModule``.

    Raises:
        ValueError: a container has no forward; a lazy module has no parameters yet; modules on the meta device have other initial values than those of ``reset_parameters``, and there is no
            ``init_fn``; the mesh does not hold this rank or lacks an axis; a parameter has hooks already; a parameter belongs to a unit over other ranks,
            or to one around this module; the module is a unit already; ``grad_divisor`` is not positive; a prefetch
            depth is negative; ``least_memory`` with another transport than "nccl"; the transport cannot serve the mesh, or contradicts ``use_symm_mem``; ranks that would
            shard together hold different parameters or experts, or give different arguments.
        TypeError: a parameter's dtype cannot be trained; the module's class cannot be extended.
        NotImplementedError: parameters share memory; shards are to rest in the host's memory; an embedding has ``max_norm``, or ``sparse`` gradients; more than two data-parallel axes; weights or gradients sharded over an outer axis; a
            parameter that is a DTensor, placed otherwise than by ``Shard`` and ``Replicate``.
        RuntimeError: torch.distributed is not initialised.

    Ranks: all of the mesh, in the same order. Blocks for a broadcast: weights become those of the mesh's first rank.
    Source: ZeRO (arXiv:1910.02054); PyTorch FSDP (arXiv:2304.11277) for units and their order.
    """
    surface = surface or Surface()
    members: list[nn.Module] = [module] if isinstance(module, nn.Module) else list(module)
    unit_classes = [_checked_class(member) for member in members]
    # What several modules own is found as if one held them; nobody keeps it.
    root = members[0] if isinstance(module, nn.Module) else _holder(members)
    if not grad_divisor > 0:
        raise ValueError(f"grad_divisor must be positive, got {grad_divisor}")
    prefetch_depth = (forward_prefetch_depth, backward_prefetch_depth)
    for name, depth in zip(("forward_prefetch_depth", "backward_prefetch_depth"), prefetch_depth, strict=True):
        if depth is not None:
            check_prefetch_depth(name, depth)
    shared = _shared_context.get()
    in_scope = shared is not None and shared.use_symmetric_memory and transport is None
    kind = _transport_kind(transport, use_symm_mem or in_scope)
    policy = policy_of(mixed_precision_policy, mp_policy)
    least_memory = takes_least_memory(least_memory, (mixed_precision_policy, mp_policy), kind)
    mesh = _checked_mesh(mesh)
    check_offload(offload_policy, device_of(mesh))
    model_parallel = model_parallel or ModelParallel()
    strategy = placements
    placements = placements_of(mesh, model_parallel.tensor_axis, strategy, reshard_after_forward)
    arguments = {
        "mixed_precision_policy": policy,
        "grad_divisor": Fraction(grad_divisor),
        "transport": kind,
        "least_memory": least_memory,
        "whether there is a process group for all-gathers alone (fsdp_group_ag)": fsdp_group_ag is not None,
        "forward_prefetch_depth": forward_prefetch_depth,
        "backward_prefetch_depth": backward_prefetch_depth,
        "whether there is an init_fn": init_fn is not None,
        "the fully_shard_context around the call": _described_scope(),
    }
    own_modules, expert_mesh = _own_modules(root), model_parallel.expert_mesh
    ignored = _ignore(own_modules, ignored_params or ())
    arguments["ignored_params"] = ignored
    asked = follow_placement_fn(shard_placement_fn, _parameters_of(own_modules), mesh)
    own_placements = placements_of_own_meshes(asked.values(), strategy, reshard_after_forward)
    check_modules(own_modules)
    nested = [child for child in root.modules() if isinstance(child, FsdpModule)]
    stretches = stretches_of(own_modules)
    refuse_aliases(stretches, {child._fsdp_unit for child in nested})
    (surface.observer_class or Observer).compare_unit(
        root, own_modules, mesh, placements, expert_mesh=expert_mesh, arguments=arguments
    )
    meshes = make_group_meshes(mesh, placements, fsdp_group_ag, kind, model_parallel, own_placements)
    device = device_of(mesh)
    filled = materialize(
        root,
        own_modules,
        device,
        init_fn=init_fn,
        holds_reset=any(child._fsdp_unit.by_reset for child in nested),
    )
    managed, borrowed = _collect(root, meshes, {fresh: meta for meta, fresh in filled.made.items()}, asked)
    waiting = {id(held[key]) for _, held, key in filled.unfilled}
    for parameter in managed:
        parameter.has_values = id(parameter.original) not in waiting
    check_experts(managed, meshes)
    _ask_hooks(managed, meshes, policy)
    groups = [
        FsdpParameterGroup(
            parameters,
            layout=layout,
            group_mesh=group_mesh,
            placements=kinds,
            dtypes=policy.resolve(parameters[0].original.dtype, trainable=parameters[0].original.requires_grad),
            training=TrainingSettings(
                policy.resolve(parameters[0].original.dtype, trainable=True),
                meshes.grad_divisor(parameters[0], grad_divisor),
                policy,
            ),
            device=device,
            least_memory=least_memory,
        )
        for parameters, layout, kinds, group_mesh in _group(managed, meshes)
    ]
    move_buffers(own_modules, device)
    prefixes = ["" if member is root else f"{index}." for index, member in enumerate(members)]
    tops = [(prefix, member._modules, member._parameters) for prefix, member in zip(prefixes, members, strict=True)]
    tree = ModuleTree(tops, _is_unit)
    unit = FsdpUnit(
        " and ".join(type(member).__name__ for member in members),
        groups,
        weakref.ref(tree),
        borrowed,
        has_nested=bool(nested),
        by_reset=filled.by_reset,
        unfilled=filled.unfilled,
        own_prefetch_depth=prefetch_depth,
        call=next(_CALLS),
        members=tuple(map(weakref.ref, members)),
        surface=surface,
    )
    remember(stretches, unit)
    for place, (member, unit_class) in enumerate(zip(members, unit_classes, strict=True)):
        member.__class__ = unit_class
        member._fsdp_unit, member._fsdp_tree = unit, tree  # type: ignore[assignment]
        member._fsdp_context = _shared_context.get()  # type: ignore[assignment]
        member._fsdp_place = place  # type: ignore[assignment]
        member._counts_groups = member is members[0]  # type: ignore[assignment]
        member._fsdp_policy = policy  # type: ignore[assignment]
        cast_inputs_and_outputs(member, policy)
    register_known_methods(members)
    tell_composable_functions(members)
    watch_loads(unit, own_modules)
    watch_conversions(unit, own_modules)
    stay_in_place(own_modules)
    if nested:
        leave_fast_path(own_modules, _is_unit)
    context = _shared_context.get()
    if context is not None:
        _name_in_shared_context(members, unit, context)
        context.register(unit)
    return module


def _checked_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that makes a unit of the module."""
    if isinstance(module, FsdpModule):
        raise Fsdp2ValueError(
            "Each distinct composable distributed API can only be applied to a module once. fully_shard must be called once on a "
            f"module, got a {type(module).__name__}, which is a unit already"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard needs a module, or a list of modules, got {module!r}")
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise ValueError(
            "fully_shard does not support containers that do not implement forward, around which weights are unsharded, got a "
            f"{type(module).__name__}; call it on each of the modules in it"
        )
    if isinstance(module, NonDynamicallyQuantizableLinear):
        raise TypeError(
            "fully_shard needs a module whose forward is called, got the out_proj of an nn.MultiheadAttention, which reads its "
            "weight and never calls it; call it on the MultiheadAttention"
        )
    return _unit_class(type(module))  # type: ignore[arg-type]


def _holder(members: Sequence[nn.Module]) -> nn.Module:
    """Return a module that holds those of one unit.

    Raises:
        ValueError: there is none; one is given twice, or lies in another one.
    """
    inside = [inner for member in members for inner in member.modules()]
    twice = next((member for member in members if inside.count(member) > 1), None)
    if twice is not None or not members:
        raise ValueError(
            "fully_shard of a list needs modules that do not hold each other, "
            f"got {'none' if twice is None else f'a {type(twice).__name__} twice, or inside of another one'}"
        )
    return nn.ModuleList(members)


def _name_in_shared_context(members: Sequence[nn.Module], unit: FsdpUnit, context: FsdpContext) -> None:
    """Name the unit, and those inside of it, by its class and number: units of a shared context have no common root."""
    top = f"{unit.name}_{len(context.units)}"
    for name, inner in (pair for member in members for pair in member.named_modules()):
        if isinstance(inner, FsdpModule) and (inner in members or inner._fsdp_unit.context is context):
            named = inner._fsdp_unit
            named.name = top if named is unit else f"{top}.{name}"
            named.prefix = f"{named.name}."
            context.registry.rename(named)


@contextmanager
def fully_shard_context(
    device: torch.device | str | None = None,
    *,
    use_symmetric_memory: bool = False,
    unify_communication_stream: bool = False,
    debug: bool = False,
    surface: Surface | None = None,
) -> Iterator[FsdpContext]:
    """Make the units that ``fully_shard`` makes in this scope share one context, also if they have no common root.

    Units of one context share streams, plan and arena, and each is prefetched while the one before it runs. Use it for
    sibling modules that no sharded module is around. Weights may be written between the forwards of two of them: ranks then agree before each
    forward whether to gather again, which blocks the host. In a ``microbatch`` scope nothing is asked, and such a write is refused.

    Args:
        device: the units' device; None: the current CUDA device, or the CPU where there is none.
        use_symmetric_memory: units of this scope that name no transport use symmetric memory.
        unify_communication_stream: gathers and reductions run on one stream, one after the other.
        debug: fill released memory with NaN, and make it an error, which names the weight, to read an unsharded weight (or
            what was detached from it) after its unit was left. Ranks compare each collective before it is issued, and the
            first gradient or weight that is not finite is an error on all ranks, with its name, unit, ranks and step (where
            gradients are fp16, whose scaling means them to overflow, it is said once). Slow; the first step prints what it
            costs. Also ``context.debug = True`` later. Ranks that differ are told when a unit is sharded, or by that assignment,
            which all ranks must make.
        surface: the classes to build with, as in ``fully_shard``.

    Yields:
        The context, which ``microbatch`` takes too.

    Ranks: all that shard the units, alike; does not communicate.
    Source: ours.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    streams = make_streams(torch.device(device), one_for_communication=unify_communication_stream)
    observer_class = None if surface is None else surface.observer_class
    context = FsdpContext(torch.device(device), streams, is_shared=True, observer_class=observer_class)
    context.use_symmetric_memory = use_symmetric_memory
    context.debug = debug
    token = _shared_context.set(context)
    try:
        yield context
    finally:
        _shared_context.reset(token)


@contextmanager
def microbatch(
    module: nn.Module | FsdpContext, is_last: bool = True, *, is_first: bool | None = None
) -> Iterator[None]:
    """Mark forward and backward in this scope as one microbatch of a step.

    Outside of any scope every forward counts as a first and every backward as a last microbatch: right, but slower when
    gradients accumulate. Scopes nest; leaving one restores the former settings, also after an exception.

    Args:
        module: a sharded module, a module that holds some, or the context of a ``fully_shard_context``.
        is_first: True for a step's first microbatch. The optimizer may have written main weights, so the first unshard
            of each group updates the model weights from them; unreduced gradients of earlier microbatches are dropped. False
            for the others, whose weights are those of the first one. None: it is the first one unless unreduced
            gradients wait; right in any case, but where none wait (sharded gradients) each microbatch casts the weights anew.
        is_last: True to reduce gradients for the optimizer. False leaves them where ``Placements.gradient`` says:
            unreduced (``Partial``), or reduced over the axes where it is ``Shard(0)``. While unreduced gradients wait,
            ``param.grad`` has no values: it can be cleared, which gives them up, and all else is a RuntimeError.

    Raises:
        ValueError: there is no sharded module in ``module``.

    Ranks: all, with the same arguments; does not communicate.
    Source: ours; FSDP2's ``set_requires_gradient_sync`` and ``set_is_last_backward`` in one scope.
    """
    with ExitStack() as scopes:
        for context in contexts_of(module):
            scopes.enter_context(context.microbatch(is_first=is_first, is_last=is_last))
        yield


def contexts_of(module: nn.Module | FsdpContext) -> list[FsdpContext]:
    """Return the contexts of the topmost sharded modules in a module, each once.

    Raises:
        ValueError: there is no sharded module in it.
    """
    if isinstance(module, FsdpContext):
        return [module]
    contexts = list(dict.fromkeys(find_context(unit) for unit in topmost_fsdp_modules(module)))
    if not contexts:
        raise ValueError(
            f"{type(module).__name__} must hold sharded modules, got none; call fully_shard on its layers first"
        )
    return contexts


def scope_of_construction() -> FsdpContext | None:
    """Return the context of the ``fully_shard_context`` around this call; None outside of any."""
    return _shared_context.get()


def _described_scope() -> str:
    context = _shared_context.get()
    return "none" if context is None else f"one with debug={context.debug}"


def _checked_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    if isinstance(mesh, ProcessGroup):
        raise TypeError(
            'mesh must be a DeviceMesh, got a process group; make a mesh of it: DeviceMesh.from_group(group, "cuda")'
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh or None, got {mesh!r}; make one with init_device_mesh")
    return _default_mesh() if mesh is None else mesh


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed must be initialised before fully_shard; call torch.distributed.init_process_group() "
            "in a program started with torchrun"
        )
    device_type = "cuda" if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config()) else "cpu"
    return _mesh_of_all_ranks(device_type, dist.get_world_size(), dist.get_rank())


@functools.lru_cache(maxsize=1)  # the key holds no process group, which the cache would keep alive
def _mesh_of_all_ranks(device_type: str, world_size: int, rank: int) -> DeviceMesh:
    """Return one mesh for all calls without a mesh, so that their units share its transports."""
    return init_device_mesh(device_type, (world_size,))


def _transport_kind(transport: TransportKind | None, use_symm_mem: bool) -> str:
    if use_symm_mem and transport not in (None, "auto", "symm"):
        raise ValueError(
            f"use_symm_mem=True means transport='symm', got transport={transport!r} besides; leave one of them out"
        )
    if transport is not None and not isinstance(transport, str):
        raise TypeError(f"transport must be the name of one, got {transport!r}; try 'nccl'")
    return "symm" if use_symm_mem else "nccl" if transport is None else transport


def _own_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of the tree without nested units, root first, each module once."""
    found: dict[nn.Module, str] = {root: ""}
    _add_children(root, "", found)
    return [(name, module) for module, name in found.items()]


def _add_children(module: nn.Module, prefix: str, found: dict[nn.Module, str]) -> None:
    # Not a nested function: one that calls itself is a reference cycle, and would keep the modules alive.
    for name, child in module.named_children():
        if child not in found and not isinstance(child, FsdpModule):
            found[child] = prefix + name
            _add_children(child, f"{prefix}{name}.", found)


def _ignore(modules: Sequence[tuple[str, nn.Module]], ignored: Collection[nn.Parameter]) -> list[str]:
    """Mark parameters of the unit that it leaves alone, and return their names."""
    names = []
    for name, parameter in _parameters_of(modules) if ignored else ():
        if any(parameter is other for other in ignored):
            parameter._fsdp_ignored = True  # type: ignore[attr-defined]
            names.append(name)
    return names


def _parameters_of(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name in the unit, parameter) of the modules' own parameters."""
    for prefix, module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None and group_of(parameter) is None:
                yield f"{prefix}.{key}" if prefix else key, parameter


def _collect(
    root: nn.Module,
    meshes: GroupMeshes,
    made_from: Mapping[nn.Parameter, nn.Parameter],
    own_meshes: Mapping[nn.Parameter, DeviceMesh],
) -> tuple[list[ManagedParameter], list[FsdpParameterGroup]]:
    """Return the parameters to manage, in order, and the groups of other units that hold weights tied to this unit's.

    Args:
        made_from: by parameter that was made here, the meta parameter in whose place it is.
        own_meshes: meshes of parameters that are not sharded over the unit's.
    """
    managed: dict[nn.Parameter, ManagedParameter] = {}
    borrowed: dict[FsdpParameterGroup, None] = {}
    for prefix, module in _own_modules(root):
        for key, parameter in module._parameters.items():
            if parameter is None or is_ignored(parameter):
                continue
            name = f"{prefix}.{key}" if prefix else key
            owner = group_of(parameter)
            if owner is not None:
                mesh = meshes.of(parameter).mesh
                if owner.group_mesh.mesh != mesh:
                    raise ValueError(
                        f"parameter {name} is owned by a unit over {owner.group_mesh.mesh} and must not be sharded over "
                        f"{mesh} too; shard tied weights over the same mesh"
                    )
                if owner.param_slots.has(module._parameters, key):
                    raise ValueError(
                        f"parameter {name} must belong to one unit, got one that a unit around this "
                        f"{type(root).__name__} owns; call fully_shard on inner modules first, then on the root"
                    )
                owner.add_slot(parameter, module._parameters, key)
                borrowed[owner] = None
                continue
            if parameter.requires_grad and parameter.dtype not in SERVED_DTYPES:
                raise TypeError(
                    f"parameter {name} must have one of the dtypes {list(SERVED_DTYPES)} to be trained, got {parameter.dtype}"
                )
            refuse_earlier_hooks(parameter, name)
            if parameter not in managed:
                plain, placed = plain_of(parameter, name, module), None
                if isinstance(plain, DTensor):
                    plain, placed = taken_apart(plain, name, meshes.dense.mesh.device_type)
                made = made_from.get(parameter) if plain is parameter else parameter
                managed[parameter] = ManagedParameter(name, plain, made, placed=placed)
                managed[parameter].mesh = own_meshes.get(made_from.get(parameter, parameter))
            else:
                managed[parameter].tied_names += (name,)
            managed[parameter].param_slots.append((module._parameters, key))
    return list(managed.values()), list(borrowed)


def _ask_hooks(managed: Sequence[ManagedParameter], meshes: GroupMeshes, policy: MixedPrecisionPolicy) -> None:
    """Give parameters with hooks of their own the codec that calls them. Ranks: all of the parameters' meshes."""
    for parameter in managed:
        original = parameter.original
        shell = getattr(original, "fsdp_shell", None)
        if shell is None:
            continue
        del original.fsdp_shell  # type: ignore[attr-defined]
        mesh, placements, trains = meshes.of_managed(parameter), meshes.placements_of(parameter), original.requires_grad
        own = placements if trains else placements.frozen()
        dtypes = policy.resolve(original.dtype, trainable=trains)
        original.fsdp_codec = hook_codec(  # type: ignore[attr-defined]
            shell, original, mesh.mesh_of_shards(own), dtypes, original.device
        )
        if not hasattr(original, "fsdp_granule"):
            original.fsdp_granule = Granule.row()  # type: ignore[attr-defined]


def _group(
    managed: Sequence[ManagedParameter], meshes: GroupMeshes
) -> list[tuple[list[ManagedParameter], FlatLayout, Placements, GroupMesh]]:
    """Split parameters into those that can share a flat buffer, and lay out each buffer.

    Parameters share a buffer if they have one mesh, dtype and codec, are all trainable or all frozen, and all have rows or
    none has. A parameter that another pipeline stage holds too has a buffer of its own, so that both stages cut it
    alike.
    """
    kinds: dict[tuple[Any, ...], list[ManagedParameter]] = {}
    for parameter in managed:
        original = parameter.original
        alone = parameter if is_shared_between_stages(original, meshes.dense.model) else None
        mesh = meshes.of_managed(parameter)
        codec = codec_of(original, parameter.name)
        key = (original.dtype, original.requires_grad, original.dim() == 0, id(mesh), alone, codec)
        kinds.setdefault(key, []).append(parameter)
    groups = []
    for (_, trainable, is_scalar, *_), members in kinds.items():
        mesh, placements = meshes.of_managed(members[0]), meshes.placements_of(members[0])
        own = placements.replicated() if is_scalar else placements
        own = own if trainable else own.frozen()
        shapes = [p.original.shape for p in members]
        granules = [granule_of(p.original, p.name) for p in members]
        for found in group_by_rows(shapes, num_ranks=mesh.num_shards(own), granules=granules):
            groups.append(([members[i] for i in found.members], found.layout, own, mesh))
    return groups


def _is_unit(module: nn.Module) -> bool:
    return isinstance(module, FsdpModule)


@functools.cache
def _unit_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of ``FsdpModule`` and ``cls``, the same for each call."""
    if issubclass(cls, torch.jit.ScriptModule):
        raise TypeError(f"fully_shard needs a module whose class can be extended, got the ScriptModule {cls.__name__}")
    return type(
        f"FSDP{cls.__name__}",  # as FSDP2 names it, which callers look for
        (FsdpModule, cls),
        {**names_of_class(cls), "__module__": cls.__module__, "__qualname__": f"FSDP{cls.__qualname__}"},
    )
