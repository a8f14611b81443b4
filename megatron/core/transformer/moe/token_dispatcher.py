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

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.core.delayed_read import DelayedRead
from megatron.core.process_groups_config import group_of, group_rank, group_size
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer.moe.bounded_rows import bounded_order, rank_capacity
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection, sort_chunks_by_idxs
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


class MoEAlltoAllTokenDispatcher:
    """Dispatch and combine in stages by routing maps, for callers; ``MoELayer`` uses ``AllToAllDispatcher``.

    Rows are permuted by expert, sent to the ranks of these, gathered over the tensor-parallel ranks of an expert, and permuted
    by local expert; combine goes the same way back. Each stage is differentiable. The host waits for the counts.

    Args:
        local_expert_indices: this rank's ``num_local_experts`` experts, neighbors.
        pg_collection: has ``ep`` and ``expt_tp`` and, where both are several ranks, ``tp_ep``; None: those of
            ``initialize_model_parallel``.

    Attributes:
        input_splits, output_splits: rows sent to and received from each expert-parallel rank.
        num_global_tokens_per_local_expert: [ranks of ``tp_ep``, local experts] rows that they send.

    Source: Megatron-Core's class of this name (names and order of rows).
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        if list(local_expert_indices) != [local_expert_indices[0] + i for i in range(num_local_experts)]:
            raise ValueError(
                f"local_expert_indices must be {num_local_experts} neighboring experts, got {local_expert_indices}"
            )
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        self.config, self.num_local_experts = config, num_local_experts
        self.local_expert_indices = local_expert_indices
        self.ep_group, self.tp_group = group_of(groups, "ep"), group_of(groups, "expt_tp")
        self.ep_size, self.tp_size = group_size(self.ep_group), group_size(self.tp_group)
        self.tp_ep_group = group_of(groups, "tp_ep") if self.tp_size * self.ep_size > 1 else None
        chunks = torch.arange(self.tp_size * self.ep_size * num_local_experts)
        self.sort_input_by_local_experts = chunks.view(-1, num_local_experts).t().reshape(-1)
        self.restore_output_by_local_experts = chunks.view(num_local_experts, -1).t().reshape(-1)
        self.drop_and_pad = config.moe_pad_expert_input_to_capacity

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Exchange the counts of rows of a routing map [t, e]; return the [l] rows of each local expert.

        Ranks: all of ``tp_ep``. The host waits.
        """
        sent = routing_map.sum(dim=0)
        self.num_out_tokens = int(sent.sum())
        of_ranks = gather_from_sequence_parallel_region(sent, group=self.tp_ep_group).view(
            self.ep_size, self.tp_size, -1
        )
        first = self.local_expert_indices[0]
        received = of_ranks[..., first : first + self.num_local_experts].transpose(0, 1).contiguous()
        self.input_splits = sent.view(self.ep_size, -1).sum(dim=1).tolist()
        self.output_splits = received.sum(dim=2)[group_rank(self.tp_group)].tolist()
        self.output_splits_tp = received.sum(dim=(1, 2)).tolist()
        self.num_global_tokens_per_local_expert = received.view(-1, self.num_local_experts).cpu()
        return received.sum(dim=(0, 1))

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Permute [..., h] tokens, and their factors [t, e], by expert. Ranks: as ``preprocess``."""
        self.hidden_shape, self.routing_map, self.probs = hidden_states.shape, routing_map, probs
        self.tokens_per_expert = self.preprocess(routing_map)
        experts, self.reversed_local_input_permutation_mapping = routing_map.t().nonzero(as_tuple=True)
        rows = hidden_states.reshape(-1, self.hidden_shape[-1])[self.reversed_local_input_permutation_mapping]
        return rows, probs[self.reversed_local_input_permutation_mapping, experts]

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send rows and factors to the ranks of their experts. Ranks: all of ``ep``."""
        splits = (self.output_splits, self.input_splits)
        rows = all_to_all(self.ep_group, permutated_local_input_tokens, *splits)
        return rows, all_to_all(self.ep_group, permuted_probs, *splits)

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gather rows and factors over ``expt_tp`` and sort them by local expert; return them with the [l] rows of each."""
        gathered = [
            all_to_all(
                self.tp_group,
                x.repeat(self.tp_size, *(1,) * (x.dim() - 1)),
                self.output_splits_tp,
                [x.shape[0]] * self.tp_size,
            )
            for x in (global_input_tokens, global_probs)
        ]
        order = (self.num_global_tokens_per_local_expert.reshape(-1), self.sort_input_by_local_experts)
        rows, probs = sort_chunks_by_idxs(gathered[0], *order, probs=gathered[1])
        assert probs is not None, "given"
        return rows, self.tokens_per_expert, probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sort results by rank, and sum and scatter them over ``expt_tp``."""
        sizes = self.num_global_tokens_per_local_expert.t().reshape(-1)
        rows, _ = sort_chunks_by_idxs(hidden_states, sizes, self.restore_output_by_local_experts)
        own = sum(self.output_splits)
        rows = all_to_all(self.tp_group, rows, [own] * self.tp_size, self.output_splits_tp)
        return rows.view(self.tp_size, own, *rows.shape[1:]).sum(dim=0)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Send results back to the ranks of their tokens. Ranks: all of ``ep``."""
        return all_to_all(self.ep_group, hidden_states, self.input_splits, self.output_splits)

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> torch.Tensor:
        """Sum the results of each token: [rows, h] -> [..., h]."""
        tokens = self.reversed_local_input_permutation_mapping
        sums = permutated_local_input_tokens.new_zeros(self.routing_map.shape[0], self.hidden_shape[-1])
        return sums.index_add(0, tokens, permutated_local_input_tokens).view(self.hidden_shape)
