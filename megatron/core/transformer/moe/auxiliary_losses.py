"""Auxiliary losses of the router, whose gradients its backward adds to the main loss's.

[Note: scale of auxiliary losses] Training minimises the mean, over microbatches (M) and data-parallel ranks, of the loss of
a microbatch: its mean over tokens plus its auxiliary losses. The tokens of a microbatch may be split over context- and
tensor-parallel ranks; each of these computes a part, and the auxiliary loss is the sum of the parts. Backward starts each
part with the factor s:

- Gradients are averaged over dp x cp ranks (and summed over tp, where the router sees parts of the sequence), so a part's
  gradient is divided by dp x cp. It must be divided by dp x M: s = cp / M.
- With ``calculate_per_token_loss`` gradients are summed and divided once by all tokens of the step, T x dp x M with T tokens
  in a microbatch over all its ranks: s = T. (Where tokens are masked, the divisor is smaller and auxiliary losses weigh more.)

Megatron-Core multiplies by the tokens of the rank alone in the second case, which agrees where neither cp nor tp splits them.

Shapes: t tokens of this rank, e experts, k experts of a token, q sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.core.process_groups_config import group_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class AuxiliaryLosses:
    """Auxiliary losses of one forward of a router, and their gradients, which its backward adds.

    Attributes:
        balancing: coefficient of the load-balancing loss; 0: there is none.
        z: coefficient of the z-loss; None: there is none.
        scale: factor with which backward starts; see [Note: scale of auxiliary losses].
        num_sequences: q; with more than one, the loss is the mean over sequences of each one's loss.
        group: the ranks that hold the rest of these sequences; the loss is the sum of their parts.
    """

    balancing: float
    z: float | None
    scale: float
    num_sequences: int = 1
    group: ProcessGroup | None = None

    def balance(
        self, summed: torch.Tensor, counts: torch.Tensor, topk: int, num_tokens: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Compute this rank's part of the load-balancing loss, and its gradient.

        The loss is e x sum over experts of (share of assignments) x (mean score): 1 where all are balanced.

        Args:
            summed: [q * e] sums of scores over each sequence's tokens.
            counts: [q * e] assignments of each sequence, constant for autograd; overwritten.

        Returns:
            The part [] without coefficient, and the gradient [q * e] of a token's scores, the same for all tokens of a
            sequence, times coefficient and scale; (None, None) where there is no such loss.

        Ranks: all of ``group``, which sums the counts.
        Source: Switch Transformer (arXiv:2101.03961) equations 4 to 6, with k choices of each token.
        """
        if self.balancing == 0.0:
            return None, None
        size = group_size(self.group)
        if size > 1:
            dist.all_reduce(counts, group=self.group)
        num_experts, of_sequence = counts.shape[0] // self.num_sequences, num_tokens // self.num_sequences * size
        factor = num_experts / (topk * of_sequence * of_sequence * self.num_sequences)
        return torch.dot(summed, counts).mul_(factor), counts.mul_(factor * self.balancing * self.scale)

    def restrain(
        self, mean_square: torch.Tensor, log_sums: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Compute this rank's part of the z-loss, the mean square of log-sum-exps, and its gradient.

        The loss is the mean over the tokens of all ranks of ``group``.

        Args:
            mean_square: [] mean over this rank's tokens.
            log_sums: [t] log-sum-exps of the logits; overwritten.

        Returns:
            The part [] without coefficient, and the gradient [t] of each log-sum-exp times coefficient and scale;
            (None, None) where there is no such loss.

        Ranks: no communication.
        Source: ST-MoE (arXiv:2202.08906) equation 5.
        """
        if self.z is None:
            return None, None
        size = group_size(self.group)
        part = mean_square if size == 1 else mean_square / size
        return part, log_sums.mul_(2 * self.z * self.scale / (log_sums.shape[0] * size))
