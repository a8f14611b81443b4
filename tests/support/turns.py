"""A place in a model at which two passes take turns."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.transformer.moe.alternating_passes import AlternatingPasses


class Turn(torch.autograd.Function):
    """The identity, which gives the other pass the turn, in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passes: AlternatingPasses) -> torch.Tensor:
        ctx.passes = passes
        passes.give_turn()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.passes.give_turn()
        return grads[0].clone(), None
