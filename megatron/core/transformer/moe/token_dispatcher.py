"""How tokens reach their experts and come back.

[Note: rows of experts] A row is one assignment of a token to an expert. Rows lie in the order of experts, so an expert's
rows are consecutive, and experts of one rank are as well. With experts on several ranks rows travel there and back by one
all-to-all each way; how many is known to the device alone, so the host waits for the counts, once for each layer: with
the sorting of rows queued behind them, so that the device has work while the host wakes up. Where experts' matrices are split over tensor-parallel ranks, each of these gets a copy of the row, and what comes back, a
summand from each, is added up at home. That is an all-gather and a reduce-scatter in the same all-to-all.

Shapes: t tokens, k experts of a token, h hidden size, e experts, l experts of this rank, r rows of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.core.delayed_read import DelayedRead
from megatron.core.process_groups_config import group_size
from megatron.core.transformer.moe.all_to_all import all_to_all_rows
from megatron.core.transformer.moe.permutation import ExpertOrder, RowMap, expert_order, expert_order_up_to, with_copies
from megatron.core.transformer.moe.routing import Routing, capacity

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class ExpertRows:
    """What this rank's experts are to compute.

    Attributes:
        hidden_states: [r, h] in the order of experts.
        probs: [r] factor of each row's result.
        counts: [l] rows of each expert, on the device, int64.
        known_counts: the same on the host, where they are there already.
    """

    hidden_states: torch.Tensor
    probs: torch.Tensor
    counts: torch.Tensor
    known_counts: list[int] | None = None

    def counts_on_host(self) -> list[int]:
        """[l] rows of each expert; the host waits for the device unless they are there already."""
        counts: list[int] = self.counts.tolist() if self.known_counts is None else self.known_counts
        return counts


Combine = Callable[[torch.Tensor], torch.Tensor]
"""[r, h] results of the rows -> [t, h] sums over each token's experts. Ranks: as the dispatch."""


class LocalDispatcher:
    """Brings tokens into the order of experts that are all on this rank."""

    def __init__(self, config: TransformerConfig) -> None:
        assert config.num_moe_experts, "a dispatcher is built for experts only"
        self.config, self.num_experts = config, config.num_moe_experts

    def dispatch(self, hidden_states: torch.Tensor, routing: Routing) -> tuple[ExpertRows, Combine]:
        """The rows of [t, h] tokens, and what sums their results. Ranks: this one alone.

        The host waits only where assignments are dropped without padding.
        """
        order = self._order(routing)
        tokens = order.of_tokens(self.config.moe_router_topk)
        rows = ExpertRows(
            hidden_states=tokens.spread(hidden_states),
            probs=self._probs(order, routing),
            counts=order.counts,
            known_counts=None if order.rows_of_each is None else [order.rows_of_each] * self.num_experts,
        )
        return rows, tokens.collect

    def _order(self, routing: Routing) -> ExpertOrder:
        limit = capacity(routing.experts.shape[0], self.config)
        if limit is None:
            return expert_order(routing.experts, self.num_experts)
        by_probs = self.config.moe_token_drop_policy == "probs"
        return expert_order_up_to(
            limit,
            routing.experts,
            self.num_experts,
            probs=routing.probs.detach() if by_probs else None,
            pads=self.config.moe_pad_expert_input_to_capacity,
        )

    def _probs(self, order: ExpertOrder, routing: Routing) -> torch.Tensor:
        """[r] factor of each row; 0 of a row without source."""
        return order.assignments.spread(routing.probs.reshape(-1, 1)).squeeze(1)


