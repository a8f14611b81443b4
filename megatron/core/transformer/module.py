"""The base class of the framework's modules."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.transformer_config import TransformerConfig


class MegatronModule(torch.nn.Module):
    """A module with the model's configuration.

    Attributes:
        rng_tracker: the random number streams of this tensor-parallel rank; None where the model is not split.
    """

    rng_tracker: CudaRNGStatesTracker | None = None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    def set_is_first_microbatch(self) -> None:
        """Do nothing: modules cache nothing between microbatches. Megatron-Core's callers may call it."""

    def drawing_apart(self, x: torch.Tensor, draws: bool) -> AbstractContextManager[None]:
        """Return a context in which each tensor-parallel rank draws its own random numbers on the device of ``x``.

        Args:
            draws: whether anything is drawn; if not, or without a tracker, the context does nothing.
        """
        if not draws or self.rng_tracker is None:
            return nullcontext()
        return self.rng_tracker.fork(device=x.device)
