"""How tokens reach their experts and come back.

[Note: rows of experts] A row is one assignment of a token to an expert. Rows lie in the order of experts, so an expert's
rows are consecutive, and experts of one rank are as well. With experts on several ranks rows travel there and back by one
all-to-all each way; how many is known to the device alone, so the host waits for the counts, once for each layer: with
the shared expert and the taking of rows queued behind them, so that the device has work while the host wakes up. Where
experts' matrices are split over tensor-parallel ranks, each of these gets a copy of the row, and what comes back, a summand
from each, is added up at home. That is an all-gather and a reduce-scatter in the same all-to-all.

[Note: what a wait costs] Between two waits the host is never ahead of the device, so each operation that it queues there
is time of the step. Hence one node of autograd each way (``dispatch_plan``), one kernel for an order of rows
(``permutation_kernels``), and orders of rows that arrive from their counts, not by sorting.

Shapes: t tokens, k experts of a token, h hidden size, e experts, l experts of this rank, r rows of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron.core.delayed_read import DelayedRead
from megatron.core.process_groups_config import group_of, group_size
from megatron.core.transformer.moe.permutation import ExpertOrder, expert_order, expert_order_up_to, with_copies
from megatron.core.transformer.moe.routing import Routing, capacity
from megatron.core.transformer.moe.token_exchange import DispatchPlan, TokenExchange

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig


class LocalDispatcher:
    """Brings tokens into the order of experts that are all on this rank."""

    def __init__(self, config: TransformerConfig) -> None:
        assert config.num_moe_experts, "a dispatcher is built for experts only"
        self.config, self.num_experts = config, config.num_moe_experts

    def plan(self, routing: Routing) -> DispatchPlan:
        """The way of a microbatch's tokens, which are routed so. Ranks: this one alone.

        The host waits only where assignments are dropped without padding.
        """
        return DispatchPlan(self._order(routing))

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

    def plan(self, routing: Routing) -> DispatchPlan:
        """As ``LocalDispatcher.plan``, to all ranks' experts. Ranks: all of the group.

        How many rows travel is under way to the host then; it waits for it, once, when the tokens leave.
        """
        order = self._order(routing)
        find_exchange = self._find_exchange(order)
        if self.num_copies > 1:
            order = with_copies(order, self.num_copies, self.num_owners)
        return DispatchPlan(order, find_exchange)

    def _find_exchange(self, order: ExpertOrder) -> Callable[[], TokenExchange]:
        """What returns who sends how many rows to whom. Ranks: all; it makes the host wait, unless all send the same to all."""
        num_ranks, num_experts = self.group.size(), self.num_local_experts
        if order.rows_of_each is not None:
            # All ranks have as many tokens, so all have the same capacity.
            even = [[order.rows_of_each] * num_experts] * num_ranks
            arriving = order.counts.new_full((num_ranks, num_experts), order.rows_of_each)
            return lambda: TokenExchange(self.group, sent=even, received=even, arriving=arriving)
        both = order.counts.new_empty(2, num_ranks, num_experts)
        leaving, arriving = both.unbind()
        leaving.view(self.num_owners, self.num_copies, num_experts).copy_(order.counts.view(self.num_owners, 1, -1))
        dist.all_to_all_single(arriving, leaving, group=self.group)
        counts = DelayedRead(both)

        def exchange() -> TokenExchange:
            sent, received = counts.tensor().tolist()
            return TokenExchange(self.group, sent=sent, received=received, arriving=arriving)

        return exchange


def build_dispatcher(config: TransformerConfig, pg_collection: ProcessGroupCollection | None) -> LocalDispatcher:
    """The dispatcher for these groups: local where one rank has all experts whole.

    Raises:
        ValueError: ``tp_ep`` is not ep x expt_tp ranks, where both are more than one.
    """
    ep, expt_tp = group_of(pg_collection, "ep"), group_of(pg_collection, "expt_tp")
    num_copies, num_owners = group_size(expt_tp), group_size(ep)
    if num_copies * num_owners == 1:
        return LocalDispatcher(config)
    group = ep if num_copies == 1 else expt_tp if num_owners == 1 else group_of(pg_collection, "tp_ep")
    if group is None or group.size() != num_copies * num_owners:
        raise ValueError(
            f"pg_collection.tp_ep must hold the ranks of expt_tp and ep ({num_copies} x {num_owners}), got"
            f" {group_size(group)}"
        )
    return AllToAllDispatcher(config, group, num_copies=num_copies)
