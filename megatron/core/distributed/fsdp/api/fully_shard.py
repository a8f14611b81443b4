"""``fully_shard``: a module, or several, become a unit."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from itertools import count
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.api.module import FsdpModule, Surface, fsdp_modules, scope_of_construction
from megatron.core.distributed.fsdp.api.module_state import adapt_modules
from megatron.core.distributed.fsdp.api.unit_modules import UnitModules, check_modules
from megatron.core.distributed.fsdp.buffers.gradients import TrainingSettings
from megatron.core.distributed.fsdp.buffers.materialize import InitFn, Materialized, materialize, move_buffers
from megatron.core.distributed.fsdp.buffers.param_slots import ManagedParameter
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup, group_of, is_ignored
from megatron.core.distributed.fsdp.buffers.sharded_grad import refuse_earlier_hooks
from megatron.core.distributed.fsdp.buffers.weight_codec import codec_of, plain_of
from megatron.core.distributed.fsdp.config.engine_options import EngineOptions
from megatron.core.distributed.fsdp.config.mixed_precision import SERVED_DTYPES, MixedPrecisionPolicy
from megatron.core.distributed.fsdp.config.placement import Placements
from megatron.core.distributed.fsdp.layout.granule import Granule, granule_of
from megatron.core.distributed.fsdp.layout.row_groups import group_by_rows
from megatron.core.distributed.fsdp.mesh.group_mesh import GroupMeshes, device_of, is_expert, make_group_meshes
from megatron.core.distributed.fsdp.mesh.model_parallel import ModelParallel, is_shared_between_stages, taken_apart
from megatron.core.distributed.fsdp.runtime.context import FsdpContext
from megatron.core.distributed.fsdp.runtime.unit import FsdpUnit, ModuleTree, UnitOrigin
from megatron.core.module_names import named_modules

ModuleT = TypeVar("ModuleT", bound=nn.Module | Sequence[nn.Module])

# Numbers calls in this process. Ranks make them in the same order, so equal numbers are the same call on all ranks.
_CALLS = count()


@torch.inference_mode(False)  # what is made here serves training too
def fully_shard(
    module: ModuleT,
    mesh: DeviceMesh,
    placements: Placements,
    policy: MixedPrecisionPolicy | None = None,
    options: EngineOptions | None = None,
    *,
    surface: Surface | None = None,
    model_parallel: ModelParallel | None = None,
    init_fn: InitFn | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    own_meshes: Mapping[nn.Parameter, tuple[DeviceMesh, Placements]] | None = None,
) -> ModuleT:
    """Shard the parameters of a module, and unshard them around its forward and backward.

    The public function of this name has the same effects, and more arguments: it resolves them to these.

    Args:
        module: changed in place; or a list of modules, which become one unit.
        mesh: devices over which to shard.
        placements: where weights, gradients and optimizer state rest.
        policy: dtypes of main weights, main gradients and gradient communication. Inputs and outputs are not cast.
        options: the other settings.
        surface: the classes to build with.
        model_parallel: how the model is split otherwise.
        init_fn: fills modules of the meta device.
        ignored_params: parameters of the unit to leave as they are.
        own_meshes: parameters that are sharded over another mesh, with the placements there.

    Returns:
        ``module``, whose class is now a subclass of its own class and of ``FsdpModule``.

    Raises:
        ValueError, TypeError, NotImplementedError: as the public function.

    Ranks: all of the mesh, in the same order. Blocks for a broadcast: weights become those of the mesh's first rank.
    """
    policy, options = policy or MixedPrecisionPolicy(), options or EngineOptions()
    surface, model_parallel, own_meshes = surface or Surface(), model_parallel or ModelParallel(), own_meshes or {}
    modules = UnitModules.of(module)
    unit_classes = [_unit_class(type(m), surface) for m in modules.members]  # type: ignore[arg-type]
    ignored = modules.ignore(ignored_params)
    check_modules(modules.own)
    nested, device = list(fsdp_modules(modules.root)), device_of(mesh)
    context = scope_of_construction.get()
    arguments = {
        "mixed_precision_policy": policy,
        **options.compared(),
        "whether there is an init_fn": init_fn is not None,
        "the fully_shard_context around the call": "none" if context is None else f"one with debug={context.debug}",
        "ignored_params": ignored,
    }
    # Before anything is allocated or sent: ranks that differ would wait for each other in the first collective that one of them
    # lacks. See [Note: checks around the core].
    note_sharded = surface.observer_class.check_unit(
        modules.root, modules.own, mesh, placements, expert_mesh=model_parallel.expert_mesh, arguments=arguments
    )
    meshes = make_group_meshes(
        mesh, placements, options, surface.fastest_transport, model_parallel, dict(own_meshes.values())
    )
    filled = materialize(
        modules.root,
        modules.own,
        device,
        init_fn=init_fn,
        holds_reset=any(child._fsdp_unit.origin.by_reset for child in nested),
    )
    managed, borrowed = _collect(modules, meshes, filled, own_meshes)
    experts = (p for p in managed if is_expert(p.original) and p.group_mesh.mesh is meshes.dense.mesh)
    surface.observer_class.compare_experts({p.name: p.original.shape for p in experts}, meshes.dense)
    _make_codecs(managed, policy)
    groups = _make_groups(managed, meshes, policy, options, surface.group_class)
    move_buffers(modules.own, device)
    # Not the list's holder: members become units, at which a walk of the tree stops.
    tops = [
        ("" if member is modules.root else f"{index}.", member._modules, member._parameters)
        for index, member in enumerate(modules.members)
    ]
    tree = ModuleTree(tops)
    members = tuple(map(weakref.ref, modules.members))
    unit = FsdpUnit(
        " and ".join(type(member).__name__ for member in modules.members),
        groups,
        weakref.ref(tree),
        borrowed,
        origin=UnitOrigin(next(_CALLS), members, bool(nested), filled.by_reset, policy),
        options=options,
        unfilled=filled.unfilled,
    )
    note_sharded(unit)
    for member, unit_class in zip(modules.members, unit_classes, strict=True):
        # As FSDP2 does: a wrapper around the module would change the names of its parameters, and what its users hold.
        member.__class__ = unit_class
        assert isinstance(member, FsdpModule)
        member._join_unit(unit, tree, context)
    adapt_modules(unit, modules.own)
    if context is not None:
        _name_in_shared_context(modules.members, unit, context)
        context.register(unit)  # a unit without such a scope joins the context of the root that runs first
    return module


def _name_in_shared_context(members: Sequence[nn.Module], unit: FsdpUnit, context: FsdpContext) -> None:
    """Name the unit, and those inside of it, by its class and number: units of a shared context have no common root."""
    top = f"{unit.name}_{len(context.units)}"
    for name, inner in (pair for member in members for pair in named_modules(member)):
        if isinstance(inner, FsdpModule) and (inner in members or inner._fsdp_unit.context is context):
            named = inner._fsdp_unit
            own = top if named is unit else f"{top}.{name}"
            named.rename(own, f"{own}.")
            named.show_name()


def _collect(
    modules: UnitModules,
    meshes: GroupMeshes,
    filled: Materialized,
    own_meshes: Mapping[nn.Parameter, tuple[DeviceMesh, Placements]],
) -> tuple[list[ManagedParameter], list[FsdpParameterGroup]]:
    """Return the parameters to manage, in order, and the groups of other units that hold weights tied to this unit's.

    Args:
        filled: what was made of meta parameters.
        own_meshes: meshes of parameters that are not sharded over the unit's.
    """
    managed: dict[nn.Parameter, ManagedParameter] = {}
    borrowed: dict[FsdpParameterGroup, None] = {}
    made_from = {fresh: meta for meta, fresh in filled.made.items()}
    # By identity: tensors compare element by element, and those without values would be read.
    waiting = {id(held[key]) for _, held, key in filled.unfilled}
    for prefix, module in UnitModules.tree_of(modules.root):  # ``init_fn`` may have replaced modules
        for key, parameter in module._parameters.items():
            if parameter is None or is_ignored(parameter):
                continue
            name = f"{prefix}.{key}" if prefix else key
            owner = group_of(parameter)
            if owner is not None:
                # A weight tied to one of another unit: that unit's group is gathered for this one too.
                mesh = meshes.of(parameter, name).mesh
                if owner.group_mesh.mesh != mesh:
                    raise ValueError(
                        f"parameter {name} is owned by a unit over {owner.group_mesh.mesh} and must not be sharded over "
                        f"{mesh} too; shard tied weights over the same mesh"
                    )
                # Two units would put their own weight into one place of a module.
                if owner.param_slots.has(module._parameters, key):
                    raise ValueError(
                        f"parameter {name} must belong to one unit, got one of a unit that lies around this "
                        f"{type(modules.root).__name__} or holds the same module as it; call fully_shard on inner modules, and on "
                        "modules that several units hold, before those that hold them"
                    )
                owner.add_slot(parameter, module._parameters, key)
                borrowed[owner] = None
                continue
            if parameter.requires_grad and parameter.dtype not in SERVED_DTYPES:
                raise TypeError(
                    f"parameter {name} must have one of the dtypes {list(SERVED_DTYPES)} to be trained, got {parameter.dtype}"
                )
            # They would see the gradient of a parameter that no backward reaches any more.
            refuse_earlier_hooks(parameter, name)
            if parameter not in managed:
                plain, placed = plain_of(parameter, name, module), None
                if isinstance(plain, DTensor):
                    plain, placed = taken_apart(plain, name, meshes.dense.mesh.device_type)
                made = made_from.get(parameter) if plain is parameter else parameter
                own_mesh, _ = own_meshes.get(made_from.get(parameter, parameter), (None, None))
                group_mesh = meshes.of(plain, name, own_mesh, placed)
                managed[parameter] = ManagedParameter(
                    name, plain, made, group_mesh=group_mesh, placed=placed, has_values=id(plain) not in waiting
                )
            else:
                managed[parameter].tied_names.append(name)
            managed[parameter].param_slots.append((module._parameters, key))
    return list(managed.values()), list(borrowed)


def _make_codecs(managed: Sequence[ManagedParameter], policy: MixedPrecisionPolicy) -> None:
    """Give parameters whose codec depends on their mesh that codec. Ranks: all of the parameters' meshes."""
    for parameter in managed:
        original = parameter.original
        # Popped: the sharded parameter gets the attributes of the original, and its codec is made.
        make_codec = vars(original).pop("fsdp_make_codec", None)
        if make_codec is None:
            continue
        mesh, trains = parameter.group_mesh, original.requires_grad
        own = mesh.placements if trains else mesh.placements.frozen()
        dtypes = policy.resolve(original.dtype, trainable=trains)
        original.fsdp_codec = make_codec(original, mesh.mesh_of_shards(own), dtypes, original.device)  # type: ignore[attr-defined]
        if not hasattr(original, "fsdp_granule"):
            original.fsdp_granule = Granule.row()  # type: ignore[attr-defined]


