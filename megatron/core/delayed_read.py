"""Asynchronous copies of device values that the host reads later."""

from __future__ import annotations

import torch
from torch import Tensor


class DelayedRead:
    """A copy of a tensor's current values, in stream order, on its way to the host; making it does not block the host.

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
        """Return the values on the host, in the tensor's shape; block until they have arrived."""
        if self._done is not None:
            self._done.synchronize()
        return self._host

    def values(self) -> list[float]:
        """Return the values as a list [n]; block until they have arrived."""
        values: list[float] = self.tensor().flatten().tolist()
        return values
