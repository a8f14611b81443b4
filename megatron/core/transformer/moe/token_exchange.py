"""Dispatch of tokens to the rows of experts and combine of the results, each one autograd node whose backward is the other.

Shapes: t tokens (in any leading dims of the hidden states), k experts of a token, h hidden size, a assignments (t * k),
r rows of this rank's experts, l experts of this rank, g ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.core.transformer.moe.bounded_rows import bounded_arrivals
from megatron.core.transformer.moe.permutation import Arrivals, ExpertOrder, arrivals

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.transformer.moe.alternating_passes import AlternatingPasses


class TokenExchange:
    """All-to-all of rows between the ranks of a group, with counts that the host knows.

    Args:
        sent: [g, l] rows that this rank sends to each expert of each rank.
        received: [g, l] rows that this rank's experts receive from each rank.
        received_on_device: the same on the device, int64.
        passes: a forward and a backward that take turns while rows are on their way; None: each exchange is waited for at once.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        sent: list[list[int]],
        received: list[list[int]],
        received_on_device: torch.Tensor,
        passes: AlternatingPasses | None = None,
    ) -> None:
        self._group, self._received, self._received_on_device = group, received, received_on_device
        self._passes = passes
        self._num_sent, self._num_received = list(map(sum, sent)), list(map(sum, received))
        self.known_counts = list(map(sum, zip(*received, strict=True)))

    @functools.cached_property
    def arrivals(self) -> Arrivals:
        """The permutation of received rows into expert order, computed at first use, when the rows are on their way."""
        return arrivals(self._received_on_device, self._received)

    def dispatch(self, *tensors: torch.Tensor, ready: torch.cuda.Event | None = None) -> tuple[torch.Tensor, ...]:
        """Send rows to the ranks of their experts and permute what arrives into expert order.

        Args:
            tensors: rows in the order of all experts, contiguous.
            ready: see ``AlternatingPasses.exchange``.

        Returns:
            [r, ...] rows of this rank's experts, for each of the tensors.

        Ranks: all of the group.
        """
        received = self._exchange(tensors, self._num_sent, self._num_received, ready)
        by_expert = self.arrivals.rows
        return tuple(received if by_expert is None else map(by_expert.take, received))

    def combine(self, *tensors: torch.Tensor, pauses: bool = False) -> tuple[torch.Tensor, ...]:
        """Send [r, ...] rows back to where they came from, the adjoint of ``dispatch``. Ranks: all of the group.

        Args:
            pauses: let the other one of two passes run first.
        """
        by_expert = self.arrivals.rows
        # Before the mark: what is sent is complete there.
        rows = tuple((x if by_expert is None else by_expert.sum(x)).contiguous() for x in tensors)
        ready = self._passes.pause() if pauses and self._passes is not None else None
        return tuple(self._exchange(rows, self._num_received, self._num_sent, ready))

    def _exchange(
        self,
        tensors: Sequence[torch.Tensor],
        sent: list[int],
        received: list[int],
        ready: torch.cuda.Event | None = None,
    ) -> list[torch.Tensor]:
        num_rows = sum(received)

        def begin(x: torch.Tensor, *, waits: bool) -> tuple[torch.Tensor, Any]:
            rows = x.new_empty(num_rows, *x.shape[1:])
            return rows, dist.all_to_all_single(rows, x, received, sent, group=self._group, async_op=not waits)

        return exchanged(tensors, begin, self._passes, ready)


class BoundedExchange:
    """All-to-all of as many rows with each rank of a group, some of them padding. See [Note: bounded rows].

    Args:
        capacity: rows that each rank sends to each.
        received: [g, l] rows that this rank's experts receive from each rank, without padding, on the device, int64.
        passes: see ``TokenExchange``.
    """

    known_counts = None

    def __init__(
        self,
        group: ProcessGroup,
        *,
        capacity: int,
        received: torch.Tensor,
        passes: AlternatingPasses | None = None,
    ) -> None:
        self._group, self._capacity, self._received, self._passes = group, capacity, received, passes

    @functools.cached_property
    def arrivals(self) -> Arrivals:
        """The permutation of received rows into expert order, computed at first use, when the rows are on their way."""
        return bounded_arrivals(self._received, self._capacity)

    def dispatch(self, *tensors: torch.Tensor, ready: torch.cuda.Event | None = None) -> tuple[torch.Tensor, ...]:
        """Send rows to the ranks of their experts and permute what arrives into expert order, padding last.

        Args:
            tensors: [g * capacity, ...] rows and padding, rank by rank.
            ready: see ``AlternatingPasses.exchange``.

        Ranks: all of the group.
        """
        received = self._exchange(tensors, ready)
        by_expert = self.arrivals.rows
        assert by_expert is not None, "padding is permuted always"
        return tuple(map(by_expert.take, received))

    def combine(self, *tensors: torch.Tensor, pauses: bool = False) -> tuple[torch.Tensor, ...]:
        """Send rows back to where they came from, the adjoint of ``dispatch``; padding is zeros. Ranks: all of the group.

        Args:
            pauses: as ``TokenExchange.combine`` has it.
        """
        by_expert = self.arrivals.rows
        assert by_expert is not None, "padding is permuted always"
        rows = tuple(map(by_expert.sum, tensors))
        ready = self._passes.pause() if pauses and self._passes is not None else None
        return tuple(self._exchange(rows, ready))

    def _exchange(self, tensors: Sequence[torch.Tensor], ready: torch.cuda.Event | None = None) -> list[torch.Tensor]:
        def begin(x: torch.Tensor, *, waits: bool) -> tuple[torch.Tensor, Any]:
            rows = torch.empty_like(x)
            return rows, dist.all_to_all_single(rows, x, group=self._group, async_op=not waits)

        return exchanged(tensors, begin, self._passes, ready)


