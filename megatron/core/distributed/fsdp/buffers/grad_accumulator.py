"""Gradients from the reduce-scatter input to the main gradient, over the microbatches of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatBuffer, FlatStorage


class GradAccumulator:
    """Each microbatch's gradients, reduced over all ranks and added to the main gradient at once.

    Args:
        full_input: whole gradients, partial over all axes.
        placements: [axes] where main gradients rest.

    Attributes:
        storage: memory of sums that are not in the main gradient yet; None where every reduction adds to that.
        is_held: there are such sums, of earlier microbatches.
    """

    storage: FlatStorage | None = None

    def __init__(self, full_input: FlatBuffer, placements: Sequence[Placement]) -> None:
        self._placements = tuple(placements)
        self.is_held = False
        self.follow(full_input)

    def follow(self, full_input: FlatBuffer) -> None:
        """Reduce from ``full_input`` where it is now."""
        self._reduction = full_input.reduction(self._placements)

    def finish(self, out: torch.Tensor, *, scale: float, accumulate: bool, has_input: bool) -> None:
        """Write or add ``scale`` times the sum over all axes to ``out``, with the sums of earlier microbatches.

        Args:
            has_input: a backward wrote the reduce-scatter input; else the sums of earlier microbatches are all there is.

        Ranks: all of the mesh.
        """
        reduce, full = self._reduction
        reduce(out, full, scale=scale, accumulate=accumulate)

    def add_input(self, *, scale: float) -> None:
        """Add the reduce-scatter input to the sums in ``storage``. Ranks: all of the axes that it is reduced over."""
        raise NotImplementedError("every reduction adds to the main gradient: call finish()")

    def zero(self, index: int) -> None:
        """Drop what the sums hold of parameter ``index``."""

    @property
    def waits_to_be_freed(self) -> bool:
        """True if there is memory that holds no sum."""
        return self.storage is not None and self.storage.allocated and not self.is_held

    def drop(self) -> None:
        """Drop the sums and free their memory."""
        self.is_held = False
        if self.storage is not None:
            self.storage.free()


class WideGradAccumulator(GradAccumulator):
    """Sums over microbatches in a wider dtype than the main gradient's, which gets the sum of all.

    Where gradients travel in fp32 and rest in bf16, a sum of many microbatches in bf16 would lose what they differ by.

    Args:
        dtype: of the sums.
    """

    storage: FlatStorage

    def __init__(self, full_input: FlatBuffer, placements: Sequence[Placement], dtype: torch.dtype) -> None:
        super().__init__(full_input, placements)
        self._layout, self._axes = full_input.layout, full_input.axes
        numel = full_input.piece(self._placements).numel()
        self.storage = FlatStorage(numel, dtype, full_input.local.device)
        self.storage.free()

    def add_input(self, *, scale: float) -> None:
        """Add ``scale`` times the sum over all axes to the sum over microbatches. Ranks: all of the mesh."""
        super().finish(self.storage.flat, scale=scale, accumulate=self.is_held, has_input=True)
        self.is_held = True

    def finish(self, out: torch.Tensor, *, scale: float, accumulate: bool, has_input: bool) -> None:
        """As ``GradAccumulator.finish``. Ranks: all of the mesh."""
        if not self.is_held:
            super().finish(out, scale=scale, accumulate=accumulate, has_input=has_input)
            return
        if has_input:
            self.add_input(scale=scale)
        (out.add_ if accumulate else out.copy_)(self.storage.flat)
        self.is_held = False

    def zero(self, index: int) -> None:
        """Drop what the sums hold of parameter ``index``."""
        if self.is_held:
            FlatBuffer(self._layout, self._placements, self._axes, self.storage.flat).view(index).zero_()
