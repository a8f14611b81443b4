"""Memory of flat buffers, which is freed and allocated again under its views."""

from __future__ import annotations

import torch


class FlatStorage:
    """A flat tensor in memory of its own, which can be freed and taken again under its views, or in an arena.

    ``flat`` [numel] is the tensor; views of it stay valid as objects while the memory is free, but must not be read.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel, self.dtype, self.device = numel, dtype, device
        self.nbytes = numel * dtype.itemsize  # of the whole buffer, in use or not
        self.move(None)

    def move(self, flat: torch.Tensor | None) -> None:
        """Use the given range of an arena, or, if None, new memory of its own."""
        self.in_arena = flat is not None
        self.flat = torch.empty(self.numel, dtype=self.dtype, device=self.device) if flat is None else flat
        self.allocated = True

    def allocate(self) -> None:
        """Allocate the memory if it was freed; its content is undefined then."""
        if not self.allocated:
            self.flat.untyped_storage().resize_(self.nbytes)
            self.allocated = True

    def free(self) -> None:
        """Free memory of its own; a range of an arena stays."""
        if self.allocated and not self.in_arena:
            self.flat.untyped_storage().resize_(0)
            self.allocated = False
