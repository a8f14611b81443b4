"""Fused softmax of scaled and masked scores.

Shapes: b batch, n query heads, s sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.core.jit import Fusible
from megatron.core.transformer.enums import AttnMaskType

MASKED = -10000.0  # Megatron-Core's value: a row that is masked everywhere becomes uniform, not NaN.


def scaled_masked_softmax(
    scores: torch.Tensor, mask: torch.Tensor, scale: float, *, compiled: bool = True
) -> torch.Tensor:
    """Compute softmax(scores * scale) of [b, n, s, s] in fp32, in the dtype of the scores; mask (bool): True is hidden.

    Backward needs the probabilities alone. Source: Megatron-Core's FusedScaleMaskSoftmax.
    """
    probs: torch.Tensor = _Softmax.apply(scores, mask, scale, compiled)  # type: ignore[no-untyped-call, unused-ignore]
    return probs


@Fusible
def _softmax(scores: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    return (scores.float() * scale).masked_fill(mask, MASKED).softmax(dim=-1).to(scores.dtype)


@Fusible
def _softmax_backward(grad: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    wide = probs.float()
    product = grad.float() * wide
    grad_scores = (product - wide * product.sum(-1, keepdim=True)) * scale
    return grad_scores.masked_fill(mask, 0.0).to(probs.dtype)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, mask: torch.Tensor, scale: float, compiled: bool) -> torch.Tensor:
        probs: torch.Tensor = _softmax(compiled, scores, mask, scale)
        ctx.save_for_backward(probs, mask)
        ctx.scale, ctx.compiled = scale, compiled
        return probs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probs, mask = ctx.saved_tensors
        return _softmax_backward(ctx.compiled, grad_outputs[0], probs, mask, ctx.scale), None, None, None


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Softmax of scaled and masked scores, for callers' attention.

    Args:
        input_in_fp16, input_in_bf16: what scores may be in; results are in the dtype of the scores.
        attn_mask_type: with ``causal``, and no mask, keys behind a query are hidden.
        scaled_masked_softmax_fusion: scores in fp16 or bf16 are computed as one function, where the host may compile it.
        mask_func: (scores, mask) -> scores; the fused function hides with ``MASKED``.
        softmax_in_fp32: compute in fp32.
        scale: factor of the scores; None: 1.
        window_size: (keys before a query, keys behind it) that it sees, -1: all, where there is no mask; None: no window.

    Raises:
        ValueError: scores are scaled, and not computed in fp32; or of both half dtypes.

    Source: Megatron-Core's class of this name.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None,
        softmax_in_fp32: bool,
        scale: float | None,
        window_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        if (scale is not None and not softmax_in_fp32) or (input_in_fp16 and input_in_bf16):
            raise ValueError(
                "softmax_in_fp32 must be True with a scale, and scores must be of one half dtype, got "
                f"softmax_in_fp32={softmax_in_fp32}, scale={scale}, {input_in_fp16=} and {input_in_bf16=}"
            )
        self.attn_mask_type, self.mask_func, self.window_size = attn_mask_type, mask_func, window_size
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.fuses, self.softmax_in_fp32, self.scale = scaled_masked_softmax_fusion, softmax_in_fp32, scale

    def forward(
        self, input: torch.Tensor, mask: torch.Tensor | None, softmax_offset: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute softmax over the keys: [b, n, s, keys] -> the same.

        Args:
            mask: bool, broadcast to the scores; True is hidden.
            softmax_offset: [n] logit of a key without value that each query sees, too.
        """
        mask = self._default_mask(input) if mask is None else mask
        if self.fuses and self.input_in_float16 and mask is not None and softmax_offset is None:
            return scaled_masked_softmax(input, mask, self.scale or 1.0)
        scores = input.float() if self.input_in_float16 and self.softmax_in_fp32 else input
        if self.scale is not None:
            scores = scores * self.scale
        if mask is not None and self.mask_func is not None:
            scores = self.mask_func(scores, mask)
        if softmax_offset is None:
            return scores.softmax(dim=-1).to(input.dtype)
        offset = softmax_offset.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat((scores, offset), dim=-1).softmax(dim=-1)[..., :-1].to(input.dtype)

    def _default_mask(self, scores: torch.Tensor) -> torch.Tensor | None:
        """Return the mask [s, keys] of the type and the window; None: all is seen."""
        queries, keys = scores.shape[-2:]
        behind = torch.arange(keys, device=scores.device) - torch.arange(queries, device=scores.device).unsqueeze(1)
        behind = behind - (keys - queries)
        before, after = self.window_size or (-1, -1)
        if self.attn_mask_type == AttnMaskType.causal:
            after = 0
        if queries == 1 or (before < 0 and after < 0):
            return None
        return (behind > after if after >= 0 else behind > keys) | (behind < -before if before >= 0 else behind < -keys)
