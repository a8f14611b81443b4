"""Gradients under hybrid sharding (HSDP): reduced over the inner axis each microbatch, over the outer axis once a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatBuffer, FlatStorage
from megatron.core.distributed.fsdp.buffers.grad_accumulator import GradAccumulator


class HsdpGradAccumulator(GradAccumulator):
    """Sums over the inner axis that still are to be reduced over the outer one. [Note: two reductions].

    Sums of several microbatches have memory of their own; that of a single one
    stays in this rank's own segment of the reduce-scatter input, which is also what travels over the outer axis.

    Args:
        full_input: whole gradients, partial over both axes.
        placements: [2] where main gradients rest.
        dtype: of the sums.
    """

    storage: FlatStorage

    def __init__(self, full_input: FlatBuffer, placements: Sequence[Placement], dtype: torch.dtype) -> None:
        self._after_inner = (Partial(), *placements[1:])
        super().__init__(full_input, placements)
        self.storage = FlatStorage(self._segment.numel(), dtype, full_input.local.device)
        self.storage.free()

    def follow(self, full_input: FlatBuffer) -> None:
        """Reduce from ``full_input`` where it is now."""
        self._inner = full_input.reduction(self._after_inner)
        self._segment = full_input.piece(self._after_inner)
        self._layout, self._axes = full_input.layout, full_input.axes
        self._outer = self._buffer(self._segment).reduction(self._placements)

    def _buffer(self, flat: torch.Tensor) -> FlatBuffer:
        """Return the buffer over ``flat``, which holds what the inner axis leaves to this rank."""
        return FlatBuffer(self._layout, self._after_inner, self._axes, flat)

    def add_input(self, *, scale: float) -> None:
        """Reduce the ranks' gradients over the inner axis and add them, not scaled yet, to the sum. Ranks: all of the inner axis."""
        reduce, full = self._inner
        reduce(self.storage.flat, full, accumulate=self.is_held)
        self.is_held = True

    def finish(self, out: torch.Tensor, *, scale: float, accumulate: bool, has_input: bool) -> None:
        """Write or add ``scale`` times the sum over both axes to ``out``, and empty the accumulator.

        Args:
            has_input: a backward wrote the reduce-scatter input; else the sum of earlier microbatches is all there is.

        Ranks: all of both axes.
        """
        if has_input and not self.is_held:
            reduce, full = self._inner
            reduce(self._segment, full)
        else:
            if has_input:
                self.add_input(scale=scale)
            self._segment.copy_(self.storage.flat)
        self.is_held = False
        reduce, segment = self._outer
        reduce(out, segment, scale=scale, accumulate=accumulate)

    def zero(self, index: int) -> None:
        """Drop what the sum holds of parameter ``index``."""
        if self.is_held:
            self._buffer(self.storage.flat).view(index).zero_()
