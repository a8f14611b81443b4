"""Megatron-FSDP's own entry points, for any module and a mesh, without Megatron's configuration: its version 1."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.adapter.distributed_index import FSDPDistributedIndex, axis_names, mesh_of_axes
from megatron.core.distributed.fsdp.adapter.fully_sharded_data_parallel import FullyShardedDataParallel
from megatron.core.distributed.fsdp.adapter.model_groups import model_parallel
from megatron.core.distributed.fsdp.api.optimizer import OptimizerT, contexts_of_groups, groups_of
from megatron.core.distributed.fsdp.api.optimizer import fully_shard_optimizer as shard_optimizer
from megatron.core.distributed.fsdp.checkpoint.optimizer import make_initial_state
from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.runtime.context import FsdpContext
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.served_arguments import ANY, Served, check_arguments


class ShardingStrategy(IntEnum):
    """What is sharded, as a number."""

    NO_SHARD = 0
    OPTIM = 1
    OPTIM_GRADS = 2
    OPTIM_GRADS_PARAMS = 3


_STRATEGIES: tuple[str, ...] = tuple(one.name.lower() for one in ShardingStrategy)

_ARGUMENTS: Served = {
    "init_model_with_meta_device": (ANY, "parameters on the meta device are always initialised unit by unit"),
    "sync_model_each_microbatch": (ANY, "backward outside of no_sync always reduces"),
    "preproc_state_dict_for_dcp_ckpt": (ANY, "placements always say what DCP needs"),
    "average_in_collective": (ANY, "gradients are summed on the wire and scaled once, which gives the same mean"),
    "disable_bucketing": (ANY, "gradients are reduced unit by unit"),
    "fsdp_double_buffer": (ANY, "gathered weights lie in one arena with fixed addresses"),
    "keep_fp8_transpose_cache": ((False,), "set it in DistributedDataParallelConfig, with weights in FP8"),
    "fsdp_db_use_persist_buf_on_alloc_fail": ((False,), "buffers are planned before training"),
    "enable_fine_grained_param_gather": ((False,), "weights are gathered unit by unit"),
    "enable_fine_grained_param_gather_hook": ((False,), "weights are gathered unit by unit"),
    "enable_fine_grained_param_gather_backward_hook": ((False,), "weights are gathered unit by unit"),
    "fine_grained_recurse_module_types": ((None,), "weights are gathered unit by unit"),
    "use_decoupled_grad": ((False,), "gradients are in param.grad"),
    "cuda_graph_mode": ((False,), "steps are captured without a mode of the engine"),
    "maxpool_double_buffer": (ANY, "one arena is planned from the recorded order of units, whatever their sizes are"),
}
"""Arguments of Megatron-FSDP: (values that are served, why others are not)."""


class MegatronFSDP(FullyShardedDataParallel):
    """A module whose weights, gradients and optimizer state are sharded over the axes of a mesh.

    Args:
        module: the module, changed in place.
        dist_index: mesh and names of its axes.
        ddp_config: strategy, dtypes and overlap; None: everything is sharded, and communication overlaps.
        mixed_precision_policy: dtypes, in place of those of ``ddp_config``; None: those.
        fsdp_unit_modules: classes (or their names) of the modules to shard as units; None: transformer layers, and where there
            are none the module is one unit.
        device: accepted; shards are on the mesh's.
        calculate_per_token_loss: gradients are summed over ranks and not averaged.
        report_nan_in_param_grad: raise in ``finish_grad_sync``, and in steps of an optimizer passed to ``fully_shard_optimizer``, if a
            gradient is not finite; this synchronizes the host with the device.
        nccl_ub: use symmetric memory.
        disable_symmetric_registration: do not register memory; must be False with ``nccl_ub``.
        further: arguments that are accepted at some values; see ``_ARGUMENTS``.

    Raises:
        NotImplementedError: one of these has a value that is not served.
        ValueError: the index lacks an axis, or the module has no module of a class.

    Ranks: all of the mesh; blocks. Weights become those of the first rank.
    Source: the class of this name of the package megatron-fsdp (signature and methods).
    """

    def __init__(
        self,
        module: nn.Module,
        dist_index: FSDPDistributedIndex,
        ddp_config: DistributedDataParallelConfig | None = None,
        mixed_precision_policy: MixedPrecisionPolicy | None = None,
        fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        calculate_per_token_loss: bool = False,
        init_model_with_meta_device: bool = False,
        sync_model_each_microbatch: bool = False,
        keep_fp8_transpose_cache: bool = False,
        nccl_ub: bool = False,
        *,
        disable_symmetric_registration: bool = False,
        report_nan_in_param_grad: bool = False,
        **further: Any,
    ) -> None:
        nn.Module.__init__(self)
        check_arguments("MegatronFSDP", {"keep_fp8_transpose_cache": keep_fp8_transpose_cache, **further}, _ARGUMENTS)
        # Copy the config: the caller may wrap another model with it and without this policy.
        config = copy.copy(ddp_config) or DistributedDataParallelConfig(
            use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
        )
        if mixed_precision_policy is not None:
            config.megatron_fsdp_main_params_dtype = mixed_precision_policy.main_params_dtype
            config.megatron_fsdp_main_grads_dtype = mixed_precision_policy.main_grads_dtype
            config.megatron_fsdp_grad_comm_dtype = mixed_precision_policy.grad_comm_dtype
        config.disable_symmetric_registration |= disable_symmetric_registration
        config.nccl_ub = config.nccl_ub or nccl_ub
        config.check_for_nan_in_grad = config.check_for_nan_in_grad or report_nan_in_param_grad
        self.config: Any = None
        self.ddp_config, self.module = config, module
        self.dist_index = _of_data_and_tensor_axes(dist_index)
        tensor = self.dist_index.device_mesh.get_group(dist_index.tp_dim) if dist_index.tp_dim else None
        self.pg_collection = ProcessGroupCollection(dp_cp=self.dist_index.get_dp_group(), tp=tensor)
        self._model_parallel = model_parallel(self.pg_collection, self.dist_index)
        self._shard_module(fsdp_unit_modules, sums=calculate_per_token_loss, is_stage=False)
        if ddp_config is not None:  # report the values in effect, as FullyShardedDataParallel does
            ddp_config.overlap_grad_reduce, ddp_config.overlap_param_gather = (
                config.overlap_grad_reduce,
                config.overlap_param_gather,
            )
        if config.check_for_nan_in_grad:
            _CHECKED.update(dict.fromkeys(self._contexts(), weakref.ref(self)))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the sharded main weights by the names of this module's parameters, which start with ``module.``."""
        return nn.Module.state_dict(self, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors or DTensors by the names that ``state_dict`` returns, or by the names of the unwrapped model.

        Raises:
            RuntimeError: missing or extra keys (``strict``), or values of another shape, by name; a unit is unsharded.

        Ranks: all, if values are DTensors of another placement.
        """
        # The unwrapped model may have a submodule named "module", so its names may also start with "module.".
        is_ours = any(name.startswith("module.") for name in state_dict)
        if not is_ours or set(state_dict) == set(self.module.state_dict()):
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        return nn.Module.load_state_dict(self, state_dict, strict=strict, assign=assign)


_CHECKED: weakref.WeakKeyDictionary[FsdpContext, weakref.ref[MegatronFSDP]] = weakref.WeakKeyDictionary()
"""Models whose gradients are checked before a step, by context: an optimizer finds contexts, not models."""


def _of_data_and_tensor_axes(index: FSDPDistributedIndex) -> FSDPDistributedIndex:
    """Return the index over the axes that it names, in the order that the engine needs: without those of pipelines, tensors first."""
    names = [name for name in (index.tp_dim, index.dp_outer_dim, index.dp_shard_dim) if name is not None]
    meshes: dict[str, Any] = {
        field: mesh_of_axes(mesh, [name for name in names if name in axis_names(mesh)])
        for field in ("device_mesh", "expt_device_mesh")
        if (mesh := getattr(index, field)) is not None
    }
    return replace(index, **meshes)


def fully_shard_model(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None,
    tp_dim: str | None = None,
    hybrid_fsdp_group: ProcessGroup | None = None,
    hybrid_fsdp_expt_group: ProcessGroup | None = None,
    expt_device_mesh: DeviceMesh | None = None,
    fsdp_group_ag: ProcessGroup | None = None,
    expt_fsdp_group_ag: ProcessGroup | None = None,
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
    zero_dp_strategy: str | int = 3,
    outer_dp_sharding_strategy: str | int = 0,
    device: torch.device | None = None,
    init_model_with_meta_device: bool = False,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    sync_model_each_microbatch: bool = True,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    report_nan_in_param_grad: bool = False,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
    disable_symmetric_registration: bool = False,
    enable_fine_grained_param_gather: bool = False,
    use_decoupled_grad: bool = False,
    cuda_graph_mode: bool = False,
    maxpool_double_buffer: bool = False,
) -> MegatronFSDP:
    """Shard a module over the axes of a mesh; see ``MegatronFSDP``.

    Args:
        device_mesh: None: all ranks, along one axis.
        dp_shard_dim, dp_outer_dim, tp_dim: names of the axes over which weights are sharded, replicated and split.
        zero_dp_strategy: 0 to 3, or the strategy's name: what is sharded over ``dp_shard_dim``.
        outer_dp_sharding_strategy: 0 or 1, or the name: what is sharded over ``dp_outer_dim``.
        overlap_grad_reduce, overlap_param_gather: False turns overlap off for every strategy.

    Raises:
        ValueError: a strategy is unknown, or an axis is missing.
        NotImplementedError: an argument has a value that is not served.

    Ranks: all of the mesh; blocks.
    Source: the function of this name of the package megatron-fsdp, with its arguments in its order.
    """
    given = dict(locals())
    others = {name: given[name] for name in _ARGUMENTS if name in given}
    check_arguments("fully_shard_model", others, _ARGUMENTS)
    if device_mesh is None:
        device_type = device.type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
        device_mesh = init_device_mesh(device_type, (torch.distributed.get_world_size(),), mesh_dim_names=("fsdp",))
        given.update(device_mesh=device_mesh, dp_shard_dim="fsdp")
    outer = _strategy(outer_dp_sharding_strategy, "outer_dp_sharding_strategy", _STRATEGIES[:2])
    # Meshes, axes and groups have the same names here and there.
    of_index = {field.name: given[field.name] for field in fields(FSDPDistributedIndex) if field.name in given}
    index = FSDPDistributedIndex(**of_index, hsdp_outer_dp_shard=outer == "optim")
    config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=_strategy(zero_dp_strategy, "zero_dp_strategy", _STRATEGIES),
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        no_overlap_grad_reduce=not overlap_grad_reduce,
        no_overlap_param_gather=not overlap_param_gather,
    )
    return MegatronFSDP(
        module,
        index,
        config,
        mixed_precision_policy or MixedPrecisionPolicy(),
        fsdp_unit_modules,
        calculate_per_token_loss=calculate_per_token_loss,
        nccl_ub=nccl_ub,
        disable_symmetric_registration=disable_symmetric_registration,
        report_nan_in_param_grad=report_nan_in_param_grad,
    )


def _strategy(given: str | int, name: str, known: Sequence[str]) -> Any:
    if isinstance(given, int) and 0 <= given < len(known):
        return known[given]
    if given not in known:
        raise ValueError(f"{name} must be from 0 to {len(known) - 1} or one of {', '.join(known)}, got {given!r}")
    return given


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, preproc_state_dict_for_dcp_ckpt: bool = True, *, precision_aware: bool = False
) -> torch.optim.Optimizer:
    """Return the optimizer, which refuses steps that would train on wrong gradients from now on.

    It gets the state of before its first step, so that ``torch.distributed.checkpoint.load`` of its ``state_dict`` fills that. Its
    ``step`` and ``zero_grad`` take Megatron-FSDP's arguments.

    Args:
        preproc_state_dict_for_dcp_ckpt: accepted; placements always say what DCP needs.
        precision_aware: the optimizer takes gradients in another dtype than the main weights; they are not cast.

    Raises:
        ValueError: none of the optimizer's parameters is sharded, or one was created before the model was sharded.
    """
    adapt_optimizer(optimizer, precision_aware=precision_aware)
    if not groups_of(optimizer):
        raise ValueError(
            f"the optimizer must be built over the parameters of a sharded model, got {type(optimizer).__name__} with none; call "
            "fully_shard_model first and pass model.parameters()"
        )
    return optimizer


def adapt_optimizer(optimizer: OptimizerT, *, precision_aware: bool) -> OptimizerT:
    """Adapt an optimizer as ``fully_shard_optimizer`` does, also one without sharded parameters, as version 2 allows."""
    sharded = shard_optimizer(optimizer, precision_aware=precision_aware)
    make_initial_state(sharded)
    _take_arguments(sharded)
    return sharded


def _take_arguments(optimizer: torch.optim.Optimizer) -> None:
    """Let ``step`` and ``zero_grad`` take Megatron-FSDP's arguments; what would leave something undone is refused."""
    if optimizer.__dict__.get(_TAKES_ARGUMENTS):
        return
    optimizer.__dict__[_TAKES_ARGUMENTS] = True
    optimizer.register_step_pre_hook(_without_arguments)
    zero_grad: Any = optimizer.__dict__.get("zero_grad")
    # A strong reference to the method would be a cycle.
    method = weakref.WeakMethod(optimizer.zero_grad) if zero_grad is None else lambda: zero_grad

    def zero_grad_with_buffer(*args: Any, zero_grad_buffer: bool = True, **kwargs: Any) -> None:
        _check_true("zero_grad", "zero_grad_buffer", zero_grad_buffer)
        own = method()
        assert own is not None
        own(*args, **kwargs)

    optimizer.zero_grad = zero_grad_with_buffer  # type: ignore[method-assign]


_TAKES_ARGUMENTS = "_fsdp_takes_arguments"


def _without_arguments(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # Gradients that are not reduced make the step raise, so nothing is left to do at either value.
    rest = {name: value for name, value in kwargs.items() if name != "sync_grad_before_optimizer_step"}
    _check_true("step", "install_optimized_model_weights", rest.pop("install_optimized_model_weights", True))
    if not _CHECKED:
        return args, rest
    # torch passes the optimizer itself as the first argument.
    closure = args[1] if len(args) > 1 else rest.get("closure")
    if closure is None:
        _check_gradients(optimizer)
        return args, rest

    def closure_and_check() -> Any:
        loss = closure()
        _check_gradients(optimizer)
        return loss

    return args[:1], {**rest, "closure": closure_and_check}


def _check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise if a gradient is not finite, for models with ``report_nan_in_param_grad``. Ranks: all of these models."""
    found = [_CHECKED[context]() for context in contexts_of_groups(groups_of(optimizer)) if context in _CHECKED]
    for model in dict.fromkeys(found):
        if model is not None:
            model._check_finite()


def _check_true(method: str, name: str, value: bool) -> None:
    if not value:
        raise NotImplementedError(f"{method}({name}=...) must be True, got {value}: it is always done; leave it out")


def fully_shard(
    module: nn.Module, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard a module, and let an optimizer of its parameters update the sharded ones.

    Args:
        optimizer: of ``module``'s parameters; its groups keep their settings, its state is dropped.
        args, kwargs: those of ``fully_shard_model``.

    Returns:
        The wrapped module and the optimizer.

    Raises:
        ValueError: the optimizer has a parameter that is not the module's; or as ``fully_shard_model``.

    Ranks: all of the mesh; blocks.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    strays = [list(p.shape) for group in optimizer.param_groups for p in group["params"] if p not in names]
    if strays:
        raise ValueError(
            f"the optimizer must have only parameters of the module, got others of shapes {strays}; use a separate optimizer for these, "
            "or call fully_shard_model and then fully_shard_optimizer"
        )
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    model = fully_shard_model(module, *args, **kwargs)
    sharded = dict(model.module.named_parameters())
    optimizer.state.clear()
    for group, members in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [sharded[name] for name in members]
    return model, fully_shard_optimizer(optimizer)


# ---- small functions of meshes, modules, and of how tensor parallelism splits a parameter ---------------------------


def get_mcore_tensor_parallel_partition_dim(param: torch.Tensor) -> int | None:
    """Return the dim along which tensor-parallel ranks share a parameter; None where each has all of it."""
    of_mode = {"column": 0, "row": 1}.get(getattr(param, "_tensor_parallel_mode", ""))
    if of_mode is not None:
        return of_mode
    dim: int = getattr(param, "partition_dim", -1) if getattr(param, "tensor_model_parallel", False) else -1
    return dim if dim >= 0 else None


def is_mcore_tensor_model_parallel(param: torch.Tensor) -> bool:
    """Return whether tensor-parallel ranks share a parameter."""
    return get_mcore_tensor_parallel_partition_dim(param) is not None


def is_mcore_tensor_parallel_duplicated(param: torch.Tensor) -> bool:
    """Return whether each tensor-parallel rank has all of a parameter."""
    return not is_mcore_tensor_model_parallel(param)


def using_tensor_parallel(dist_index: FSDPDistributedIndex, is_expert_parallel: bool = False) -> bool:
    """Return whether there is more than one tensor-parallel rank."""
    if dist_index.tp_dim is None:
        return False
    submesh: Any = dist_index.get_submesh(dist_index.tp_dim, is_expert_parallel=is_expert_parallel)
    return bool(submesh.mesh.numel() > 1)


def get_mesh_names(device_mesh: DeviceMesh | None = None, only_submesh_dims: bool = False) -> list[str]:
    """Return the names of a mesh's axes, and of axes that were flattened into one."""
    if device_mesh is None:
        return []
    return list(device_mesh.mesh_dim_names or ()) if only_submesh_dims else list(axis_names(device_mesh))


def contains_submesh(device_mesh: DeviceMesh | None, submesh_names: str | Sequence[str] | None) -> bool:
    """Return whether a mesh has axes of these names, flattened ones included."""
    if device_mesh is None or submesh_names is None:
        return False
    names = (submesh_names,) if isinstance(submesh_names, str) else submesh_names
    return set(names) <= set(get_mesh_names(device_mesh))


def is_submodule(module: nn.Module, parent_module: nn.Module, strict: bool = True) -> bool:
    """Return whether a module is in another one; ``strict``: and is not that itself."""
    return any(one is module for one in parent_module.modules()) and not (strict and module is parent_module)


def find_megatron_fsdp(model: Any) -> MegatronFSDP | None:
    """Return the ``MegatronFSDP`` among a model and what it wraps as ``.module``; None where there is none."""
    while model is not None and not isinstance(model, MegatronFSDP):
        model = getattr(model, "module", None)
    return model


def safe_get_rank() -> int:
    """Return this rank; before torch.distributed is initialised that of torchrun's environment, or 0."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
