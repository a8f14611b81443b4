"""Token dispatchers: they plan how a microbatch's tokens reach their experts.

[Note: rows of experts] A row is one assignment of a token to an expert. Rows are permuted into expert order, so the rows
of an expert are consecutive, and so are those of a rank's experts. With experts on several ranks one all-to-all dispatches
the rows and one combines the results. Only the device knows how many rows go where, so the host waits for the counts, once
for each layer; the shared expert and the permutation are queued before the wait, so that the device has work meanwhile.
Where experts' matrices are split over tensor-parallel ranks, each of these ranks gets a copy of the row, and the token's own
rank sums their results: an all-gather and a reduce-scatter within the same two all-to-alls.

[Note: what a wait costs] After a wait the host is not ahead of the device, so each operation that it queues until the next
wait adds its host time to the step. Hence dispatch and combine are one autograd node each (``token_exchange.py``), a
permutation is one kernel (``permutation_kernels.py``), and received rows are permuted by their counts, without sorting.

Shapes: t tokens, k experts of a token, h hidden size, e experts, l experts of this rank, r rows of this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.core.delayed_read import DelayedRead
from megatron.core.process_groups_config import group_of, group_size
from megatron.core.transformer.moe.bounded_rows import bounded_order, rank_capacity
from megatron.core.transformer.moe.permutation import ExpertOrder, expert_order, expert_order_up_to, with_copies
from megatron.core.transformer.moe.routing import Routing, capacity
from megatron.core.transformer.moe.token_exchange import BoundedExchange, DispatchPlan, TokenExchange

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.alternating_passes import AlternatingPasses
    from megatron.core.transformer.transformer_config import TransformerConfig


class LocalDispatcher:
    """Dispatcher of a rank that holds all experts: it permutes rows, without communication.

    Attributes:
        passes: a forward and a backward that take turns while rows are exchanged; None: there are none.
    """

    def __init__(self, config: TransformerConfig) -> None:
        assert config.num_moe_experts, "a dispatcher is built for experts only"
        self.config, self.num_experts = config, config.num_moe_experts
        self.passes: AlternatingPasses | None = None

    def plan(self, routing: Routing) -> DispatchPlan:
        """Plan the dispatch of a microbatch's tokens. Ranks: each alone.

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
    """Dispatcher of experts that are divided over ranks. See [Note: rows of experts].

    Args:
        group: the ranks that hold the experts; the ``num_copies`` tensor-parallel ranks of an expert are neighbours in it.
    """

    def __init__(self, config: TransformerConfig, group: ProcessGroup, *, num_copies: int = 1) -> None:
        super().__init__(config)
        self.group, self.num_copies = group, num_copies
        self.num_owners = group.size() // num_copies
        self.num_local_experts = self.num_experts // self.num_owners

    def plan(self, routing: Routing) -> DispatchPlan:
        """Plan the dispatch to the experts of all ranks. Ranks: all of the group.

        Starts the copy of the counts to the host, which waits for it once, when the rows are sent.
        """
        bound = rank_capacity(routing.experts.numel(), self.num_owners, self.config)
        if bound is not None:
            return self._bounded_plan(routing, bound)
        order = self._order(routing)
        find_exchange = self._find_exchange(order)
        if self.num_copies > 1:
            order = with_copies(order, self.num_copies, self.num_owners)
        return DispatchPlan(order, find_exchange, self.passes)

    def _bounded_plan(self, routing: Routing, capacity: int) -> DispatchPlan:
        """Plan an exchange of constant size; the host never waits. Ranks: all of the group. See [Note: bounded rows]."""
        order = bounded_order(
            routing.experts,
            self.num_experts,
            num_owners=self.num_owners,
            num_copies=self.num_copies,
            capacity=capacity,
        )
        sent = order.counts.view(self.num_owners, 1, -1).expand(-1, self.num_copies, -1).contiguous()
        received = torch.empty_like(sent).view(self.group.size(), -1)
        dist.all_to_all_single(received, sent.view_as(received), group=self.group)
        exchange = BoundedExchange(self.group, capacity=capacity, received=received, passes=self.passes)
        return DispatchPlan(order, lambda: exchange, self.passes)

    def _find_exchange(self, order: ExpertOrder) -> Callable[[], TokenExchange]:
        """Exchange the counts of rows and return a function that waits for them and builds the exchange. Ranks: all.

        With padding every rank sends the same number to each expert, so nothing is exchanged and nobody waits.
        """
        num_ranks, num_experts = self.group.size(), self.num_local_experts
        if order.rows_of_each is not None:
            # All ranks have as many tokens, so all have the same capacity.
            even = [[order.rows_of_each] * num_experts] * num_ranks
            on_device = order.counts.new_full((num_ranks, num_experts), order.rows_of_each)
            return lambda: TokenExchange(
                self.group, sent=even, received=even, received_on_device=on_device, passes=self.passes
            )
        both = order.counts.new_empty(2, num_ranks, num_experts)
        sent, received = both.unbind()
        sent.view(self.num_owners, self.num_copies, num_experts).copy_(order.counts.view(self.num_owners, 1, -1))
        dist.all_to_all_single(received, sent, group=self.group)
        counts = DelayedRead(both)

        def exchange() -> TokenExchange:
            num_sent, num_received = counts.tensor().tolist()
            return TokenExchange(
                self.group, sent=num_sent, received=num_received, received_on_device=received, passes=self.passes
            )

        return exchange


def build_dispatcher(config: TransformerConfig, pg_collection: ProcessGroupCollection | None) -> LocalDispatcher:
    """Build the dispatcher for these process groups: local where one rank has all experts whole.

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
