"""Gradients of hybrid sharding on their way over two axes: the inner one each microbatch, the outer one once a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.buffers.dbuffer import DBuffer
from megatron.core.distributed.fsdp.buffers.storage import FlatStorage


class HsdpGradAccumulator:
    """Sums over the inner axis that wait for the outer one. [Note: two reductions] in DESIGN.md.

    Over several microbatches they are kept in memory of their own, in the dtype of main gradients; that of a single one
    stays in this rank's own segment of the staging buffer, which is also what travels over the outer axis.

    Args:
        staging: whole gradients, partial over both axes.
        placements: [2] where main gradients rest.
        dtype: of main gradients.

    Attributes:
        is_held: sums of earlier microbatches are kept.
    """

    def __init__(self, staging: DBuffer, placements: Sequence[Placement], dtype: torch.dtype) -> None:
        self._after_inner = (Partial(), *placements[1:])
        self._placements = tuple(placements)
        self.is_held = False
        self.follow(staging)
        self.storage = FlatStorage(self._segment.numel(), dtype, staging.local.device)
        self.storage.free()

    def follow(self, staging: DBuffer) -> None:
        """Afterwards reductions read ``staging`` where it is now."""
        self._inner = staging.reduction(self._after_inner)
        self._segment = staging.piece(self._after_inner)
        segment = DBuffer(
            staging.layout,
            self._after_inner,
            staging.axes,
            dtype=staging.dtype,
            device=self._segment.device,
            local=self._segment,
        )
        self._outer = segment.reduction(self._placements)

    @property
    def waits_to_be_freed(self) -> bool:
        """True if there is memory that nothing is kept in."""
        return self.storage.allocated and not self.is_held

    def keep(self) -> None:
        """Afterwards what is kept has grown by the ranks' staged gradients. Ranks: all of the inner axis."""
        reduce, full = self._inner
        reduce(self.storage.flat, full, accumulate=self.is_held)
        self.is_held = True

    def finish(self, out: torch.Tensor, *, scale: float, accumulate: bool, is_staged: bool) -> None:
        """Afterwards ``out`` holds, or has grown by, ``scale`` times the sum over both axes, and nothing is kept.

        Args:
            is_staged: this microbatch has staged gradients; else what is kept is all there is.

        Ranks: all of both axes.
        """
        if is_staged and not self.is_held:
            reduce, full = self._inner
            reduce(self._segment, full)
        else:
            if is_staged:
                self.keep()
            self._segment.copy_(self.storage.flat)
        self.is_held = False
        reduce, segment = self._outer
        reduce(out, segment, scale=scale, accumulate=accumulate)

    def drop(self) -> None:
        """Afterwards nothing is kept."""
        self.is_held = False
        self.storage.free()
