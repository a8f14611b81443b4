"""Losses of the router, whose gradients join the main loss's in backward.

[Note: scale of auxiliary losses] The loss that training minimises is, for each microbatch and data-parallel rank, the mean
over its tokens plus the auxiliary losses of its tokens, and of these the mean over microbatches (M) and data-parallel
ranks. A microbatch's tokens may be split over context- and tensor-parallel ranks; each of these computes a part such that
the auxiliary loss is the sum of the parts. Backward starts each part with the factor s:

- gradients are averaged over dp x cp ranks (and summed over tp, where the router sees parts of the sequence), so a part's
  gradient arrives divided by dp x cp; it shall arrive divided by dp x M: s = cp / M;
- with ``calculate_per_token_loss`` they are summed and divided once by all tokens of the step, T x dp x M with T tokens in a
  microbatch over all its ranks: s = T. (Where tokens are masked, auxiliary losses weigh as much more as there are fewer
  tokens in the divisor.)

Megatron-Core multiplies by the tokens of the rank alone in the second case, which agrees where neither cp nor tp splits them.

Shapes: t tokens of this rank, e experts, k experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.core.process_groups_config import group_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def load_balancing_loss(
    scores: torch.Tensor,
    experts: torch.Tensor,
    *,
    num_sequences: int = 1,
    group: ProcessGroup | None = None,
) -> torch.Tensor:
    """This rank's part of e x sum over experts of (share of assignments) x (mean score): 1 where all are balanced.

    Args:
        scores: [t, e] that add up to 1 for each token.
        experts: [t, k] where the tokens go; constant for autograd.
        num_sequences: with more than one, tokens are [sequence, num_sequences] and the loss is the mean of the losses of
            each sequence alone.
        group: the ranks that hold the rest of these sequences; the sum of all parts is the loss.

    Ranks: all of ``group``, which sums one small tensor of counts.
    Source: Switch Transformer (arXiv:2101.03961) equations 4 to 6, with k choices of each token.
    """
    num_experts, topk = scores.shape[1], experts.shape[1]
    counts = _counts(experts, num_experts, num_sequences)
    size = group_size(group)
    if size > 1:
        dist.all_reduce(counts, group=group)
    num_tokens = scores.shape[0] // num_sequences * size
    summed = scores.view(-1, num_sequences, num_experts).sum(dim=0)
    return (summed * counts).sum() * (num_experts / (topk * num_tokens * num_tokens * num_sequences))


@torch.no_grad()
def _counts(experts: torch.Tensor, num_experts: int, num_sequences: int) -> torch.Tensor:
    """[num_sequences, e] assignments; exact and in no order: sums of integers."""
    topk = experts.shape[1]
    sequences = torch.arange(num_sequences, device=experts.device).view(1, -1, 1) * num_experts
    bins = (experts.view(-1, num_sequences, topk) + sequences).flatten()
    counts = torch.zeros(num_sequences * num_experts, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(0, bins, torch.ones_like(bins)).view(num_sequences, num_experts)


def z_loss(logits: torch.Tensor, *, group: ProcessGroup | None = None) -> torch.Tensor:
    """This rank's part of the mean over tokens of the square of the log-sum-exp of [t, e] logits.

    Ranks: no communication; the parts of all of ``group`` add up to the mean.
    Source: ST-MoE (arXiv:2202.08906) equation 5.
    """
    return torch.logsumexp(logits, dim=-1).square().mean() / group_size(group)


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """Passes a tensor on; in backward, an auxiliary loss gets a gradient of its own beside it.

    ``apply(output, aux_loss, scale)``: whatever reaches ``output``'s consumers' loss, ``scale * aux_loss`` is added to it
    as far as gradients go. Unlike Megatron-Core's function of this name the scale is an argument, not a global.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, aux_loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale, ctx.dtype, ctx.device = scale, aux_loss.dtype, aux_loss.device
        return output.view_as(output)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad_outputs[0], torch.full((), ctx.scale, dtype=ctx.dtype, device=ctx.device), None
