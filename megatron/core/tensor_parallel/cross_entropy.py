"""Cross entropy over the vocabulary in fp32, without an fp32 copy of all logits.

With the vocabulary split over ranks, each reduces its own part of the logits to two numbers a token (the logarithm of
its sum of exponentials, and the target's logit where it has it); two small collectives make those of the whole.

Shapes: s sequence, b batch, v vocabulary (this rank's part of it), t tokens (s * b), c tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import group_size

# Chunks of 2**24 logits: their fp32 copy is 64 MiB, large enough that launches do not matter, small beside the logits.
CHUNK_NUMEL = 2**24


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Per-token loss [s, b] in fp32 of logits [s, b, v] in any float dtype and target [s, b] in the whole vocabulary.

    Args:
        tp_group: the ranks whose logits are parts of the vocabulary, in rank order; None: these are all.

    Raises:
        NotImplementedError: ``label_smoothing`` is not 0.

    Ranks: all of ``tp_group``, with the same targets, in forward; each gets the same losses.
    Source: Megatron-Core's function of this name, which computes on ``logits.float()``; the chunks are ours.
    """
    if label_smoothing != 0.0:
        raise NotImplementedError(f"label_smoothing must be 0.0, got {label_smoothing}: smoothing is not served")
    loss: torch.Tensor
    if group_size(tp_group) == 1:
        loss = _CrossEntropy.apply(vocab_parallel_logits, target)  # type: ignore[no-untyped-call, unused-ignore]
    else:
        loss = _SplitCrossEntropy.apply(vocab_parallel_logits, target, tp_group)  # type: ignore[no-untyped-call, unused-ignore]
    return loss


def own_labels(logits: torch.Tensor, target: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Targets [...] counted from the first of this rank's logits [..., v]; out of [0, v) where another rank has them."""
    return target - group.rank() * logits.shape[-1]


def whole_vocabulary(
    log_sums: torch.Tensor, predicted: torch.Tensor, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logarithm [t] of the sum of all ranks' exponentials and the target's logit [t], of this rank's, in fp32.

    Args:
        predicted: [t] the target's logit, 0 where another rank has it.

    Ranks: all of the group.
    """
    most = log_sums.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    sums = torch.stack(((log_sums - most).exp_(), predicted))
    dist.all_reduce(sums, group=group)
    return most + sums[0].log(), sums[1]


class _SplitCrossEntropy(torch.autograd.Function):
    """Keeps this rank's logits as they are, and the logarithm of the sum of exponentials of each token."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        rows, labels = logits.reshape(-1, logits.shape[-1]), own_labels(logits, target, group).reshape(-1, 1)
        log_sums = torch.empty(labels.shape[0], dtype=torch.float32, device=logits.device)
        predicted = torch.empty_like(log_sums)
        start = 0
        for chunk in _chunks(rows):
            here = slice(start, start + chunk.shape[0])
            own, is_own = _clamped(labels[here], rows.shape[-1])
            torch.logsumexp(chunk.float(), dim=-1, out=log_sums[here])
            predicted[here] = torch.where(is_own, chunk.gather(1, own).float(), 0.0).squeeze(1)
            start = here.stop
        log_sum, predicted = whole_vocabulary(log_sums, predicted, group)
        ctx.save_for_backward(logits, labels, log_sum)
        return (log_sum - predicted).view(target.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, labels, log_sum = ctx.saved_tensors
        rows, grad_loss = logits.reshape(-1, logits.shape[-1]), grad_outputs[0].reshape(-1, 1)
        grad = torch.empty_like(rows)
        start = 0
        for chunk, out in zip(_chunks(rows), _chunks(grad), strict=True):
            here = slice(start, start + chunk.shape[0])
            own, is_own = _clamped(labels[here], rows.shape[-1])
            softmax = (chunk - log_sum[here].unsqueeze(1)).exp_()  # fp32, whatever the logits are
            softmax.scatter_add_(1, own, -is_own.float())
            torch.mul(softmax, grad_loss[here], out=out)
            start = here.stop
        return grad.view(logits.shape), None, None


def _clamped(labels: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels in [0, v), and which of them were."""
    own = labels.clamp(0, vocab_size - 1)
    return own, own == labels


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
