"""Rows of a matrix in another order, some of them several times or not at all, without atomics in backward.

Shapes: n rows of the source, r rows of the destination, w width, a assignments, e experts, c copies of a source row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class RowMap:
    """Which source row each destination row is, and, the other way, where each source row went.

    Attributes:
        sources: [r] source row of each destination row; n: none, the row is zeros.
        places: [n, c] destination rows that are copies of each source row; r: none.
        has_gaps: some entry is n or r.
    """

    sources: torch.Tensor
    places: torch.Tensor
    has_gaps: bool = False

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """[n, w] -> [r, w]: destination rows; backward sums the gradients of a row's copies in a fixed order."""
        rows: torch.Tensor = _Spread.apply(x, self)  # type: ignore[no-untyped-call, unused-ignore]
        return rows

    def collect(self, y: torch.Tensor) -> torch.Tensor:
        """[r, w] -> [n, w]: the sums of each source row's copies, in a fixed order; the adjoint of ``spread``."""
        sums: torch.Tensor = _Collect.apply(y, self)  # type: ignore[no-untyped-call, unused-ignore]
        return sums


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: RowMap) -> torch.Tensor:
        ctx.rows = rows
        return _take(x, rows.sources, rows.has_gaps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _sum(grads[0], ctx.rows), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, rows: RowMap) -> torch.Tensor:
        ctx.rows = rows
        return _sum(y, rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _take(grads[0], ctx.rows.sources, ctx.rows.has_gaps), None


def _take(x: torch.Tensor, indices: torch.Tensor, has_gaps: bool) -> torch.Tensor:
    """Rows of x at ``indices``; zeros where an index is the number of rows."""
    if not has_gaps:
        return x.index_select(0, indices)
    if x.shape[0] == 0:
        return x.new_zeros(indices.shape[0], *x.shape[1:])
    taken = x.index_select(0, indices.clamp(max=x.shape[0] - 1))
    return taken.masked_fill_((indices == x.shape[0]).unsqueeze(1), 0)


def _sum(y: torch.Tensor, rows: RowMap) -> torch.Tensor:
    num_sources, copies = rows.places.shape
    taken = _take(y, rows.places.reshape(-1), rows.has_gaps)
    return taken if copies == 1 else taken.view(num_sources, copies, -1).sum(dim=1)


@dataclass(frozen=True, kw_only=True)
class ExpertOrder:
    """Assignments of tokens to experts, sorted by expert.

    Attributes:
        assignments: maps the [a] assignments to rows in the order of experts.
        counts: [e] rows of each expert, int64.
        rows_of_each: the same for every expert, where it is known to the host.
    """

    assignments: RowMap
    counts: torch.Tensor
    rows_of_each: int | None = None

    def of_tokens(self, topk: int) -> RowMap:
        """The map of the tokens themselves, each of which is the source of ``topk`` assignments."""
        rows = self.assignments
        # n for no source stays n: a // topk tokens.
        return replace(rows, sources=rows.sources // topk, places=rows.places.view(rows.places.shape[0] // topk, -1))


@torch.no_grad()
def with_copies(order: ExpertOrder, num_copies: int, num_owners: int) -> ExpertOrder:
    """The order in which the rows of each owner of consecutive experts stand ``num_copies`` times, block after block."""
    rows, device = order.assignments, order.counts.device
    num_rows = rows.sources.shape[0]
    sizes = order.counts.view(num_owners, -1).sum(dim=1)
    owners = torch.arange(num_owners, device=device).repeat_interleave(sizes, output_size=num_rows)
    before = (sizes.cumsum(0) - sizes)[owners] * (num_copies - 1)
    copies = torch.arange(num_copies, device=device)
    places = (torch.arange(num_rows, device=device) + before).unsqueeze(1) + copies * sizes[owners].unsqueeze(1)
    sources = rows.sources.new_empty(num_rows * num_copies)
    sources[places] = rows.sources.unsqueeze(1)
    # Assignments without a row have no copies either: the end of the new list.
    places = torch.cat((places, places.new_full((1, num_copies), sources.shape[0])))
    return replace(order, assignments=replace(rows, sources=sources, places=places[rows.places.squeeze(1)]))


@torch.no_grad()
def expert_order(experts: torch.Tensor, num_experts: int) -> ExpertOrder:
    """All assignments, of one expert in the order of tokens. ``experts``: [t, k]. The host does not wait."""
    by_expert, sources = experts.flatten().sort(stable=True)
    bounds = _bounds(by_expert, num_experts)
    places = _inverse(sources, torch.arange(sources.shape[0], device=sources.device), sources.shape[0])
    return ExpertOrder(assignments=RowMap(sources=sources, places=places), counts=bounds[1:] - bounds[:-1])


@torch.no_grad()
def expert_order_up_to(
    capacity: int, experts: torch.Tensor, num_experts: int, *, probs: torch.Tensor | None, pads: bool
) -> ExpertOrder:
    """At most ``capacity`` assignments of each expert; the others have no row.

    Args:
        experts: [t, k].
        probs: [t, k]: the most probable are kept (of equal ones the first); None: the first.
        pads: each expert has exactly ``capacity`` rows, the last of which may have no source. Without it the host waits
            for the device, to know how many rows there are.
    """
    flat = experts.flatten()
    preferred = torch.arange(flat.shape[0], device=flat.device)
    if probs is not None:
        preferred = probs.flatten().sort(descending=True, stable=True)[1]
    by_expert, order = flat[preferred].sort(stable=True)
    sources, bounds = preferred[order], _bounds(by_expert, num_experts)
    rank_in_expert = torch.arange(flat.shape[0], device=flat.device) - bounds[by_expert]
    is_kept = rank_in_expert < capacity
    if not pads:
        counts = (bounds[1:] - bounds[:-1]).clamp(max=capacity)
        kept = sources[is_kept]
        places = torch.where(is_kept, is_kept.cumsum(0) - 1, kept.shape[0])
        rows = RowMap(sources=kept, places=_inverse(sources, places, flat.shape[0]), has_gaps=True)
        return ExpertOrder(assignments=rows, counts=counts)
    num_rows = num_experts * capacity
    places = torch.where(is_kept, by_expert * capacity + rank_in_expert, num_rows)
    padded = torch.full((num_rows + 1,), flat.shape[0], device=flat.device)
    padded[places] = sources
    rows = RowMap(sources=padded[:-1], places=_inverse(sources, places, flat.shape[0]), has_gaps=True)
    counts = torch.full((num_experts,), capacity, device=flat.device)
    return ExpertOrder(assignments=rows, counts=counts, rows_of_each=capacity)


def _bounds(by_expert: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[e + 1] where each expert's assignments begin in the sorted list, and the end."""
    edges = torch.arange(num_experts + 1, device=by_expert.device)
    return torch.searchsorted(by_expert, edges)


def _inverse(sources: torch.Tensor, places: torch.Tensor, num_sources: int) -> torch.Tensor:
    """[n, 1] of ``places`` [n] in the order of ``sources``, each of which stands there once."""
    inverse = torch.empty(num_sources, dtype=places.dtype, device=places.device)
    inverse[sources] = places
    return inverse.unsqueeze(1)
