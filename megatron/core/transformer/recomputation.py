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


def repeats_a_forward() -> bool:
    """Return whether backward computes again what a forward with gradients has computed, and counted, before.

    Reentrant checkpoints run the first forward without gradients, in which nothing counts: the one in backward is the first that does.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    return type(torch._C._current_autograd_node()).__name__ != "CheckpointFunctionBackward"


def call_before_backward_of(output: torch.Tensor, function: Callable[[], None]) -> None:
    """Call ``function`` once, before the backward of what has computed ``output``, and let it go with all that it holds."""
    waiting = [function]

    def call(_: torch.Tensor) -> None:
        if waiting:
            with torch.no_grad():
                waiting.pop()()

    output.register_hook(call)