def exchanged(
    tensors: Sequence[torch.Tensor],
    begin: Callable[..., tuple[torch.Tensor, Any]],
    passes: AlternatingPasses | None,
    ready: torch.cuda.Event | None,
) -> list[torch.Tensor]:
    """Exchange tensors between ranks; two passes that are open take turns meanwhile.

    Args:
        begin: (tensor, ``waits``) -> (what arrives, the work to wait for, unless it ``waits`` itself).
        ready: as ``AlternatingPasses.exchange`` has it; None: the tensors are complete where compute is now.
    """
    if passes is None or not passes.are_open:
        return [begin(x, waits=True)[0] for x in tensors]

    def begin_all() -> tuple[list[torch.Tensor], list[Any]]:
        begun = [begin(x, waits=False) for x in tensors]
        return [rows for rows, _ in begun], [work for _, work in begun]

    return passes.exchange(begin_all, ready or passes.reached())


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
        passes: see ``TokenExchange``.
    """

    def __init__(
        self,
        order: ExpertOrder,
        find_exchange: Callable[[], TokenExchange | BoundedExchange] | None = None,
        passes: AlternatingPasses | None = None,
    ) -> None:
        self._order, self._passes = order, passes
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

    def dispatch_rows(
        self, tokens: torch.Tensor, probs: torch.Tensor | None = None, *, pauses: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Permute [t, h] tokens, and [a] factors where given, and send them to their experts, without autograd.

        Args:
            pauses: let the other one of two passes run first. See [Note: two passes take turns].
        """
        rows: tuple[torch.Tensor, ...] = (self._order.tokens.take(tokens),)
        if probs is not None:
            rows = (*rows, self._order.assignments.take(probs))
        ready = self._passes.pause() if pauses and self._passes is not None else None
        # Asked for after the permutation is queued: the device does that while the host waits.
        exchange = self._exchange
        return rows if exchange is None else exchange.dispatch(*rows, ready=ready)

    def combine_rows(
        self, rows: torch.Tensor | None, probs: torch.Tensor | None = None, *, pauses: bool = False
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Send [r, h] rows back and sum those of each token to [t, h], and [r] factors to their [a] assignments.

        The adjoint of ``dispatch_rows``. Both are returned; one may be None.
        """
        given = tuple(x for x in (rows, probs) if x is not None)
        if self._exchange is not None and given:
            given = self._exchange.combine(*given, pauses=pauses)
        results = iter(given)
        sums = None if rows is None else self._order.tokens.sum(next(results))
        return sums, None if probs is None else self._order.assignments.sum(next(results))


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_states: torch.Tensor, probs: torch.Tensor, plan: DispatchPlan
    ) -> tuple[torch.Tensor, ...]:
        ctx.plan, ctx.shapes = plan, (hidden_states.shape, probs.shape)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        return plan.dispatch_rows(x, probs.reshape(-1), pauses=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: DispatchPlan = ctx.plan
        asked = [grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad, strict=False)]
        sums = plan.combine_rows(*asked, pauses=True)
        return *(x if x is None else x.view(shape) for x, shape in zip(sums, ctx.shapes, strict=True)), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: torch.Tensor, plan: DispatchPlan) -> torch.Tensor:
        ctx.plan = plan
        sums = plan.combine_rows(results)[0]
        assert sums is not None, "there are rows"
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: DispatchPlan = ctx.plan
        return plan.dispatch_rows(grads[0])[0], None
