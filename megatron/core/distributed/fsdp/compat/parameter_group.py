"""Megatron-FSDP's names of a parameter group: its buffers as ``DBuffer``, and what may be done with it outside of forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatBuffer
from megatron.core.distributed.fsdp.buffers.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.compat.dbuffer import DBuffer


@dataclass(frozen=True, eq=False, repr=False)
class FsdpParameter:
    """A parameter of a group: its names within the unit, and what modules hold at rest and in use."""

    fqns: tuple[str, ...]
    sharded: nn.Parameter
    unsharded: nn.Parameter

    def __repr__(self) -> str:
        return f"FsdpParameter{self.fqns}"  # values are not there between uses


class MegatronParameterGroup(FsdpParameterGroup):
    """A parameter group with Megatron-FSDP's names."""

    @property
    def main_weight(self) -> DBuffer:
        """What the optimizer and checkpoints see."""
        return DBuffer.over(self.weights.main, self.mesh)

    @property
    def model_weight(self) -> DBuffer:
        """What is gathered."""
        return DBuffer.over(self.weights.model, self.mesh)

    @property
    def main_grad(self) -> DBuffer | None:
        """The main gradient; None where there is none now."""
        if not self.trainable or not self.grads.has_main:
            return None
        return DBuffer.over(self.grads.main.buffer, self.mesh)

    @property
    def fsdp_parameters(self) -> tuple[FsdpParameter, ...]:
        """The parameters, as modules hold them at rest and in use."""
        return tuple(
            FsdpParameter((parameter.name, *parameter.tied_names), *pair)
            for parameter, *pair in zip(self.parameters, self.sharded, self.unsharded, strict=True)
        )

    @property
    def requires_grad(self) -> bool:
        """Whether some of its parameters are trained now."""
        return self.trains

    @property
    def mesh(self) -> DeviceMesh:
        """The data-parallel mesh."""
        return self.group_mesh.mesh

    @property
    def dtype(self) -> torch.dtype:
        """In which modules compute."""
        return self.dtypes.compute

    def sync_model_weight_from_main_weight(self) -> None:
        """Bring the model weight up to date with the main weight; forward does it by itself. Ranks: all of the mesh."""
        with _nvtx_range(f"MFSDP {self.prefix.rstrip('.') or '<root>'} sync_model_weight_from_main_weight"):
            weights = self.weights
            weights.sync()
            if weights.needs_gather and not weights.syncs_jointly and weights.codec.casts:
                weights.freshness.note_model_written()  # the next forward skips it

    def unshard_parameters(self) -> None:
        """Gather the weights and point the modules at them, until their next pass ends or ``reshard_parameters`` is called. Ranks: all."""
        self._running_in().unshard([self])

    def reshard_parameters(self) -> None:
        """Put the sharded parameters back and free the gathered weights, unless a pass uses them. Ranks: all."""
        self._running_in().reshard([self])

    def release_unsharded_storage(self) -> None:
        """Free the gathered weights. The same as ``reshard_parameters``, which already frees them. Ranks: all."""
        self.reshard_parameters()

    def reduce_partial_gradients(self, partial_grad: None = None, is_last_microbatch: bool = True) -> None:
        """Reduce the pending gradients of all groups of the context into ``param.grad``.

        Args:
            partial_grad: must be None. The group keeps its pending sums.
            is_last_microbatch: if False, do nothing.

        Ranks: all, with the same arguments.
        """
        if partial_grad is not None:
            raise NotImplementedError(
                f"partial_grad must be None, got a {type(partial_grad).__name__}: sums are kept by the group"
            )
        if is_last_microbatch:
            self._running_in().reduce_partial()

    @property
    def _unsharded_model_weight(self) -> DBuffer:
        # Megatron-FSDP's tests read it: the full weights while they are gathered, else a buffer without memory.
        full = DBuffer.over(self.weights.full, self.mesh)
        if self.weights.is_unsharded or not self.weights.needs_gather:
            return full
        freed = DBuffer.over(
            FlatBuffer(full.layout, full.placements, full.axes, torch.empty_like(full.local)), self.mesh
        )
        freed.release_storage()
        return freed

    def _running_in(self) -> Any:
        context = None if self.context is None else self.context()
        if context is None:
            raise RuntimeError(
                f"the units of a model must have a context before {self} is unsharded, got a group without one; run the model once, shard "
                "it in a fully_shard_context, or call unshard() of the module"
            )
        return context


def sync_model_weights_from_main_weights(parameters: Iterable[torch.Tensor]) -> None:
    """Bring the model weights of these parameters' groups up to date; forward does it by itself. Ranks: all of the meshes."""
    found = dict.fromkeys(group_of(parameter) for parameter in parameters)
    for group in found:
        if isinstance(group, MegatronParameterGroup):
            group.sync_model_weight_from_main_weight()


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    """Mark a scope for profilers with ``torch.cuda.nvtx``, if this build of torch has NVTX."""
    try:
        torch.cuda.nvtx.range_push(name)
    except RuntimeError:  # a build without NVTX
        yield
        return
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