class AllToAllDispatcher(LocalDispatcher):
    """Brings rows to the ranks of their experts and the results back. See [Note: rows of experts].

    Args:
        group: the ranks over which experts are divided, each expert's ``num_copies`` tensor-parallel ranks next to each
            other.
    """

    def __init__(self, config: TransformerConfig, group: ProcessGroup, *, num_copies: int = 1) -> None:
        super().__init__(config)
        self.group, self.num_copies = group, num_copies
        self.num_owners = group.size() // num_copies
        self.num_local_experts = self.num_experts // self.num_owners

    def dispatch(self, hidden_states: torch.Tensor, routing: Routing) -> tuple[ExpertRows, Combine]:
        """As ``LocalDispatcher.dispatch``, of all ranks' tokens. Ranks: all of the group. The host waits once."""
        order = self._order(routing)
        trip_of = self._plan(order)
        if self.num_copies > 1:
            order = with_copies(order, self.num_copies, self.num_owners)
        tokens = order.of_tokens(self.config.moe_router_topk)
        leaving, probs = tokens.spread(hidden_states), self._probs(order, routing)[:, None]
        trip = trip_of()
        by_expert = _by_expert(trip.arriving, sum(trip.received))

        def send(x: torch.Tensor) -> torch.Tensor:
            rows = all_to_all_rows(x, trip.sent, trip.received, self.group)
            return rows if by_expert is None else by_expert.spread(rows)

        def combine(results: torch.Tensor) -> torch.Tensor:
            rows = results if by_expert is None else by_expert.collect(results)
            return tokens.collect(all_to_all_rows(rows, trip.received, trip.sent, self.group))

        rows = ExpertRows(
            hidden_states=send(leaving),
            probs=send(probs).squeeze(1),
            counts=trip.arriving.sum(dim=0),
            known_counts=trip.known_counts,
        )
        return rows, combine

    @torch.no_grad()
    def _plan(self, order: ExpertOrder) -> Callable[[], _Trip]:
        """What returns who sends how many rows to whom. Ranks: all; it makes the host wait, unless all send the same to all."""
        if order.rows_of_each is not None:
            even = self._even_trip(order.rows_of_each, order.counts)
            return lambda: even
        own = order.counts.view(self.num_owners, 1, -1).expand(-1, self.num_copies, -1)
        own = own.reshape(self.group.size(), self.num_local_experts).contiguous()
        arriving = torch.empty_like(own)
        dist.all_to_all_single(arriving, own, group=self.group)
        counts = DelayedRead(torch.stack((own, arriving)))

        def trip() -> _Trip:
            sent, received = counts.tensor().tolist()
            return _Trip(
                arriving=arriving,
                sent=[sum(row) for row in sent],
                received=[sum(row) for row in received],
                known_counts=[sum(column) for column in zip(*received, strict=True)],
            )

        return trip

    def _even_trip(self, rows: int, counts: torch.Tensor) -> _Trip:
        """Each rank sends ``rows`` rows to each expert: all ranks have as many tokens, so all have the same capacity."""
        num_ranks, num_experts = self.group.size(), self.num_local_experts
        return _Trip(
            arriving=counts.new_full((num_ranks, num_experts), rows),
            sent=[rows * num_experts] * num_ranks,
            received=[rows * num_experts] * num_ranks,
            known_counts=[rows * num_ranks] * num_experts,
        )


@dataclass(frozen=True, kw_only=True)
class _Trip:
    """Rows that travel, on the device by rank and expert ([g, l]), and on the host."""

    arriving: torch.Tensor
    sent: list[int]
    received: list[int]
    known_counts: list[int]


@torch.no_grad()
def _by_expert(arriving: torch.Tensor, num_rows: int) -> RowMap | None:
    """Rows that arrived, [g, l] of them rank by rank, in the order of experts; None where that is their order."""
    num_ranks, num_experts = arriving.shape
    if num_experts == 1:
        return None
    experts = torch.arange(num_experts, device=arriving.device).repeat(num_ranks)
    experts = experts.repeat_interleave(arriving.flatten(), output_size=num_rows)
    return expert_order(experts.unsqueeze(1), num_experts).assignments


def build_dispatcher(config: TransformerConfig, pg_collection: ProcessGroupCollection | None) -> LocalDispatcher:
    """The dispatcher for these groups: local where one rank has all experts whole.

    Raises:
        ValueError: ``tp_ep`` is not ep x expt_tp ranks, where both are more than one.
    """
    ep, expt_tp = getattr(pg_collection, "ep", None), getattr(pg_collection, "expt_tp", None)
    num_copies, num_owners = group_size(expt_tp), group_size(ep)
    if num_copies * num_owners == 1:
        return LocalDispatcher(config)
    group = ep if num_copies == 1 else expt_tp if num_owners == 1 else getattr(pg_collection, "tp_ep", None)
    if group is None or group.size() != num_copies * num_owners:
        raise ValueError(
            f"pg_collection.tp_ep must hold the ranks of expt_tp and ep ({num_copies} x {num_owners}), got"
            f" {group_size(group)}"
        )
    return AllToAllDispatcher(config, group, num_copies=num_copies)
