"""Values on their way from the device to the host, so that the host can read them later without having waited."""

from __future__ import annotations

import torch
from torch import Tensor


class DelayedRead:
    """A copy of a tensor's values as they are now, in stream order; does not block the host.

    Ranks: each its own.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.current_stream(tensor.device).record_event()
        else:
            self._host = tensor.clone()

    def tensor(self) -> Tensor:
        """The values on the host, in the tensor's shape; blocks until they have arrived."""
        if self._done is not None:
            self._done.synchronize()
        return self._host

    def values(self) -> list[float]:
        """The same as a list [n]."""
        values: list[float] = self.tensor().flatten().tolist()
        return values
