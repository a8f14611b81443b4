"""The base class of the framework's modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class MegatronModule(torch.nn.Module):
    """A module that knows the model's configuration."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    def set_is_first_microbatch(self) -> None:
        """Nothing is cached between microbatches here; kept for callers that announce the first one."""
