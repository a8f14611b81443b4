"""Methods of Megatron-Core's wrapper that callers of it use, in terms of the engine."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.adapter.distributed_index import FSDPDistributedIndex
from megatron.core.distributed.fsdp.api.module import class_before, contexts_of, fsdp_modules
from megatron.core.distributed.fsdp.buffers.grad_sums import sum_grads
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.config.mixed_precision import MixedPrecisionPolicy
from megatron.core.distributed.fsdp.mesh.group_mesh import device_of
from megatron.core.distributed.fsdp.runtime.context import FsdpContext
from megatron.core.process_groups_config import ProcessGroupCollection


class MegatronNames(_BaseDataParallel):
    """Methods of Megatron-Core's wrapper in addition to ``FullyShardedDataParallel``'s own."""

    # Code that subclasses or inspects Megatron-Core's wrapper reads the tensor-parallel modes of layers by these names.
    _MODULE_TYPE_REGISTRY: ClassVar[dict[str, set[str]]] = {
        "column": {
            "ColumnParallelLinear",
            "DotProductAttention",  # its sinks, one per head
            "TEColumnParallelGroupedLinear",
            "TEColumnParallelLinear",
            "TEDotProductAttention",
            "TELayerNormColumnParallelLinear",
            "VocabParallelEmbedding",
        },
        "row": {"RowParallelLinear", "TERowParallelGroupedLinear", "TERowParallelLinear"},
        "replicated": {
            "FusedLayerNorm",
            "IdentityOp",
            "L2Norm",
            "LayerNorm",
            "RMSNorm",
            "TENorm",
            "TopKRouter",
            "WrappedTorchNorm",
        },
    }

    @staticmethod
    def _detect_parallelism_type(name: str, module: torch.nn.Module) -> str | None:
        """Return ``column``, ``row`` or ``replicated`` for a layer's parameter; None if neither class nor attributes determine it.

        The bias of a row-parallel layer is added once, after the all-reduce, so it is replicated.
        """
        kind = type(module).__name__
        if kind == "TELayerNormColumnParallelLinear":
            return "replicated" if name.endswith(("layer_norm_weight", "layer_norm_bias")) else "column"
        registry = MegatronNames._MODULE_TYPE_REGISTRY
        mode = next((mode for mode, names in registry.items() if kind in names), None)
        if mode is None and hasattr(module, "tensor_model_parallel"):
            dim: Any = getattr(module, "partition_dim", None)
            mode = {0: "column", 1: "row"}.get(dim) if module.tensor_model_parallel else "replicated"
        if mode is None and "Norm" in kind:
            mode = "replicated"
        if mode is None and kind == "TELinear":
            mode = {"column": "column", "row": "row"}.get(getattr(module, "parallel_mode", ""), "replicated")
        return "replicated" if mode == "row" and "bias" in name else mode

    @staticmethod
    def _annotate_tensor_parallelism(model: torch.nn.Module) -> None:
        """Set ``_tensor_parallel_mode`` on each parameter whose mode is known."""
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                mode = MegatronNames._detect_parallelism_type(name, module)
                if mode is not None:
                    parameter._tensor_parallel_mode = mode  # type: ignore[attr-defined]

    ddp_config: DistributedDataParallelConfig
    dist_index: FSDPDistributedIndex
    pg_collection: ProcessGroupCollection
    module: Any
    _unreduced: ExitStack | None = None

    def _contexts(self) -> list[FsdpContext]:
        return contexts_of(self.module)

    @property
    def parameter_groups(self) -> list[FsdpParameterGroup]:
        """The parameter groups of all units, in the order of ``modules()``."""
        return [group for module in fsdp_modules(self.module) for group in module._fsdp_groups]

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the next backwards reduce gradients. False, until it is set to True, is as ``no_sync``. Ranks: all, with the same arguments."""
        return self._unreduced is None

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        if value and self._unreduced is not None:
            self._unreduced.close()
            self._unreduced = None
        elif not value and self._unreduced is None:
            self._unreduced = ExitStack()
            self._unreduced.enter_context(self.no_sync())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: backward in this scope leaves them as they rest between microbatches. Ranks: all."""
        with ExitStack() as scopes:
            for context in self._contexts():
                scopes.enter_context(context.state.accumulate())
            yield

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Do nothing: backward outside of ``no_sync`` always reduces, and forward sees what the optimizer wrote."""
        yield

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Do nothing: see ``sync``; ``finish_grad_sync`` may be called either way."""

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The dtypes in ``ddp_config``."""
        config = self.ddp_config
        main_params, main_grads = config.megatron_fsdp_main_params_dtype, config.megatron_fsdp_main_grads_dtype
        return MixedPrecisionPolicy(main_params, main_grads, config.megatron_fsdp_grad_comm_dtype)

    @contextmanager
    def mixed_precision_context(self, mixed_precision_policy: MixedPrecisionPolicy) -> Iterator[None]:
        """Check that the policy can be used in this scope; see ``reset_mixed_precision_policy``."""
        self.reset_mixed_precision_policy(mixed_precision_policy)
        yield

    def reset_mixed_precision_policy(self, mixed_precision_policy: MixedPrecisionPolicy) -> None:
        """Check the policy; dtypes of main weights and main gradients do not change, as in Megatron-FSDP.

        Raises:
            NotImplementedError: the policy changes ``grad_comm_dtype``, whose buffers are allocated once.
        """
        now, asked = self.mp_policy.grad_comm_dtype, mixed_precision_policy.grad_comm_dtype
        if asked != now:
            raise NotImplementedError(
                f"grad_comm_dtype must remain {now}, got {asked}: its buffers are allocated when the model is sharded; set "
                "megatron_fsdp_grad_comm_dtype of the DistributedDataParallelConfig instead"
            )

    @property
    def data_parallel_sharding_strategy(self) -> str:
        """The strategy of the (inner) sharding axis."""
        return self.ddp_config.sharding_strategy

    @property
    def is_delay_grad_reduce(self) -> bool:
        """Whether gradients are reduced only in a step's last microbatch."""
        return self.data_parallel_sharding_strategy in ("no_shard", "optim")

    @property
    def bucket_size(self) -> int | None:
        """``ddp_config.bucket_size``; it has no effect, since gradients are reduced unit by unit."""
        size: int | None = getattr(self.ddp_config, "bucket_size", None)
        return size

    @property
    def device(self) -> torch.device:
        """The device of the shards."""
        return device_of(self.dist_index.get_root_mesh())

    @property
    def fsdp_unit_modules(self) -> list[type[torch.nn.Module]]:
        """The original classes of the modules that are units in the model."""
        units = [type(module) for module in fsdp_modules(self.module) if module is not self.module]
        return [class_before(kind) for kind in dict.fromkeys(units)]

    @property
    def tp_group(self) -> ProcessGroup | None:
        """The tensor-parallel process group; None without tensor parallelism."""
        return self.pg_collection.tp

    @property
    def megatron_fsdp_dist_index(self) -> FSDPDistributedIndex:
        """The meshes and groups; with experts, ``expt_device_mesh`` is set even if it is the mesh of all parameters."""
        index = self.dist_index
        if index.expt_device_mesh is not None or not getattr(self.config, "num_moe_experts", None):
            return index
        return replace(
            index,
            expt_device_mesh=index.device_mesh,
            hybrid_fsdp_expt_group=index.hybrid_fsdp_group,
            expt_fsdp_group_ag=index.fsdp_group_ag,
        )

    def all_gather_and_wait_parameters_ready(
        self,
        params: Iterable[torch.nn.Parameter],
        prefetch: bool = True,
        prefetch_order: Any = None,
        wait_bucket_ready: bool = True,
        bwd: bool = False,
    ) -> None:
        """Unshard the units that own these parameters, until their next forward or backward ends, or ``reshard``.

        Args:
            prefetch, prefetch_order, bwd: accepted; the plan decides the prefetches.
            wait_bucket_ready: make the current stream wait for the weights.

        Ranks: all, with the same parameters in the same order.
        """
        groups = dict.fromkeys(group for parameter in params if (group := group_of(parameter)) is not None)
        for context in self._contexts():
            own = [context.registry.owner(group) for group in groups if context.registry.holds(group)]
            for unit in dict.fromkeys(own):
                context.unshard(unit.groups, waits=wait_bucket_ready)

    def attach_grad_to_optimizer_state(self) -> None:
        """Do nothing: ``param.grad`` is a view of the main gradient."""

    def refresh_cache(self) -> None:
        """Make the next forward use weights that were written in place."""
        self.install_optimized_model_weights()

    def set_symmetric_ar(self, set_to: str | None = None) -> None:
        """Accept None and do nothing: layers all-reduce with the tensor-parallel process group.

        Raises:
            NotImplementedError: ``set_to`` is not None.
        """
        if set_to is not None:
            raise NotImplementedError(
                f"set_symmetric_ar takes None, got {set_to!r}: layers all-reduce with the tensor-parallel process group"
            )

    def get_distributed_index(self) -> FSDPDistributedIndex:
        """Return the meshes and groups over which the model is sharded."""
        return self.dist_index

    def synchronize_gradient_reduce(self) -> None:
        """Make the current stream wait for the reductions that run; gradients that ``no_sync`` left stay unreduced."""
        sum_grads(self.parameter_groups, in_use=True)

    def synchronize_param_gather(self) -> None:
        """Make the current stream wait for all gathers that run."""
        for context in self._contexts():
            context.unsharder.wait_for_gathers()

    def stop_communication(self) -> None:
        """Make the current stream wait for all communication that runs. Ranks: all; does not block the host."""
        self.synchronize_gradient_reduce()
        self.synchronize_param_gather()

    def install_optimized_model_weights(self) -> None:
        """Let the next forward see the main weights as they are now, whoever wrote them. Ranks: all."""
        for context in self._contexts():
            context.weights_changed()

    def enable_forward_pre_hook(self) -> None:
        """Do nothing: every forward waits for the weights that it computes with, by hooks that stay."""

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """With ``param_sync``, make the current stream wait for all updates and gathers of weights; the hooks stay. Ranks: all."""
        if param_sync:
            for context in self._contexts():
                context.finish_updates()
            self.synchronize_param_gather()

    def reset_param_sync_dispatch_state(self) -> None:
        """Do nothing: whether a weight is gathered is asked where it is needed."""

    def free_overlap_buffers(self) -> None:
        """Do nothing: memory of gathered weights is planned once and kept for all steps."""

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Clear all gradients and free their memory, for work between steps; the next backward allocates it again.

        Args:
            synchronize: wait for the device first.
            empty_cache: give what is free back to the device.
        """
        on_cuda = torch.cuda.is_available()
        if synchronize and on_cuda:
            torch.cuda.synchronize()
        self.zero_grad_buffer()
        if empty_cache and on_cuda:
            torch.cuda.empty_cache()

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Do nothing: gradients get their memory from the first reduction of a step."""

    def zero_grad_buffer(self) -> None:
        """Clear all gradients and free their memory."""
        for group in self.parameter_groups:
            if group.trainable:
                group.grads.clear()

    def sync_rng_states_across_tp_group(self) -> None:
        """Let the random generators (Python's, NumPy's, torch's) go on as the first tensor-parallel rank's do.

        Streams of ``get_cuda_rng_tracker`` stay: tensor-parallel ranks drop out different features by them.

        Ranks: all of the tensor-parallel group; blocks the host.
        """
        group = self.pg_collection.tp
        if group is None or group.size() == 1:
            return
        device = torch.cuda if torch.cuda.is_available() else torch
        states: list[Any] = [(random.getstate(), np.random.get_state(), torch.get_rng_state(), device.get_rng_state())]
        dist.broadcast_object_list(states, src=dist.get_process_group_ranks(group)[0], group=group)
        random.setstate(states[0][0])
        np.random.set_state(states[0][1])
        torch.set_rng_state(states[0][2])
        device.set_rng_state(states[0][3])

    @property
    def param_and_grad_buffer(self) -> ParamAndGradBuffer:
        """The model's parameter groups, as Megatron-Core's callers look at them."""
        return ParamAndGradBuffer(self)

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Describe the main weights for ``dist_checkpointing``, under the names of the unwrapped model."""
        described: dict[str, Any] = self.module.sharded_state_dict(prefix, *args, **kwargs)
        return described


class ParamAndGradBuffer:
    """The parameter groups of a wrapped model; buffers are those of the groups."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def parameter_groups(self) -> list[FsdpParameterGroup]:
        """The parameter groups of all units."""
        groups: list[FsdpParameterGroup] = self._model.parameter_groups
        return groups

    def manual_buffer_registration(self) -> None:
        """Do nothing: symmetric memory is registered once, when it is allocated."""

    def update_main_grads(self) -> None:
        """Do nothing: ``param.grad`` is a view of the main gradient."""

    def copy_main_weights_to_model_weights(self) -> None:
        """Let the next forward see the main weights as they are now."""
        self._model.install_optimized_model_weights()

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiply all main gradients."""
        self._model.scale_gradients(scaling_factor)

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self._model.zero_grad_buffer()
