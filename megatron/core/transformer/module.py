"""The base class of the framework's modules."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig


class MegatronModule(torch.nn.Module):
    """A module that knows the model's configuration.

    Attributes:
        rng_tracker: the model's random streams of this tensor-parallel rank; None where nothing is split.
    """

    rng_tracker: CudaRNGStatesTracker | None = None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    def set_is_first_microbatch(self) -> None:
        """Nothing is cached between microbatches here; kept for callers that announce the first one."""

    def drawing_apart(self, x: torch.Tensor, draws: bool) -> AbstractContextManager[None]:
        """A scope in which each tensor-parallel rank draws its own random numbers on the device of ``x``.

        Args:
            draws: False, or without a tracker: the scope does nothing.
        """
        if not draws or self.rng_tracker is None:
            return nullcontext()
        return self.rng_tracker.fork(device=x.device)
