"""The entry point for Megatron code: calls ``fully_shard`` as a configuration and process groups say."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.adapter.megatron_names import MegatronNames
from megatron.core.distributed.fsdp.adapter.model_groups import (
    check_split,
    distributed_index,
    has_experts,
    model_parallel,
)
from megatron.core.distributed.fsdp.api.module import FsdpModule
from megatron.core.distributed.fsdp.buffers.grad_sums import sum_grads
from megatron.core.distributed.fsdp.buffers.parameter_group import group_of
from megatron.core.distributed.fsdp.buffers.weight_codec import codec_of
from megatron.core.distributed.fsdp.codec.fp8_codec import Fp8Codec
from megatron.core.distributed.fsdp.comm.choose import SharedTransports, TransportKind
from megatron.core.distributed.fsdp.comm.process_group import compare_on_ranks
from megatron.core.distributed.fsdp.config.engine_options import EngineOptions
from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.config.placement import hybrid_placements, strategy_placements
from megatron.core.distributed.fsdp.fastest_transport import fastest_transport
from megatron.core.distributed.fsdp.fsdp2.fully_shard import shard_unit
from megatron.core.distributed.fsdp.mesh.group_mesh import device_of, is_expert
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.parallel_state import initialized_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

logger = logging.getLogger(__name__)


class FullyShardedDataParallel(MegatronNames):
    """A model whose weights, gradients and optimizer state are sharded over the data-parallel ranks.

    Args:
        config: if its ``calculate_per_token_loss`` is set, gradients are summed over ranks and not averaged.
        ddp_config: strategy, dtypes, overlap, prefetch depth, memory budget and transport.
        module: the model, changed in place. Parameters on the meta device are allocated and initialised unit by unit.
        fsdp_unit_modules: classes (or their names) of the modules to shard as units. None: each transformer layer, the
            embedding and the output layer. Other parameters belong to the unit of the model itself.
        disable_bucketing: accepted for Megatron-Core's callers; gradients are reduced unit by unit.
        device: the device of the shards; None: the current CUDA device if the process group uses NCCL, else the CPU.
        pg_collection: process groups; None: those of ``parallel_state.initialize_model_parallel``, and where that was not
            called all ranks are data-parallel. Parameters are sharded over ``dp_cp``, or ``dp`` if
            that is None; experts (parameters with ``allreduce=False``) over ``expt_dp``. Hybrid sharding
            (``num_distributed_optimizer_instances`` above 1) shards over ``intra_dp_cp`` and replicates over
            ``inter_dist_opt``. ``tp``, ``expt_tp``, ``pp``, ``mp`` and ``embd`` say how the model is split otherwise;
            see ``ModelParallel`` for the attributes of parameters that belong to that.

    Raises:
        ValueError: the model is split over more tensor- or pipeline-parallel ranks than there are in the process groups;
            ``pg_collection`` lacks a process group, or they are not the axes of a mesh; the model has no module
            of a class in ``fsdp_unit_modules``; the transport cannot serve the ranks; the memory budget is a fraction,
            and the device has no memory of its own.

    Ranks: all of the data-parallel process group, and of the tensor-parallel one; blocks. Weights become those of the
    first rank.
    Source: Megatron-Core's class of this name (signature and methods).
    """

    _is_megatron_fsdp = True

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.ddp_config, self.module = ddp_config, module
        instances, outer = ddp_config.num_distributed_optimizer_instances, ddp_config.outer_dp_sharding_strategy
        if outer != "no_shard" and instances == 1:
            raise ValueError(
                f"outer_dp_sharding_strategy={outer!r} needs num_distributed_optimizer_instances above 1, got 1: there is "
                "no outer axis"
            )
        known = pg_collection or initialized_process_groups()
        self.pg_collection = known or ProcessGroupCollection.data_parallel()
        check_split(config, module, self.pg_collection, is_known=known is not None)
        follow_fp8_settings(config, ddp_config, module)
        self.dist_index = distributed_index(self.pg_collection, ddp_config, device, has_experts=has_experts(module))
        self._model_parallel = model_parallel(self.pg_collection, self.dist_index)
        sums = getattr(config, "calculate_per_token_loss", False)
        self._shard_module(fsdp_unit_modules, sums=sums, is_stage=group_size(self.pg_collection.pp) > 1)

    def _shard_module(
        self, unit_modules: Sequence[type[nn.Module] | str] | None, *, sums: bool, is_stage: bool
    ) -> None:
        """Shard the module's units and then itself, as the settings say."""
        module, ddp_config, group = self.module, self.ddp_config, self.dist_index.get_dp_group()
        logger.info("overlap of communication with computation: %s", ddp_config.describe_overlap())
        # As in Megatron-FSDP, these fields contain the values in effect after wrapping.
        ddp_config.overlap_grad_reduce = ddp_config.reductions_overlap
        ddp_config.overlap_param_gather = ddp_config.gathers_overlap
        units = _units(module, unit_modules, ddp_config.fsdp_layers_per_unit, is_stage=is_stage)
        policy = ddp_config.mixed_precision_policy(is_megatron_fsdp=self._is_megatron_fsdp)
        options = self._options(policy, Fraction(1, group.size()) if sums else Fraction(1))
        shard = self._sharder(units, policy, options)
        for unit in units:
            shard(unit[0] if len(unit) == 1 else unit)
        shard(module)
        _tie_output_layer(module)
        for context in self._contexts():
            if context.is_shared:  # made with the options of its scope
                names = ("overlaps_reductions", "ahead_numel", "memory_budget_nbytes")
                context.change_options(**{name: getattr(options, name) for name in names})
                context.debug = options.debug

    def _options(self, policy: MixedPrecisionPolicy, grad_divisor: Fraction) -> EngineOptions:
        """Return the engine's settings. Ranks: all of the data-parallel group, if the memory budget is a fraction."""
        index, ddp_config = self.dist_index, self.ddp_config
        device = device_of(index.get_root_mesh())
        settings = {f"{field.name} of the ddp_config": getattr(ddp_config, field.name) for field in fields(ddp_config)}
        axes = [group for group in (index.get_fsdp_group(), index.get_outer_fsdp_group()) if group is not None]
        compare_on_ranks(settings, axes, device)
        # The config's own check used DistributedDataParallel's meaning of None if use_megatron_fsdp was left out.
        ddp_config.check_accumulation(is_megatron_fsdp=self._is_megatron_fsdp)
        memory_budget_nbytes = _budget_nbytes(ddp_config.fsdp_memory_budget, index.get_dp_group(), device)
        return EngineOptions(
            grad_divisor=grad_divisor,
            transport=_transport_kind(ddp_config, policy, device),
            gather_group=index.get_fsdp_group(independent_all_gather=True),  # experts': in ``model_parallel``
            forward_prefetch_depth=ddp_config.prefetch_depths[0],
            backward_prefetch_depth=ddp_config.prefetch_depths[1],
            debug=ddp_config.fsdp_debug,
            overlaps_reductions=ddp_config.reductions_overlap,
            ahead_numel=ddp_config.suggested_communication_unit_size or 0,
            # The virtual stages of a rank, each with a plan of its own, share the budget.
            memory_budget_nbytes=memory_budget_nbytes
            // (getattr(self.config, "virtual_pipeline_model_parallel_size", None) or 1),
        )

    def _sharder(
        self, units: Sequence[Sequence[nn.Module]], policy: MixedPrecisionPolicy, options: EngineOptions
    ) -> Callable[..., Any]:
        """Return ``fully_shard`` with the settings of this model, once its transports are chosen."""
        index, ddp_config = self.dist_index, self.ddp_config
        for experts in (False, True) if index.expt_device_mesh is not None else (False,):
            # Choose the transport here, where the sizes of the units are known; the mesh remembers it.
            mesh, sharding = index.get_root_mesh(experts), index.get_fsdp_group(experts)
            gathers = index.get_fsdp_group(experts, independent_all_gather=True)
            assert sharding is not None, "expt_device_mesh is set here"
            SharedTransports.of(mesh).get(
                options.transport,
                sharding,
                sharding if gathers is None else gathers,  # None: gathers share the communicator of reductions
                device_of(mesh),
                partial(fastest_transport, nbytes=_sizes_nbytes(units, experts=experts)),
            )
        assert index.dp_shard_dim is not None, "the index has checked it"
        placements = strategy_placements(ddp_config.sharding_strategy, index.dp_shard_dim)
        if index.dp_outer_dim is not None:
            outer, axes = "optim" if index.hsdp_outer_dp_shard else "no_shard", (index.dp_outer_dim, index.dp_shard_dim)
            placements = hybrid_placements(ddp_config.sharding_strategy, outer, axes)
        return partial(
            shard_unit,
            mesh=index.get_root_mesh(),
            placements=placements,
            policy=policy,
            options=options,
            model_parallel=self._model_parallel,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward. Ranks: all."""
        return self.module(*args, **kwargs)

    @property
    def transport_names(self) -> list[str]:
        """The ``name`` of each transport that moves this model's bytes between ranks."""
        return sorted({axis.name for group in self.parameter_groups for axis in group.group_mesh.axes})

    def close(self) -> None:
        """Deregister the model's memory from its process groups, so that these can be destroyed.

        Only symmetric memory is registered; deleting the model does the same. Ranks: all; blocks the host.
        """
        for transport in {axis for group in self.parameter_groups for axis in group.group_mesh.axes}:
            transport.close()

    def describe(self) -> str:
        """Return a table of the engine's memory on this rank: an estimate before the first step, then the plan."""
        return "\n".join(str(context.describe()) for context in self._contexts())

    # ---- weights ------------------------------------------------------------------------------------------------

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Start to gather the first unit's weights for the next step; call it after the optimizer's step.

        Weights must not be written after it. It does nothing if ``fsdp_all_gather_in_start_param_sync`` is off and
        neither argument is set: then the first forward gathers.

        Args:
            unused: the parameters that Megatron-Core's schedules pass; all are gathered in the order of the plan.
            force_sync: gather whatever the setting, and make the current stream wait for it.
            force_dispatch: gather whatever the setting.

        Ranks: all; does not block the host.
        """
        if self.ddp_config.fsdp_all_gather_in_start_param_sync or force_sync or force_dispatch:
            for context in self._contexts():
                context.prepare_forward()
        if force_sync:
            self.synchronize_param_gather()

    @torch.no_grad()
    def broadcast_params(self) -> None:
        """Broadcast main weights that are replicated from their first rank; sharded ones have one owner. Ranks: all."""
        for group in self.parameter_groups:
            group.weights.broadcast_replicas()
        self.install_optimized_model_weights()

    # ---- gradients ----------------------------------------------------------------------------------------------

    def start_grad_sync(self, *unused: Any) -> None:
        """Start to reduce gradients that ``no_sync`` left unreduced. Ranks: all."""
        for context in self._contexts():
            context.reduce_partial()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Complete ``param.grad``: the gradients of the whole step.

        Args:
            force_all_reduce: accepted for Megatron-Core's callers; each strategy reduces in one way.

        Raises:
            RuntimeError: with ``check_for_nan_in_grad``, a gradient is not finite; on every rank.

        Ranks: all; blocks the host only with ``check_for_nan_in_grad``.
        """
        self.start_grad_sync()
        sum_grads(self.parameter_groups, in_use=True)
        if self.ddp_config.check_for_nan_in_grad:
            self._check_finite()

    def _check_finite(self) -> None:
        groups = [group for group in self.parameter_groups if group.trainable and group.grads.has_main]
        named = [(group.name_of(index), p.grad) for group in groups for index, p in enumerate(group.sharded)]
        grads = [(name, grad.to_local()) for name, grad in named if grad is not None]  # type: ignore[attr-defined]
        bad = [name for name, grad in grads if not grad.isfinite().all()]
        device = device_of(self.dist_index.get_root_mesh())
        is_finite = torch.tensor(not bad, dtype=torch.int32, device=device)
        ranks = self._model_parallel.model_groups or (self.dist_index.get_dp_group(),)
        for ranks_of_model in ranks:
            dist.all_reduce(is_finite, op=dist.ReduceOp.MIN, group=ranks_of_model)
        if is_finite:
            return
        for ranks_of_model in ranks:
            found: list[list[str]] = [[]] * ranks_of_model.size()
            dist.all_gather_object(found, bad, group=ranks_of_model)
            bad = list(dict.fromkeys(name for names in found for name in names))
        others = f" and {len(bad) - 1} other parameters" if len(bad) > 1 else ""
        raise RuntimeError(
            f"gradients must be finite, got NaN or infinity in that of {bad[0]}{others} (rank {dist.get_rank()} and "
            "all others stop here)"
        )

    @torch.no_grad()
    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply all main gradients by ``scaling_factor``."""
        grads = [group.grads for group in self.parameter_groups if group.trainable]
        flats = [own.main.storage.flat for own in grads if own.has_main]
        if flats:
            torch._foreach_mul_(flats, scaling_factor)

    # ---- state --------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the sharded main weights under the names of the unwrapped model, as ``load_state_dict`` takes them."""
        return self.module.state_dict(*args, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> dict[str, Any]:
        """Return the sharded main weights under the names of the unwrapped model."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load full tensors or DTensors, under the names of the unwrapped model, into the main weights.

        Raises:
            RuntimeError: missing or extra keys (``strict``), or values of another shape, by name; a unit is unsharded.

        Ranks: all, if values are DTensors of another placement.
        """
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


def follow_fp8_settings(config: Any, ddp_config: DistributedDataParallelConfig, module: nn.Module) -> None:
    """Check that the model has the weights that the settings are for, and set their codecs.

    Args:
        config: the model's ``TransformerConfig``.

    Raises:
        ValueError: weights should be gathered in FP8, and the model was not built with such weights.
    """
    if not ddp_config.fp8_param_gather:
        return
    if not getattr(config, "fp8_param", False):
        raise ValueError(
            "fp8_param_gather=True must come with weights in FP8, got a TransformerConfig with fp8_param=False; set it, with fp8, "
            "or leave fp8_param_gather out"
        )
    if ddp_config.keep_fp8_transpose_cache:
        for parameter in module.parameters():
            codec: Any = getattr(parameter, "fsdp_codec", None)
            if isinstance(codec, Fp8Codec):
                parameter.fsdp_codec = replace(codec, keeps_derived=True)  # type: ignore[attr-defined]


def _transport_kind(
    ddp_config: DistributedDataParallelConfig, policy: MixedPrecisionPolicy, device: torch.device
) -> TransportKind:
    """Return the configured transport, or a transport that accumulates in fp32 if the config asks for that.

    Raises:
        NotImplementedError: gradients would be accumulated in a narrower dtype.
    """
    kind = ddp_config.transport_kind
    narrow = policy.resolve(torch.bfloat16, trainable=True).grad_comm != torch.float32
    if not (ddp_config.reduce_scatter_with_fp32_accumulation and narrow) or device.type == "cpu":
        return kind
    if kind not in ("auto", "peer_copy") or ddp_config.num_distributed_optimizer_instances > 1:
        raise NotImplementedError(
            "reduce_scatter_with_fp32_accumulation=True needs fsdp_transport='peer_copy' and one instance of the sharded state, or "
            f"megatron_fsdp_grad_comm_dtype=torch.float32, got {kind!r} and {ddp_config.num_distributed_optimizer_instances} instances: "
            "NCCL accumulates in the communication dtype"
        )
    return "peer_copy"


def _units(
    model: nn.Module, classes: Sequence[type[nn.Module] | str] | None, layers_per_unit: int, *, is_stage: bool
) -> list[list[nn.Module]]:
    """Return the modules of each unit, without the model itself, such that inner units come before outer ones.

    Args:
        layers_per_unit: modules of one class, neighbours in one module, that become one unit.
        is_stage: True if the model is a pipeline stage: then other stages may hold the classes that it lacks.

    Raises:
        ValueError: the model has no module of a class.
    """
    if classes is None:
        output_layer = getattr(model, "output_layer", None)
        # What such a layer holds belongs to its unit.
        inside = {
            id(inner)
            for layer in model.modules()
            if isinstance(layer, MultiTokenPredictionLayer)
            for inner in layer.modules()
            if inner is not layer
        }
        kinds = TransformerLayer | LanguageModelEmbedding | MultiTokenPredictionLayer
        found = [m for m in model.modules() if (isinstance(m, kinds) and id(m) not in inside) or m is output_layer]
    elif isinstance(classes, str):
        raise TypeError(
            f"fsdp_unit_modules must be a list of classes or class names, got {classes!r}; write [{classes!r}]"
        )
    else:
        given = [(_class_at(c) or c) if isinstance(c, str) and "." in c else c for c in classes]
        names = {c for c in given if isinstance(c, str)}
        types = tuple(c for c in given if not isinstance(c, str))
        found = [m for m in model.modules() if isinstance(m, types) or type(m).__name__ in names]
        absent = names - {type(m).__name__ for m in found}
        absent |= {c.__name__ for c in types if not any(isinstance(m, c) for m in found)}
        if absent and not is_stage:
            raise ValueError(
                f"fsdp_unit_modules must be classes of modules in the model, got {sorted(absent)}, which it lacks"
            )
    units = [[module] for module in found if module is not model]
    return list(reversed(units if layers_per_unit == 1 else _joined(units, model, layers_per_unit)))


def _joined(units: list[list[nn.Module]], model: nn.Module, most: int) -> list[list[nn.Module]]:
    """Join units of neighbours in one module that are of one class and hold no unit themselves."""
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    ids = {id(module) for (module,) in units}
    leaves = {id(module) for (module,) in units if sum(id(inner) in ids for inner in module.modules()) == 1}
    joined: list[list[nn.Module]] = []
    for (module,) in units:
        last = joined[-1] if joined else []
        if (
            0 < len(last) < most
            and {id(module), id(last[-1])} <= leaves
            and type(module) is type(last[-1])
            and parents[id(module)] is parents[id(last[-1])]
        ):
            last.append(module)
        else:
            joined.append([module])
    return joined


def _class_at(path: str) -> type[nn.Module] | None:
    """Return the class at an import path such as ``torch.nn.Linear``; None if there is none."""
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) and issubclass(found, nn.Module) else None


def _sizes_nbytes(units: Sequence[Sequence[nn.Module]], *, experts: bool) -> list[int]:
    """Return the bytes of the median and of the largest unit's weights, dense or experts'; [] without units."""
    sizes = sorted(
        sum(
            p.numel() * codec_of(p, "").rest_dtype(p.dtype).itemsize
            for module in unit
            for p in module.parameters()
            if is_expert(p) is experts
        )
        for unit in units
    )
    return sorted({sizes[len(sizes) // 2], sizes[-1]}) if sizes else []


def _budget_nbytes(budget: float | None, group: ProcessGroup, device: torch.device) -> int:
    """Return the memory budget in bytes, the same on all ranks. Ranks: all of the group, if it is a fraction."""
    if budget is None or budget >= 1:
        return int(budget or 0)
    if device.type != "cuda":
        raise ValueError(
            f"fsdp_memory_budget must be bytes where there is no device with memory of its own, got {budget} on {device.type}"
        )
    total = torch.tensor(torch.cuda.get_device_properties(device).total_memory, device=device)
    dist.all_reduce(total, op=dist.ReduceOp.MIN, group=group)  # ranks must make the same plan
    return int(budget * total.item())


def _tie_output_layer(model: nn.Module) -> None:
    """Unshard the embedding's weight for an output layer that uses it too.

    The model passes the weight to the output layer as an argument, sharded as it is then. So the layer's unit borrows
    the embedding's group, and a hook replaces the argument by the unsharded weight. If the output layer is not a unit,
    the model's own unit borrows the group, and the weight stays unsharded while the model runs.
    """
    output_layer = getattr(model, "output_layer", None)
    shares = getattr(model, "share_embeddings_and_output_weights", False) and hasattr(model, "embedding")
    if not shares or output_layer is None:
        return
    embedding = model.embedding.word_embeddings  # type: ignore[union-attr]
    group = group_of(embedding.weight)  # type: ignore[union-attr, arg-type]
    assert group is not None
    if not isinstance(output_layer, FsdpModule):
        assert isinstance(model, FsdpModule)
        if group not in model._fsdp_unit.groups:
            model._fsdp_unit.borrow(group)
        return
    output_layer._fsdp_unit.borrow(group)

    def with_unsharded_weight(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "weight": embedding.weight}  # type: ignore[union-attr]

    output_layer.register_forward_pre_hook(with_unsharded_weight, with_kwargs=True)
