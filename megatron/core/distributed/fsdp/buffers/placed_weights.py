"""Weights of a group whose parameters are DTensors over tensor-parallel ranks (``mesh/model_parallel.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.fsdp.buffers.weights import GroupWeights
from megatron.core.distributed.fsdp.mesh.model_parallel import PlacedParameter, local_gradient


class PlacedWeights(GroupWeights):
    """As ``GroupWeights``, of the local tensors; modules multiply DTensors around views of the full weight.

    Args:
        placed: [T] how each parameter is split over tensor-parallel ranks.
    """

    shares_counter = False  # each DTensor counts its own versions

    def __init__(
        self, originals: Sequence[torch.Tensor], *, placed: Sequence[PlacedParameter], **settings: Any
    ) -> None:
        self._placed = placed
        super().__init__(originals, **settings)

    gradient_of = staticmethod(local_gradient)

    def wrap(self, index: int) -> torch.Tensor:
        return self._placed[index].over(self.full.view(index))

    def set_parameters(self, sharded: Sequence[nn.Parameter], unsharded: Sequence[nn.Parameter]) -> None:
        super().set_parameters(sharded, unsharded)
        # Local tensors, which modules may have taken out, share one counter.
        self._fenced = (*self._fenced, unsharded[0]._local_tensor)  # type: ignore[attr-defined]

    def _rebind(self, index: int, parameter: torch.Tensor) -> None:
        parameter._local_tensor.data = self.full.view(index)  # type: ignore[attr-defined]
