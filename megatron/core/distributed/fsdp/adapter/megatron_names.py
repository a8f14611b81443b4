"""Methods of Megatron-Core's wrapper that callers of it use, in terms of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron.core.distributed.fsdp.buffers.grad_sums import sum_grads
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.mesh.distributed_index import FSDPDistributedIndex
from megatron.core.distributed.fsdp.runtime.context import FsdpContext


class MegatronNames(torch.nn.Module):
    """What Megatron-Core's wrapper has beside ``FullyShardedDataParallel``'s own methods."""

    dist_index: FSDPDistributedIndex
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
