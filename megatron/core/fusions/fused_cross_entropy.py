"""Fused cross entropy: one pass over the logits in forward and one in backward, whose gradient can overwrite them.

Shapes: s sequence, b batch, v vocabulary (this rank's part of it), t tokens (s * b).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron.core.jit import Fusible, is_compiled
from megatron.core.process_groups_config import group_size
from megatron.core.tensor_parallel.cross_entropy import largest, own_labels, whole_vocabulary

# Where functions are not compiled, chunks of 2**24 logits bound the fp32 copies that each operation makes.
CHUNK_NUMEL = 2**24


def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: torch.Tensor,
    target: torch.Tensor,
    tp_group: ProcessGroup | None = None,
    *,
    overwrite_logits: bool = False,
    compiled: bool = True,
) -> torch.Tensor:
    """Compute the loss of each token.

    Args:
        vocab_parallel_logits: [s, b, v] of any float dtype.
        target: [s, b] token ids of the whole vocabulary.
        tp_group: the ranks whose logits are parts of the vocabulary, in rank order; None: the logits are all.
        overwrite_logits: backward writes the gradient over the logits, which nobody may read after it; a second backward
            through the same loss raises RuntimeError.

    Returns:
        Losses [s, b], fp32.

    Ranks: all of ``tp_group``, with the same targets, in forward; each gets the same losses.
    Source: the signature is Megatron-Core's; one read of the logits in forward, one read and one write in backward are
    ours.
    """
    loss: torch.Tensor = _CrossEntropy.apply(vocab_parallel_logits, target, tp_group, overwrite_logits, compiled)  # type: ignore[no-untyped-call, unused-ignore]
    return loss


@Fusible
def _losses(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the losses [t] of logits [t, v] and target [t], and the log-sum-exps [t]; both fp32."""
    wide = logits.float()
    # Unlike logsumexp, the compiler computes maximum and sum of this in one pass over the logits.
    most = wide.amax(dim=-1, keepdim=True)
    log_sum = (most + (wide - most).exp().sum(dim=-1, keepdim=True).log()).squeeze(1)
    return log_sum - logits.gather(1, target.unsqueeze(1)).squeeze(1).float(), log_sum


@Fusible
def _sums_of_a_part(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute, of logits [t, v], the largest, the sum of exp(logit - largest), and the target's or 0; each [t] in fp32."""
    wide = logits.float()
    most = largest(wide)
    sums = (wide - most.unsqueeze(1)).exp().sum(dim=-1)
    own = target.clamp(0, logits.shape[-1] - 1)
    predicted = logits.gather(1, own.unsqueeze(1)).squeeze(1).float()
    return most, sums, torch.where(own == target, predicted, 0.0)


def _gradient_of(
    logits: torch.Tensor, target: torch.Tensor, log_sum: torch.Tensor, grad_loss: torch.Tensor
) -> torch.Tensor:
    """Compute the gradient [t, v], in the dtype of the logits: (softmax - one hot) * grad_loss."""
    hit = torch.arange(logits.shape[-1], device=logits.device) == target.unsqueeze(1)
    softmax = torch.exp(logits.float() - log_sum.unsqueeze(1))
    return ((softmax - hit.float()) * grad_loss.unsqueeze(1)).to(logits.dtype)


_gradient = Fusible(_gradient_of)


@Fusible
def _gradient_in_place(
    logits: torch.Tensor, target: torch.Tensor, log_sum: torch.Tensor, grad_loss: torch.Tensor
) -> None:
    logits.copy_(_gradient_of(logits, target, log_sum, grad_loss))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        group: ProcessGroup | None,
        overwrite_logits: bool,
        compiled: bool,
    ) -> torch.Tensor:
        if group is not None and group_size(group) > 1:
            target = own_labels(logits, target, group)
            most, sums, predicted = _by_chunks(_sums_of_a_part, compiled, logits, target)
            most, sums, predicted = whole_vocabulary(most, sums, predicted, group)
            losses, log_sum = sums.log() - (predicted - most), most + sums.log()
        else:
            losses, log_sum = _by_chunks(_losses, compiled, logits, target)
        ctx.save_for_backward(logits, target, log_sum)
        ctx.overwrite, ctx.compiled, ctx.overwritten = overwrite_logits, compiled, False
        return losses.view(target.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.overwritten:
            raise RuntimeError(
                "backward must run once through a loss whose gradient overwrites the logits, got a second pass; switch"
                " cross_entropy_loss_fusion off, or call fused_vocab_parallel_cross_entropy without overwrite_logits"
            )
        logits, target, log_sum = ctx.saved_tensors
        ctx.overwritten = ctx.overwrite
        # Where reshape has to copy, the copy may be overwritten too.
        rows = logits.detach().reshape(-1, logits.shape[-1])
        chunks = _chunks(ctx.compiled, rows, target.reshape(-1), log_sum, grad_outputs[0].reshape(-1))
        function = _gradient_in_place if ctx.overwrite else _gradient
        parts = [function(ctx.compiled, *chunk) for chunk in zip(*chunks, strict=True)]
        if ctx.overwrite:
            grad = rows
        else:
            grad = torch.cat(parts) if len(parts) > 1 else parts[0]
        return grad.view(logits.shape), None, None, None, None


def _by_chunks(
    function: Fusible, compiled: bool, logits: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Apply a function to logits [t, v] and target [t] chunk by chunk; return its results, each [t]."""
    rows, labels = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    parts = [function(compiled, *chunk) for chunk in zip(*_chunks(compiled, rows, labels), strict=True)]
    return tuple(torch.cat(part) if len(parts) > 1 else part[0] for part in zip(*parts, strict=True))


def _chunks(compiled: bool, rows: torch.Tensor, *rest: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Cut [t, v] and further tensors [t, ...] into equal chunks; into one chunk where functions are compiled."""
    if is_compiled(compiled, rows):
        return [(tensor,) for tensor in (rows, *rest)]
    num_rows = max(1, CHUNK_NUMEL // rows.shape[-1])
    return [torch.split(tensor, num_rows) for tensor in (rows, *rest)]
