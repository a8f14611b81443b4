"""Cross entropy over the vocabulary in fp32, without an fp32 copy of all logits.

Shapes: s sequence, b batch, v vocabulary, t tokens (s * b), c tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch

# Chunks of 2**24 logits: their fp32 copy is 64 MiB, large enough that launches do not matter, small beside the logits.
CHUNK_NUMEL = 2**24


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor, target: torch.Tensor, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Per-token loss [s, b] in fp32 of logits [s, b, v] in any float dtype and target [s, b] in [0, v).

    Raises:
        NotImplementedError: ``label_smoothing`` is not 0.

    Source: Megatron-Core's function of this name, which computes on ``logits.float()``; the chunks are ours.
    """
    if label_smoothing != 0.0:
        raise NotImplementedError(f"label_smoothing must be 0.0, got {label_smoothing}: smoothing is not served")
    loss: torch.Tensor = _CrossEntropy.apply(vocab_parallel_logits, target)  # type: ignore[no-untyped-call, unused-ignore]
    return loss


class _CrossEntropy(torch.autograd.Function):
    """Keeps the logits as they are; the softmax is computed again in backward, by one kernel per chunk."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        rows, labels = logits.reshape(-1, logits.shape[-1]), target.reshape(-1, 1)
        loss = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        start = 0
        for chunk in _chunks(rows):
            here = slice(start, start + chunk.shape[0])
            # One kernel that reads the logits in their dtype, where a sum of exponentials would be five.
            torch.gather(torch.log_softmax(chunk, dim=-1, dtype=torch.float32), 1, labels[here], out=loss[here])
            start = here.stop
        loss.neg_()
        ctx.save_for_backward(logits, target)
        return loss.view(target.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, target = ctx.saved_tensors
        rows, labels = logits.reshape(-1, logits.shape[-1]), target.reshape(-1, 1)
        grad_loss = grad_outputs[0].reshape(-1, 1)
        grad = torch.empty_like(rows)
        start = 0
        for chunk, out in zip(_chunks(rows), _chunks(grad), strict=True):
            here = slice(start, start + chunk.shape[0])
            softmax = torch.softmax(chunk, dim=-1, dtype=torch.float32)
            softmax.scatter_add_(1, labels[here], softmax.new_full((1, 1), -1.0).expand(chunk.shape[0], 1))
            torch.mul(softmax, grad_loss[here], out=out)
            start = here.stop
        return grad.view(logits.shape), None


def _chunks(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[t, v] as [c, v] views."""
    return torch.split(rows, max(1, CHUNK_NUMEL // rows.shape[-1]))
