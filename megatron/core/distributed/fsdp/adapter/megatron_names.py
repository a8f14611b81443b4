"""Methods of Megatron-Core's wrapper that callers of it use, in terms of the engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp.adapter.tensor_parallel_modes import (
    MODES_BY_CLASS,
    mark_tensor_parallel_modes,
    tensor_parallel_mode,
)
from megatron.core.distributed.fsdp.buffers.grad_sums import sum_grads
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.mesh.distributed_index import FSDPDistributedIndex
from megatron.core.distributed.fsdp.runtime.context import FsdpContext
from megatron.core.process_groups_config import ProcessGroupCollection


class MegatronNames(torch.nn.Module):
    """What Megatron-Core's wrapper has beside ``FullyShardedDataParallel``'s own methods."""

    # By these names code that subclasses or inspects Megatron-Core's wrapper asks for the rules of tensor_parallel_modes.py.
    _MODULE_TYPE_REGISTRY = MODES_BY_CLASS
    _detect_parallelism_type = staticmethod(tensor_parallel_mode)
    _annotate_tensor_parallelism = staticmethod(mark_tensor_parallel_modes)

    dist_index: FSDPDistributedIndex
    pg_collection: ProcessGroupCollection
    module: Any
    _unreduced: ExitStack | None = None

    def _contexts(self) -> list[FsdpContext]:
        raise NotImplementedError

    @property
    def parameter_groups(self) -> list[FsdpParameterGroup]:
        """The parameter groups of all units, in the order of ``modules()``."""
        raise NotImplementedError

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the next backwards reduce gradients. False, until it is set to True, is as ``no_sync``. Ranks: all, alike."""
        return self._unreduced is None

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool) -> None:
        if value is self.is_last_microbatch:
            return
        if value:
            assert self._unreduced is not None
            self._unreduced.close()
            self._unreduced = None
            return
        self._unreduced = ExitStack()
        for context in self._contexts():
            self._unreduced.enter_context(context.accumulate())

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Do nothing: backward outside of ``no_sync`` always reduces, and forward sees what the optimizer wrote."""
        yield

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Do nothing: see ``sync``; ``finish_grad_sync`` may be called either way."""

    def get_distributed_index(self) -> FSDPDistributedIndex:
        """Return the meshes and groups over which the model is sharded."""
        return self.dist_index

    def synchronize_gradient_reduce(self) -> None:
        """Make the current stream wait for the reductions that run; gradients that ``no_sync`` left stay unreduced."""
        sum_grads(self.parameter_groups, in_use=True)

    def stop_communication(self) -> None:
        """Make the current stream wait for all communication that runs. Ranks: all; does not block the host."""
        self.synchronize_gradient_reduce()
        for context in self._contexts():
            context.unsharder.wait_for_gathers()

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
                context.unsharder.wait_for_gathers()

    def reset_param_sync_dispatch_state(self) -> None:
        """Do nothing: whether a weight is gathered is asked where it is needed."""

    def free_overlap_buffers(self) -> None:
        """Do nothing: memory of gathered weights is planned once for all steps, and stays."""

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
        raise NotImplementedError

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
