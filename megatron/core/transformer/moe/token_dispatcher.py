"""How tokens reach their experts and come back.

[Note: rows of experts] A row is one assignment of a token to an expert. Rows lie in the order of experts, so an expert's
rows are consecutive, and experts of one rank are as well. With experts on several ranks rows travel there and back by one
all-to-all each way; how many is known to the device alone, so the host waits for the counts, once for each layer. Where
experts' matrices are split over tensor-parallel ranks, each of these gets a copy of the row, and what comes back, a
summand from each, is added up at home. That is an all-gather and a reduce-scatter in the same all-to-all.

Shapes: t tokens, k experts of a token, h hidden size, e experts, l experts of this rank, r rows of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.core.process_groups_config import group_size
from megatron.core.transformer.moe.permutation import ExpertOrder, expert_order, expert_order_up_to
from megatron.core.transformer.moe.routing import Routing, capacity

if TYPE_CHECKING:
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
            hidden_states=tokens.spread(hidden_states), probs=self._probs(order, routing), counts=order.counts
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


def build_dispatcher(config: TransformerConfig, pg_collection: ProcessGroupCollection | None) -> LocalDispatcher:
    """The dispatcher for these groups: local where one rank has all experts whole."""
    if group_size(getattr(pg_collection, "ep", None)) * group_size(getattr(pg_collection, "expt_tp", None)) > 1:
        raise NotImplementedError("experts on several ranks")
    return LocalDispatcher(config)