def _make_groups(
    managed: Sequence[ManagedParameter],
    meshes: GroupMeshes,
    policy: MixedPrecisionPolicy,
    options: EngineOptions,
    group_class: type[FsdpParameterGroup],
) -> list[FsdpParameterGroup]:
    """Split parameters into groups that can share a flat buffer, lay out each buffer, and allocate it.

    Parameters share a buffer if they have one mesh, dtype and codec, are all trainable or all frozen, and all have rows or
    none has. A parameter that another pipeline stage holds too has a separate buffer, so that both stages cut it in the same way.

    Ranks: all of the parameters' meshes.
    """
    kinds: dict[tuple[Any, ...], list[ManagedParameter]] = {}
    for parameter in managed:
        original = parameter.original
        single = parameter if is_shared_between_stages(original, meshes.dense.model) else None
        mesh, codec = parameter.group_mesh, codec_of(original, parameter.name)
        # Frozen parameters have no main gradients, and scalars no rows to cut: neither fits into a buffer with others.
        key = (original.dtype, original.requires_grad, original.dim() == 0, id(mesh), single, codec)
        kinds.setdefault(key, []).append(parameter)
    # All buffers are laid out before the first one is allocated, which frees the memory of its originals.
    laid_out: list[Callable[..., FsdpParameterGroup]] = []
    for (dtype, trains, is_scalar, *_), members in kinds.items():
        mesh = members[0].group_mesh
        placements = mesh.placements.replicated() if is_scalar else mesh.placements
        placements = placements if trains else placements.frozen()
        # Also for frozen parameters, which may be unfrozen later. See [Note: freezing].
        training = TrainingSettings(
            policy.resolve(dtype, trainable=True), Fraction(options.grad_divisor) * mesh.num_averaged, policy
        )
        make = functools.partial(group_class, group_mesh=mesh, placements=placements, training=training)
        shapes = [p.original.shape for p in members]
        granules = [granule_of(p.original, p.name) for p in members]
        for found in group_by_rows(shapes, num_ranks=mesh.num_shards(placements), granules=granules):
            own = [members[index] for index in found.members]
            dtypes = policy.resolve(dtype, trainable=trains)
            laid_out.append(functools.partial(make, own, layout=found.layout, dtypes=dtypes))
    return [make(device=device_of(meshes.dense.mesh), least_memory=options.least_memory) for make in laid_out]


# Cached: modules of one class stay of one class, for torch.compile's guards and users who compare types.
@functools.cache
def _unit_class(cls: type[nn.Module], surface: Surface) -> type[FsdpModule]:
    """Return a subclass of ``FsdpModule`` and ``cls``, the same for each call."""
    if issubclass(cls, torch.jit.ScriptModule):
        raise TypeError(f"fully_shard needs a module whose class can be extended, got the ScriptModule {cls.__name__}")
    return type(
        f"FSDP{cls.__name__}",  # FSDP2's name, which callers look for
        (surface.module_class, cls),
        {"_fsdp_surface": surface, "__module__": cls.__module__, "__qualname__": f"FSDP{cls.__qualname__}"},
    )
