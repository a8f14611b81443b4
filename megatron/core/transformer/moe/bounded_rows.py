"""Rows of an exchange whose size is constant, so that the host need not know how many rows go where.

[Note: bounded rows] With ``moe_expert_rank_capacity_factor`` each rank sends every rank that holds experts the same number of rows,
the capacity: first its rows in expert order, then padding. Assignments beyond the capacity are dropped, the last experts' of
a rank first; a capacity of all assignments drops none. What arrives is permuted into expert order with all padding at its end, by counts that
stay on the device. Experts compute the rows before the last one's end (``ExpertRows.ends``); what stands after it is never used. So the
host never waits, and a step can be captured as a CUDA graph.

Shapes: t tokens, k experts of a token, a assignments (t * k), e experts, g ranks that rows are sent to (o owners of experts, each with c
copies), l experts of a rank.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from megatron.core.transformer.moe.permutation import (
    Arrivals,
    ExpertOrder,
    RowMap,
    expert_order,
    has_kernels,
    of_tokens,
)

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def rank_capacity(num_assignments: int, num_owners: int, config: TransformerConfig) -> int | None:
    """Return how many of a microbatch's assignments an owner of experts takes from each rank; None: all of them, however many.

    Source: ours; Megatron-Core's field of this name bounds what a rank takes from all ranks together.
    """
    factor = config.moe_expert_rank_capacity_factor
    if factor is None or num_owners == 1:
        return None
    return min(math.ceil(num_assignments / num_owners * factor), num_assignments)


def bounded_order(
    experts: torch.Tensor, num_experts: int, *, num_owners: int, num_copies: int, capacity: int
) -> ExpertOrder:
    """Sort all [t, k] assignments by expert and give each owner ``capacity`` rows, repeated ``num_copies`` times.

    Rows without a source are padding. Counts are of assignments that are not dropped. The host does not wait.
    """
    if has_kernels(experts.device):
        sources, tokens, places, counts = _kernels().sort_bounded(
            experts, num_experts, num_owners=num_owners, num_copies=num_copies, capacity=capacity
        )
        return ExpertOrder(
            assignments=RowMap(sources=sources, places=places.view(-1, num_copies), has_gaps=True),
            tokens=RowMap(sources=tokens, places=places, has_gaps=True),
            counts=counts,
        )
    order, device = expert_order(experts, num_experts), experts.device
    rows, counts = order.assignments, order.counts.view(num_owners, -1)
    sizes = counts.sum(dim=1)
    starts = sizes.cumsum(0) - sizes
    slots = torch.arange(capacity, device=device)
    num_assignments = rows.sources.shape[0]
    taken = rows.sources[(starts.unsqueeze(1) + slots).clamp(max=num_assignments - 1)]
    taken = torch.where(slots < sizes.unsqueeze(1), taken, num_assignments)
    sources = taken.unsqueeze(1).expand(-1, num_copies, -1).reshape(-1)
    owners = (experts.flatten() // counts.shape[1]).unsqueeze(1)
    within = rows.places - starts[owners]
    places = (owners * num_copies + torch.arange(num_copies, device=device)) * capacity + within
    places = torch.where(within < capacity, places, sources.shape[0])
    ends = counts.cumsum(1).clamp(max=capacity)
    bounded = RowMap(sources=sources, places=places, has_gaps=True)
    kept = torch.diff(ends, prepend=ends.new_zeros(num_owners, 1)).view(-1)
    return ExpertOrder(assignments=bounded, tokens=of_tokens(bounded, experts.shape[1]), counts=kept)


def bounded_arrivals(sizes: torch.Tensor, capacity: int) -> Arrivals:
    """Compute the permutation into expert order of rows that arrive by rank, ``capacity`` of each, and of each rank by expert.

    Args:
        sizes: [g, l] numbers of rows that are not padding, int64, on the device. The host does not wait.
    """
    if has_kernels(sizes.device):
        sources, places, counts, ends = _kernels().sort_bounded_blocks(sizes, capacity)
        return Arrivals(RowMap(sources=sources, places=places, has_gaps=True), counts, ends)
    num_ranks, num_experts = sizes.shape
    num_rows, counts = num_ranks * capacity, sizes.sum(dim=0)
    slots = torch.arange(capacity, device=sizes.device).expand(num_ranks, -1)
    ends_of_rank = sizes.cumsum(1)
    is_padding = slots >= ends_of_rank[:, -1:]
    expert = torch.searchsorted(ends_of_rank, slots.contiguous(), right=True).clamp(max=num_experts - 1)
    ends = counts.cumsum(0)
    # Where a rank's rows of an expert begin, less where they begin among those that it sent.
    shifts = (ends - counts) + sizes.cumsum(0) - ends_of_rank
    places = torch.where(is_padding, num_rows, shifts.gather(1, expert) + slots).view(-1)
    sources = torch.full((num_rows + 1,), num_rows, device=sizes.device)
    sources[places] = torch.where(is_padding.view(-1), num_rows, torch.arange(num_rows, device=sizes.device))
    rows = RowMap(sources=sources[:-1], places=places.unsqueeze(1), has_gaps=True)
    return Arrivals(rows, counts, ends.to(torch.int32))


@functools.cache
def _kernels() -> ModuleType:
    from megatron.core.transformer.moe import bounded_rows_kernels

    return bounded_rows_kernels
