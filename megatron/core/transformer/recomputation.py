"""What is recomputed in backward, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def recomputes(config: TransformerConfig, module: str) -> bool:
    """Return whether "selective" recomputation means this one of ``recompute_modules``."""
    return config.recompute_granularity == "selective" and module in (config.recompute_modules or ("core_attn",))


def call_before_backward_of(output: torch.Tensor, function: Callable[[], None]) -> None:
    """Call ``function`` once, before the backward of what has computed ``output``, and let it go with all that it holds."""
    waiting = [function]

    def call(_: torch.Tensor) -> None:
        if waiting:
            with torch.no_grad():
                waiting.pop()()

    output.register_hook(call)
