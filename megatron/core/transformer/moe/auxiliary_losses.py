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

The global load-balancing loss takes its shares of assignments from all data-parallel ranks and from all microbatches of the
step so far. It is one loss of all of them, of which each rank computes a part, and backward starts it as above, so that, as in
Megatron-Core, it weighs 1 / dp.

Shapes: t tokens of this rank, e experts, k experts of a token, q sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from megatron.core.process_groups_config import group_size
from megatron.core.transformer.recomputation import repeats_a_forward

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.transformer.transformer_config import TransformerConfig

BALANCING_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
"""Load-balancing losses by the tokens over which they balance: a microbatch's, a sequence's, those of the step so far on all ranks."""


def balancing_losses(config: TransformerConfig) -> dict[str, float]:
    """Return the coefficients of the load-balancing losses that a configuration asks for, by kind, without those of 0."""
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, coefficients = [kinds], [coefficients]  # type: ignore[list-item]
    assert isinstance(coefficients, list | tuple), "checked by the configuration"
    pairs = zip(kinds, coefficients, strict=True)
    return {kind: coefficient for kind, coefficient in pairs if kind in BALANCING_LOSSES and coefficient != 0.0}


class RunningCounts:
    """Mean numbers of assignments over the microbatches of a step so far."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._num_microbatches = 0

    def mean_with(self, counts: torch.Tensor) -> torch.Tensor:
        """Add a microbatch's counts [e], unless backward is recomputing that forward; return the mean [e], a new tensor."""
        if self._sum is None or not repeats_a_forward():
            self._sum = counts.clone() if self._sum is None else self._sum + counts
            self._num_microbatches += 1
        return self._sum / self._num_microbatches

    def clear(self) -> None:
        """Begin a step."""
        self._sum, self._num_microbatches = None, 0


@dataclass(frozen=True, kw_only=True)
class AuxiliaryLosses:
    """Auxiliary losses of one forward of a router, and their gradients, which its backward adds.

    Attributes:
        balancing: coefficients of the load-balancing losses, by kind, none of them 0.
        z: coefficient of the z-loss; None: there is none.
        scale: factor with which backward starts; see [Note: scale of auxiliary losses].
        num_forwards: of the router in each microbatch; its losses are the means of theirs.
        num_sequences: q; with "seq_aux_loss" the sequences of a microbatch, whose loss is the mean of each one's; 1 without it.
        group: the ranks that hold the rest of these sequences; losses are the sums of their parts.
        running: counts of the step so far, for "global_aux_loss".
        data_group: the data-parallel ranks, over which the global loss counts.
        loss_scale: [1] what the main loss is multiplied by too, on the device; None: 1.
    """

    balancing: Mapping[str, float]
    z: float | None
    scale: float
    num_forwards: int = 1
    num_sequences: int = 1
    group: ProcessGroup | None = None
    running: RunningCounts | None = None
    data_group: ProcessGroup | None = None
    loss_scale: torch.Tensor | None = None

    def balance(
        self, summed: torch.Tensor, counts: torch.Tensor, topk: int, num_tokens: int
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Compute this rank's parts of the load-balancing losses, and their gradient.

        A loss is e x sum over experts of (share of assignments) x (mean score): 1 where all are balanced.

        Args:
            summed: [q * e] sums of scores over each sequence's tokens.
            counts: [q * e] assignments of each sequence, constant for autograd; overwritten.

        Returns:
            The parts [] without coefficients, in the order of ``balancing``, and the gradient [q * e] of a token's scores, the same
            for all tokens of a sequence, times coefficients and scale; ((), None) where there is no such loss.

        Ranks: all of ``group``, which sums the counts, and for the global loss all of ``data_group``.
        Source: Switch Transformer (arXiv:2101.03961) equations 4 to 6, with k choices of each token.
        """
        if not self.balancing:
            return (), None
        if group_size(self.group) > 1:
            dist.all_reduce(counts, group=self.group)
        parts, grads = [], []
        for kind, coefficient in self.balancing.items():
            of_sequences = kind == "seq_aux_loss"
            own_summed, own_counts = (summed, counts) if of_sequences else (self._of_all(summed), self._of_all(counts))
            if len(self.balancing) > 1:
                own_counts = own_counts.clone()  # which the loss overwrites
            part, grad = self._loss(kind, coefficient, own_summed, own_counts, topk, num_tokens)
            parts.append(part)
            grads.append(grad if of_sequences or self.num_sequences == 1 else grad.repeat(self.num_sequences))
        total = grads[0]
        for grad in grads[1:]:
            total += grad
        return tuple(parts), total

    def _of_all(self, of_sequences: torch.Tensor) -> torch.Tensor:
        """Sum [q * e] over the sequences to [e]."""
        return of_sequences if self.num_sequences == 1 else of_sequences.view(self.num_sequences, -1).sum(dim=0)

    def _loss(
        self, kind: str, coefficient: float, summed: torch.Tensor, counts: torch.Tensor, topk: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_sequences = self.num_sequences if kind == "seq_aux_loss" else 1
        size, num_shares = group_size(self.group), 1
        if kind == "global_aux_loss":
            assert self.running is not None, "made by the router"
            num_shares = group_size(self.data_group)
            if num_shares > 1:
                dist.all_reduce(counts, group=self.data_group)
            size *= num_shares
            counts = self.running.mean_with(counts)
        num_experts, of_sequence = counts.shape[0] // num_sequences, num_tokens // num_sequences * size
        factor = num_experts / (topk * of_sequence * of_sequence * num_sequences * self.num_forwards)
        # The record takes means over data-parallel ranks; the global loss is the sum of their parts.
        part = torch.dot(summed, counts).mul_(factor * num_shares)
        return part, self._scaled(counts, factor * coefficient * self.scale)

    def _scaled(self, gradient: torch.Tensor, factor: float) -> torch.Tensor:
        gradient.mul_(factor)
        return gradient if self.loss_scale is None else gradient.mul_(self.loss_scale)

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
        parts = group_size(self.group) * self.num_forwards
        part = mean_square if parts == 1 else mean_square / parts
        return part, self._scaled(log_sums, 2 * self.z * self.scale / (log_sums.shape[0] * parts))


class LossAutoScaler(torch.autograd.Function):
    """The identity of a tensor, whose backward begins that of a loss, too."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, loss: torch.Tensor, loss_scale: torch.Tensor | None) -> torch.Tensor:
        ctx.loss_scale = loss_scale
        ctx.save_for_backward(loss)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (loss,) = ctx.saved_tensors
        start = torch.ones_like(loss)
        return grads[0], start if ctx.loss_scale is None else start * ctx.loss_scale, None


class CallersLossAutoScaler(LossAutoScaler):
    """``apply(output, loss)`` adds a caller's loss to backward, times the scale that the schedule sets in each step."""

    main_loss_backward_scale: ClassVar[torch.Tensor | None] = None

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return LossAutoScaler.forward(ctx, output, loss, ctx._forward_cls.main_loss_backward_scale)

    @classmethod
    def set_loss_scale(cls, scale: torch.Tensor) -> None:
        """Set the factor [1] of later losses."""
        cls.main_loss_backward_scale = scale


class MoEAuxLossAutoScaler(CallersLossAutoScaler):
    """For auxiliary losses of experts."""

    main_loss_backward_scale = None
