"""Tokens' way to the rows of experts and back, each way one node of autograd, whose backward is the other way.

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

from megatron.core.transformer.moe.permutation import Arrivals, ExpertOrder, arrivals

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TokenExchange:
    """Rows between the ranks of a group, as many to each as the host knows.

    Args:
        sent: [g, l] rows that go to each expert of each rank.
        received: [g, l] rows that this rank's experts get from each. arriving: the same on the device, int64.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        sent: list[list[int]],
        received: list[list[int]],
        arriving: torch.Tensor,
    ) -> None:
        self._group, self._received, self._arriving = group, received, arriving
        self._num_sent, self._num_received = list(map(sum, sent)), list(map(sum, received))
        self.known_counts = list(map(sum, zip(*received, strict=True)))

    @functools.cached_property
    def arrivals(self) -> Arrivals:
        """The order of what was received by expert; found when it is first asked for, with rows under way already."""
        return arrivals(self._arriving, self._received)

    def to_experts(self, x: torch.Tensor) -> torch.Tensor:
        """Rows in the order of all experts -> [r, ...] rows of this rank's, in their order. Ranks: all of the group."""
        rows = self._exchange(x, self._num_sent, self._num_received)
        by_expert = self.arrivals.rows
        return rows if by_expert is None else by_expert.take(rows)

    def from_experts(self, y: torch.Tensor) -> torch.Tensor:
        """The way back, which is the adjoint. Ranks: all of the group."""
        by_expert = self.arrivals.rows
        return self._exchange(y if by_expert is None else by_expert.sum(y), self._num_received, self._num_sent)

    def _exchange(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        rows = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(rows, x.contiguous(), received, sent, group=self._group)
        return rows


@dataclass(frozen=True)
class ExpertRows:
    """What a rank's experts are to compute.

    Attributes:
        hidden_states: [r, h] in the order of experts.
        probs: [r] factor of each row's result.
        counts: [l] rows of each expert, on the device, int64.
        known_counts: the same on the host, where they are there already.
        known_ends: [l] where each expert's rows end, on the device, int32, where that is there already.
    """

    hidden_states: torch.Tensor
    probs: torch.Tensor
    counts: torch.Tensor
    known_counts: list[int] | None = None
    known_ends: torch.Tensor | None = None

    def counts_on_host(self) -> list[int]:
        """[l] rows of each expert; the host waits for the device unless they are there already."""
        counts: list[int] = self.counts.tolist() if self.known_counts is None else self.known_counts
        return counts

    def ends(self) -> torch.Tensor:
        """[l] where each expert's rows end, on the device, int32. The host does not wait."""
        return self.counts.cumsum(0, dtype=torch.int32) if self.known_ends is None else self.known_ends


class DispatchPlan:
    """A microbatch's way through a layer's experts.

    Args:
        order: of rows, by expert of all ranks.
        find_exchange: returns what the rows' exchange between ranks is, and makes the host wait for it; None: all experts are
            here.
    """

    def __init__(self, order: ExpertOrder, find_exchange: Callable[[], TokenExchange] | None = None) -> None:
        self._order = order
        self._find_exchange = find_exchange

    @functools.cached_property
    def _exchange(self) -> TokenExchange | None:
        """The exchange between ranks; the host waits for it when it is first asked for."""
        find_exchange, self._find_exchange = self._find_exchange, None
        return None if find_exchange is None else find_exchange()

    def dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> ExpertRows:
        """[..., h] tokens and the [t, k] factors of their assignments -> this rank's rows; zeros without source.

        Ranks: all that the exchange is between, in forward and in backward.
        """
        rows, factors = _ToExperts.apply(hidden_states, probs, self)  # type: ignore[no-untyped-call, unused-ignore]
        exchange, order = self._exchange, self._order
        if exchange is not None:
            counts, ends, known_counts = exchange.arrivals.counts, exchange.arrivals.ends, exchange.known_counts
            return ExpertRows(rows, factors, counts=counts, known_counts=known_counts, known_ends=ends)
        known = None if order.rows_of_each is None else [order.rows_of_each] * order.counts.shape[0]
        return ExpertRows(rows, factors, counts=order.counts, known_counts=known, known_ends=order.ends)

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        """[r, h] results -> [t, h] sums over each token's rows. Ranks: as ``to_experts``."""
        sums: torch.Tensor = _ToTokens.apply(results, self)  # type: ignore[no-untyped-call, unused-ignore]
        return sums

    def out(self, tokens: torch.Tensor, probs: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """[t, h] tokens, and [a] factors where given, as rows of experts; autograd records nothing."""
        rows: tuple[torch.Tensor, ...] = (self._order.tokens.take(tokens),)
        if probs is not None:
            rows = (*rows, self._order.assignments.take(probs))
        # Asked for after the rows are taken: the device does that while the host waits.
        exchange = self._exchange
        return rows if exchange is None else tuple(map(exchange.to_experts, rows))

    def home_to_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """[r, h] -> [t, h], the adjoint of ``out``."""
        return self._order.tokens.sum(rows if self._exchange is None else self._exchange.from_experts(rows))

    def home_to_assignments(self, factors: torch.Tensor) -> torch.Tensor:
        """[r] -> [a], the adjoint of ``out``."""
        return self._order.assignments.sum(factors if self._exchange is None else self._exchange.from_experts(factors))


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_states: torch.Tensor, probs: torch.Tensor, dispatch_plan: DispatchPlan
    ) -> tuple[torch.Tensor, ...]:
        ctx.dispatch_plan, ctx.shapes = dispatch_plan, (hidden_states.shape, probs.shape)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        return dispatch_plan.out(x, probs.reshape(-1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dispatch_plan: DispatchPlan = ctx.dispatch_plan
        grad_hidden = grad_probs = None
        if ctx.needs_input_grad[0]:
            grad_hidden = dispatch_plan.home_to_tokens(grads[0]).view(ctx.shapes[0])
        if ctx.needs_input_grad[1]:
            grad_probs = dispatch_plan.home_to_assignments(grads[1]).view(ctx.shapes[1])
        return grad_hidden, grad_probs, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: torch.Tensor, dispatch_plan: DispatchPlan) -> torch.Tensor:
        ctx.dispatch_plan = dispatch_plan
        return dispatch_plan.home_to_tokens(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dispatch_plan: DispatchPlan = ctx.dispatch_plan
        return dispatch_plan.out(grads[0])[0], None
