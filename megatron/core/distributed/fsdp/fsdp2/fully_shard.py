"""``fully_shard`` and ``fully_shard_context`` with their public arguments, which are resolved here for ``api/``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.api.fully_shard import ModuleT
from megatron.core.distributed.fsdp.api.fully_shard import fully_shard as shard_core
from megatron.core.distributed.fsdp.api.module import FsdpModule, Surface, scope_of_construction
from megatron.core.distributed.fsdp.api.module import fully_shard_context as core_context
from megatron.core.distributed.fsdp.api.unit_modules import UnitModules
from megatron.core.distributed.fsdp.checks.observer import RankObserver
from megatron.core.distributed.fsdp.comm.choose import TransportKind
from megatron.core.distributed.fsdp.compat.context import MegatronContext
from megatron.core.distributed.fsdp.compat.parameter_group import MegatronParameterGroup
from megatron.core.distributed.fsdp.config.engine_options import EngineOptions
from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.config.placement import Placements
from megatron.core.distributed.fsdp.fastest_transport import fastest_transport
from megatron.core.distributed.fsdp.fsdp2.arguments import (
    check_offload,
    checked_mesh,
    meshes_of_parameters,
    placements_of,
    policy_of,
    takes_least_memory,
    transport_kind,
)
from megatron.core.distributed.fsdp.fsdp2.casts import cast_inputs_and_outputs
from megatron.core.distributed.fsdp.fsdp2.forward_methods import register_known_methods
from megatron.core.distributed.fsdp.fsdp2.methods import Fsdp2ValueError, FSDPModule, mark_as_composed
from megatron.core.distributed.fsdp.fsdp2.pretrained_methods import guard_pretrained_methods
from megatron.core.distributed.fsdp.mesh.group_mesh import device_of
from megatron.core.distributed.fsdp.mesh.model_parallel import ModelParallel
from megatron.core.distributed.fsdp.runtime.context import FsdpContext

PUBLIC = Surface(
    module_class=FSDPModule,
    group_class=MegatronParameterGroup,
    context_class=MegatronContext,
    observer_class=RankObserver,
    fastest_transport=fastest_transport,
)
"""The classes with the names that users of FSDP2 and Megatron-FSDP call, with checks across ranks and the choice of transports."""


@torch.inference_mode(False)
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
        grad_divisor: divides gradients, in addition to the mean over the data-parallel ranks.
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
            of ranks means True, which is logged once.
        mp_policy: FSDP2's policy, or the engine's, under FSDP2's name. With FSDP2's, main weights are in the parameter's
            dtype.
        offload_policy: FSDP2's. ``CPUOffloadPolicy`` is served on ranks of the CPU, whose shards are in the host's memory.
        shard_placement_fn: FSDP2's. Ranks own rows whatever dim it names, which is logged once. A mesh that it names for a parameter
            (``ShardPlacementResult``) is served.
        least_memory: take no more memory than FSDP2: where main weights have another dtype than modules compute in, they are cast for
            each all-gather, and none rest in the compute dtype; gradients get memory for their reduction when a unit's backward ends,
            which they leave before the next unit's, instead of ranges that are there all the time. Costs a few percent of speed.
            Only with transport "nccl". None: where ``mp_policy`` is FSDP2's, and the transport is "nccl".
        ignored_params: parameters of the unit to leave as they are: not sharded, nor moved, nor their gradients reduced.

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
    _check_not_sharded(module)
    modules = UnitModules.of(module)
    scope = scope_of_construction.get()
    in_scope = scope is not None and scope.options.use_symmetric_memory and transport is None
    kind = transport_kind(transport, use_symm_mem or in_scope)
    policy = policy_of(mixed_precision_policy, mp_policy)
    options = EngineOptions(
        grad_divisor=grad_divisor,
        transport=kind,
        gather_group=fsdp_group_ag,
        forward_prefetch_depth=forward_prefetch_depth,
        backward_prefetch_depth=backward_prefetch_depth,
        least_memory=takes_least_memory(least_memory, (mixed_precision_policy, mp_policy), kind),
    )
    mesh = checked_mesh(mesh)
    check_offload(offload_policy, device_of(mesh))
    model_parallel = model_parallel or ModelParallel()
    return shard_unit(
        module,
        mesh,
        placements_of(mesh, model_parallel.tensor_axis, placements, reshard_after_forward),
        policy,
        options,
        model_parallel=model_parallel,
        init_fn=init_fn,
        ignored_params=ignored_params or (),
        own_meshes=meshes_of_parameters(
            shard_placement_fn, modules.parameters(), mesh, placements, reshard_after_forward
        ),
    )


def shard_unit(module: ModuleT, *args: Any, **kwargs: Any) -> ModuleT:
    """Shard a module with resolved arguments, those of ``api.fully_shard``, and give it the public names and casts."""
    sharded = shard_core(module, *args, surface=PUBLIC, **kwargs)
    members = [sharded] if isinstance(sharded, nn.Module) else list(sharded)
    for member in members:
        assert isinstance(member, FsdpModule)
        cast_inputs_and_outputs(member, member._fsdp_unit.origin.policy)
        guard_pretrained_methods(UnitModules.tree_of(member))
    register_known_methods(members)
    mark_as_composed(members)
    return sharded


def _check_not_sharded(module: Any) -> None:
    """Refuse a unit with the class and the words that callers of FSDP2 look for."""
    for member in [module] if isinstance(module, nn.Module) else module:
        if isinstance(member, FsdpModule):
            raise Fsdp2ValueError(
                "Each distinct composable distributed API can only be applied to a module once. fully_shard must be called once on a "
                f"module, got a {type(member).__name__}, which is a unit already"
            )


@contextmanager
def fully_shard_context(
    device: torch.device | str | None = None,
    *,
    use_symmetric_memory: bool = False,
    unify_communication_stream: bool = False,
    debug: bool = False,
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
            gradients are fp16, whose scaling lets them overflow on purpose, it is logged once). Slow; the first step prints what it
            costs. Also ``context.debug = True`` later. A difference between ranks raises when a unit is sharded, or in that assignment,
            which all ranks must make.

    Yields:
        The context, which ``microbatch`` takes too.

    Ranks: all that shard the units, with the same arguments; does not communicate.
    Source: ours.
    """
    options = EngineOptions(
        use_symmetric_memory=use_symmetric_memory, unify_communication_stream=unify_communication_stream, debug=debug
    )
    with core_context(device, options, surface=PUBLIC) as context:
        yield context
