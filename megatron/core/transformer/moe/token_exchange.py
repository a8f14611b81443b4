"""Dispatch of tokens to the rows of experts and combine of the results, each one autograd node whose backward is the other.

Shapes: t tokens (in any leading dims of the hidden states), k experts of a token, h hidden size, a assignments (t * k),
r rows of this rank's experts, l experts of this rank, g ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.core.transformer.moe.bounded_rows import bounded_arrivals
from megatron.core.transformer.moe.permutation import Arrivals, ExpertOrder, arrivals

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TokenExchange:
    """All-to-all of rows between the ranks of a group, with counts that the host knows.

    Args:
        sent: [g, l] rows that this rank sends to each expert of each rank.
        received: [g, l] rows that this rank's experts receive from each rank.
        received_on_device: the same on the device, int64.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        sent: list[list[int]],
        received: list[list[int]],
        received_on_device: torch.Tensor,
    ) -> None:
        self._group, self._received, self._received_on_device = group, received, received_on_device
        self._num_sent, self._num_received = list(map(sum, sent)), list(map(sum, received))
        self.known_counts = list(map(sum, zip(*received, strict=True)))

    @functools.cached_property
    def arrivals(self) -> Arrivals:
        """The permutation of received rows into expert order, computed at first use, when the rows are on their way."""
        return arrivals(self._received_on_device, self._received)

    def dispatch(self, x: torch.Tensor) -> torch.Tensor:
        """Send rows to the ranks of their experts and permute what arrives into expert order.

        Args:
            x: rows in the order of all experts.

        Returns:
            [r, ...] rows of this rank's experts.

        Ranks: all of the group.
        """
        rows = self._exchange(x, self._num_sent, self._num_received)
        by_expert = self.arrivals.rows
        return rows if by_expert is None else by_expert.take(rows)

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """Send [r, ...] rows back to where they came from, the adjoint of ``dispatch``. Ranks: all of the group."""
        by_expert = self.arrivals.rows
        return self._exchange(y if by_expert is None else by_expert.sum(y), self._num_received, self._num_sent)

    def _exchange(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        rows = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(rows, x.contiguous(), received, sent, group=self._group)
        return rows


class BoundedExchange:
    """All-to-all of as many rows with each rank of a group, some of them padding. See [Note: bounded rows].

    Args:
        capacity: rows that each rank sends to each.
        received: [g, l] rows that this rank's experts receive from each rank, without padding, on the device, int64.
    """

    known_counts = None

    def __init__(self, group: ProcessGroup, *, capacity: int, received: torch.Tensor) -> None:
        self._group, self._capacity, self._received = group, capacity, received

    @functools.cached_property
    def arrivals(self) -> Arrivals:
        """The permutation of received rows into expert order, computed at first use, when the rows are on their way."""
        return bounded_arrivals(self._received, self._capacity)

    def dispatch(self, x: torch.Tensor) -> torch.Tensor:
        """Send rows to the ranks of their experts and permute what arrives into expert order, padding last.

        Args:
            x: [g * capacity, ...] rows and padding, rank by rank.

        Ranks: all of the group.
        """
        rows = self._exchange(x)
        by_expert = self.arrivals.rows
        assert by_expert is not None, "padding is permuted always"
        return by_expert.take(rows)

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """Send rows back to where they came from, the adjoint of ``dispatch``; padding is zeros. Ranks: all of the group."""
        by_expert = self.arrivals.rows
        assert by_expert is not None, "padding is permuted always"
        return self._exchange(by_expert.sum(y))

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.empty_like(x)
        dist.all_to_all_single(rows, x, group=self._group)
        return rows


@dataclass(frozen=True)
class ExpertRows:
    """The rows that a rank's experts compute.

    Attributes:
        hidden_states: [r, h] rows in expert order.
        probs: [r] factor of each row's result.
        counts: [l] rows of each expert, on the device, int64.
        known_counts: the same on the host; None: not known there yet.
        known_ends: [l] index after each expert's last row, on the device, int32; None: not computed yet.
        has_padding: whether rows follow the last expert's; their results are never used.
    """

    hidden_states: torch.Tensor
    probs: torch.Tensor
    counts: torch.Tensor
    known_counts: list[int] | None = None
    known_ends: torch.Tensor | None = None
    has_padding: bool = False

    def counts_on_host(self) -> list[int]:
        """Return the [l] rows of each expert; the host waits for the device unless it knows them already.

        Raises:
            RuntimeError: it does not know them, and the step is being captured.
        """
        if self.known_counts is not None:
            return self.known_counts
        if self.counts.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the host must know the rows of each expert where a step is captured, and cannot wait for them: use"
                " moe_expert_rank_capacity_factor with moe_grouped_gemm on Hopper in bf16, with widths that are multiples of 8, or"
                " moe_pad_expert_input_to_capacity"
            )
        counts: list[int] = self.counts.tolist()
        return counts

    def without_padding(self, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the rows and factors of experts with these ``counts`` alone, and zeros in the place of the padding, if there is some."""
        if not self.has_padding:
            return self.hidden_states, self.probs, None
        num_rows = sum(counts)
        padding = torch.zeros_like(self.hidden_states[num_rows:])
        return self.hidden_states[:num_rows], self.probs[:num_rows], padding

    def ends(self) -> torch.Tensor:
        """Return the [l] index after each expert's last row, on the device, int32. The host does not wait."""
        return self.counts.cumsum(0, dtype=torch.int32) if self.known_ends is None else self.known_ends


class DispatchPlan:
    """Where the tokens of one microbatch go in one layer: the permutation into expert order and the exchange of ranks.

    Args:
        order: the rows, sorted by expert of all ranks.
        find_exchange: makes the host wait for the counts, where it needs them, and returns the exchange; None: all experts are
            on this rank.
    """

    def __init__(
        self, order: ExpertOrder, find_exchange: Callable[[], TokenExchange | BoundedExchange] | None = None
    ) -> None:
        self._order = order
        self._find_exchange = find_exchange

    def assignments_of_experts(self) -> torch.Tensor:
        """Count the [e] assignments of this rank's tokens to each expert that are not dropped, int64."""
        return self._order.num_kept()

    @functools.cached_property
    def _exchange(self) -> TokenExchange | BoundedExchange | None:
        """The exchange between ranks; its first use makes the host wait for the counts."""
        find_exchange, self._find_exchange = self._find_exchange, None
        return None if find_exchange is None else find_exchange()

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> ExpertRows:
        """Bring tokens to the rows of their experts.

        Args:
            hidden_states: [..., h] tokens.
            probs: [t, k] factors of their assignments.

        Returns:
            The rows of this rank's experts; padded rows are zeros.

        Ranks: all of the exchange, in forward and in backward.
        """
        rows, factors = _Dispatch.apply(hidden_states, probs, self)  # type: ignore[no-untyped-call, unused-ignore]
        exchange, order = self._exchange, self._order
        if exchange is not None:
            counts, ends, known_counts = exchange.arrivals.counts, exchange.arrivals.ends, exchange.known_counts
            padded = isinstance(exchange, BoundedExchange)
            return ExpertRows(rows, factors, counts, known_counts, known_ends=ends, has_padding=padded)
        known = None if order.rows_of_each is None else [order.rows_of_each] * order.counts.shape[0]
        return ExpertRows(rows, factors, counts=order.counts, known_counts=known, known_ends=order.ends)

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        """Sum the [r, h] results of each token's rows to [t, h]. Ranks: as ``dispatch``."""
        sums: torch.Tensor = _Combine.apply(results, self)  # type: ignore[no-untyped-call, unused-ignore]
        return sums

    def dispatch_rows(self, tokens: torch.Tensor, probs: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Permute [t, h] tokens, and [a] factors where given, and send them to their experts, without autograd."""
        rows: tuple[torch.Tensor, ...] = (self._order.tokens.take(tokens),)
        if probs is not None:
            rows = (*rows, self._order.assignments.take(probs))
        # Asked for after the permutation is queued: the device does that while the host waits.
        exchange = self._exchange
        return rows if exchange is None else tuple(map(exchange.dispatch, rows))

    def combine_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Send [r, h] rows back and sum those of each token to [t, h]: the adjoint of ``dispatch_rows`` for tokens."""
        return self._order.tokens.sum(rows if self._exchange is None else self._exchange.combine(rows))

    def combine_probs(self, probs: torch.Tensor) -> torch.Tensor:
        """Send [r] factors back to their [a] assignments: the adjoint of ``dispatch_rows`` for factors."""
        return self._order.assignments.sum(probs if self._exchange is None else self._exchange.combine(probs))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_states: torch.Tensor, probs: torch.Tensor, plan: DispatchPlan
    ) -> tuple[torch.Tensor, ...]:
        ctx.plan, ctx.shapes = plan, (hidden_states.shape, probs.shape)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        return plan.dispatch_rows(x, probs.reshape(-1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: DispatchPlan = ctx.plan
        grad_hidden = grad_probs = None
        if ctx.needs_input_grad[0]:
            grad_hidden = plan.combine_rows(grads[0]).view(ctx.shapes[0])
        if ctx.needs_input_grad[1]:
            grad_probs = plan.combine_probs(grads[1]).view(ctx.shapes[1])
        return grad_hidden, grad_probs, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: torch.Tensor, plan: DispatchPlan) -> torch.Tensor:
        ctx.plan = plan
        return plan.combine_rows(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: DispatchPlan = ctx.plan
        return plan.dispatch_rows(grads[0])[0], None
