"""Cross entropy over the vocabulary in fp32, without an fp32 copy of all logits.

Where the vocabulary is split over ranks, each reduces its part of the logits to three numbers a token (the largest logit, the
sum of exponentials, and the target's logit if it has it); two small collectives combine them.

Shapes: s sequence, b batch, v vocabulary (this rank's part of it), t tokens (s * b), c tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import DEFAULT_GROUP, group_or_default, group_size

# Chunks of 2**24 logits: their fp32 copy is 64 MiB, large enough that launches do not matter, small beside the logits.
CHUNK_NUMEL = 2**24


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    tp_group: ProcessGroup | None = DEFAULT_GROUP,
) -> torch.Tensor:
    """Compute the loss [s, b], fp32, of each token.

    Args:
        vocab_parallel_logits: [s, b, v] of any float dtype.
        target: [s, b] token ids of the whole vocabulary.
        tp_group: the ranks whose logits are parts of the vocabulary, in rank order; None: the logits are all; left out, the
            tensor-parallel group of ``parallel_state``.

    Raises:
        NotImplementedError: ``label_smoothing`` is not 0.

    Ranks: all of ``tp_group``, with the same targets, in forward; each gets the same losses.
    Source: Megatron-Core's function of this name, which computes on ``logits.float()``; the chunks are ours.
    """
    if label_smoothing != 0.0:
        raise NotImplementedError(f"label_smoothing must be 0.0, got {label_smoothing}: smoothing is not served")
    tp_group = group_or_default(tp_group, "tp")
    loss: torch.Tensor
    if group_size(tp_group) == 1:
        loss = _CrossEntropy.apply(vocab_parallel_logits, target)  # type: ignore[no-untyped-call, unused-ignore]
    else:
        loss = _SplitCrossEntropy.apply(vocab_parallel_logits, target, tp_group)  # type: ignore[no-untyped-call, unused-ignore]
    return loss


def own_labels(logits: torch.Tensor, target: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Shift targets [...] to indices into this rank's logits [..., v]; out of [0, v) means that another rank has them."""
    return target - group.rank() * logits.shape[-1]


def largest(logits: torch.Tensor) -> torch.Tensor:
    """Return the largest of each token's logits [t, v], in fp32, clamped to finite: all of a part may be masked (-inf)."""
    return logits.amax(dim=-1).float().clamp(min=torch.finfo(torch.float32).min)


def whole_vocabulary(
    most: torch.Tensor, sums: torch.Tensor, predicted: torch.Tensor, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combine the ranks' numbers, each [t] in fp32, into those of the whole vocabulary.

    Args:
        most: the largest logit of this rank.
        sums: the sum of exp(logit - most).
        predicted: the target's logit, 0 where another rank has it.

    Ranks: all of the group.
    """
    own, most = most, most.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    both = torch.stack((sums * (own - most).exp(), predicted))
    dist.all_reduce(both, group=group)
    return most, both[0], both[1]


class _SplitCrossEntropy(torch.autograd.Function):
    """Cross entropy over a split vocabulary; it keeps this rank's logits, and two numbers for each token."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        rows, labels = logits.reshape(-1, logits.shape[-1]), own_labels(logits, target, group).reshape(-1, 1)
        most = largest(rows)
        sums, predicted = torch.empty_like(most), torch.empty_like(most)
        start = 0
        for chunk in _chunks(rows):
            here = slice(start, start + chunk.shape[0])
            own, is_own = _clamped(labels[here], rows.shape[-1])
            sums[here] = (chunk - most[here].unsqueeze(1)).exp_().sum(dim=-1)  # fp32, whatever the logits are
            predicted[here] = torch.where(is_own, chunk.gather(1, own).float(), 0.0).squeeze(1)
            start = here.stop
        most, sums, predicted = whole_vocabulary(most, sums, predicted, group)
        ctx.save_for_backward(logits, labels, most, sums)
        return (sums.log() - (predicted - most)).view(target.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, labels, most, sums = ctx.saved_tensors
        rows, grad_loss = logits.reshape(-1, logits.shape[-1]), grad_outputs[0].reshape(-1, 1)
        grad = torch.empty_like(rows)
        start = 0
        for chunk, out in zip(_chunks(rows), _chunks(grad), strict=True):
            here = slice(start, start + chunk.shape[0])
            own, is_own = _clamped(labels[here], rows.shape[-1])
            # A quotient, not exp(logit - log of the sum), which would lose precision for large logits.
            softmax = (chunk - most[here].unsqueeze(1)).exp_().div_(sums[here].unsqueeze(1))
            softmax.scatter_add_(1, own, -is_own.float())
            torch.mul(softmax, grad_loss[here], out=out)
            start = here.stop
        return grad.view(logits.shape), None, None


def _clamped(labels: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Clamp labels to [0, v); also return which of them were inside."""
    own = labels.clamp(0, vocab_size - 1)
    return own, own == labels


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy over a whole vocabulary; it keeps the logits, and backward recomputes the softmax by chunks."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        rows, labels = logits.reshape(-1, logits.shape[-1]), target.reshape(-1, 1)
        loss = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        start = 0
        for chunk in _chunks(rows):
            here = slice(start, start + chunk.shape[0])
            # One kernel that reads the logits in their own dtype; a sum of exponentials would be five.
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
    """Split [t, v] into views [c, v]."""
    return torch.split(rows, max(1, CHUNK_NUMEL // rows.shape[-1]))
