"""Tokens' way to the rows of experts and back, each way one node of autograd, whose backward is the other way.

Shapes: t tokens (in any leading dims of the hidden states), k experts of a token, h hidden size, a assignments (t * k),
r rows of this rank's experts, l experts of this rank, g ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.core.transformer.moe.permutation import Arrivals, RowMap, arrivals

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Trip:
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


class Journey:
    """A microbatch's way through a layer's experts.

    Args:
        tokens: from tokens to rows in the order of all experts.
        assignments: the same from assignments.
        trip: what the rows' trip between ranks is, and makes the host wait for it; None: all experts are here.
    """

    def __init__(self, *, tokens: RowMap, assignments: RowMap, trip: Callable[[], Trip] | None = None) -> None:
        self.tokens, self.assignments = tokens, assignments
        self._find_trip = trip
        self._trip: Trip | None = None

    def trip(self) -> Trip | None:
        """The trip between ranks; the host waits for it the first time."""
        if self._trip is None and self._find_trip is not None:
            self._trip, self._find_trip = self._find_trip(), None
        return self._trip

    def to_experts(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., h] tokens and [t, k] factors -> the rows' hidden states [r, h] and factors [r]; 0 without source.

        Ranks: all that the trip is between, in forward and in backward.
        """
        rows: tuple[torch.Tensor, torch.Tensor] = _ToExperts.apply(hidden_states, probs, self)  # type: ignore[no-untyped-call, unused-ignore]
        return rows

    def to_tokens(self, results: torch.Tensor) -> torch.Tensor:
        """[r, h] results -> [t, h] sums over each token's rows. Ranks: as ``to_experts``."""
        sums: torch.Tensor = _ToTokens.apply(results, self)  # type: ignore[no-untyped-call, unused-ignore]
        return sums

    def _out(self, *sources: tuple[RowMap, torch.Tensor]) -> list[torch.Tensor]:
        rows = [row_map.take(x) for row_map, x in sources]
        # Asked for after the rows are taken: the device does that while the host waits.
        trip = self.trip()
        return rows if trip is None else [trip.to_experts(x) for x in rows]

    def _home(self, rows: RowMap, y: torch.Tensor) -> torch.Tensor:
        trip = self.trip()
        return rows.sum(y if trip is None else trip.from_experts(y))


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_states: torch.Tensor, probs: torch.Tensor, journey: Journey
    ) -> tuple[torch.Tensor, ...]:
        ctx.journey, ctx.shapes = journey, (hidden_states.shape, probs.shape)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        return tuple(journey._out((journey.tokens, x), (journey.assignments, probs.reshape(-1))))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        journey: Journey = ctx.journey
        maps = (journey.tokens, journey.assignments)
        home = [
            journey._home(rows, grad).view(shape) if needed else None
            for rows, grad, shape, needed in zip(maps, grads, ctx.shapes, ctx.needs_input_grad, strict=False)
        ]
        return *home, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: torch.Tensor, journey: Journey) -> torch.Tensor:
        ctx.journey = journey
        return journey._home(journey.tokens, results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        journey: Journey = ctx.journey
        return journey._out((journey.tokens, grads[0]))[0], None
