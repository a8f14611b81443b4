"""Rows of a matrix in another order, some of them several times or not at all, without atomics either way.

Shapes: n rows of the source, r rows of the destination, a assignments, e experts, c copies of a source row, g ranks,
l experts of a rank.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

import torch


@dataclass(frozen=True, kw_only=True)
class RowMap:
    """Which source row each destination row is, and, the other way, where each source row went.

    ``take`` and ``sum`` are each other's adjoint; autograd records neither.

    Attributes:
        sources: [r] source row of each destination row; n: none, the row is zeros.
        places: [n, c] destination rows that are copies of each source row; r: none.
        has_gaps: some entry is n or r.
    """

    sources: torch.Tensor
    places: torch.Tensor
    has_gaps: bool = False

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] -> [r, ...]: destination rows."""
        return _take(x, self.sources, self.has_gaps)

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        """[r, ...] -> [n, ...]: the sums of each source row's copies, in a fixed order."""
        num_sources, copies = self.places.shape
        kernels = _kernels_on(y.device) if y.dim() == 2 and copies > 1 else None
        if kernels is not None:
            sums: torch.Tensor = kernels.sum_rows(y, self.places, has_gaps=self.has_gaps)
            return sums
        taken = _take(y, self.places.view(-1), self.has_gaps)
        return taken if copies == 1 else taken.view(num_sources, copies, *y.shape[1:]).sum(dim=1)


def _take(x: torch.Tensor, indices: torch.Tensor, has_gaps: bool) -> torch.Tensor:
    """Rows of x at ``indices``; zeros where an index is the number of rows."""
    if not has_gaps:
        return x.index_select(0, indices)
    if x.shape[0] == 0:
        return x.new_zeros(indices.shape[0], *x.shape[1:])
    taken = x.index_select(0, indices.clamp(max=x.shape[0] - 1))
    is_gap = indices == x.shape[0]
    return taken.masked_fill_(is_gap if x.dim() == 1 else is_gap.unsqueeze(1), 0)


@dataclass(frozen=True, kw_only=True)
class ExpertOrder:
    """Assignments of tokens to experts, sorted by expert.

    Attributes:
        assignments: maps the [a] assignments to rows in the order of experts.
        tokens: maps the tokens, each of which is the source of a / (number of tokens) consecutive assignments.
        counts: [e] rows of each expert, int64.
        ends: [e] where each expert's rows end, int32, where that is known.
        rows_of_each: the same for every expert, where it is known to the host.
    """

    assignments: RowMap
    tokens: RowMap
    counts: torch.Tensor
    ends: torch.Tensor | None = None
    rows_of_each: int | None = None


def _of_tokens(assignments: RowMap, topk: int) -> RowMap:
    """The map of tokens, each of which is the source of ``topk`` assignments."""
    # n for no source stays n: a // topk tokens.
    places = assignments.places.view(assignments.places.shape[0] // topk, -1)
    return replace(assignments, sources=assignments.sources // topk, places=places)


def expert_order(experts: torch.Tensor, num_experts: int) -> ExpertOrder:
    """All assignments, of one expert in the order of tokens. ``experts``: [t, k]. The host does not wait."""
    kernels = _kernels_on(experts.device)
    if kernels is not None:
        sources, tokens, places, counts, ends = kernels.sort_assignments(experts, num_experts)
        return ExpertOrder(
            assignments=RowMap(sources=sources, places=places.view(-1, 1)),
            tokens=RowMap(sources=tokens, places=places),
            counts=counts,
            ends=ends,
        )
    by_expert, sources = _sorted(experts.view(-1), num_experts)
    bounds = _bounds(by_expert, num_experts)
    places = _inverse(sources, torch.arange(sources.shape[0], device=sources.device), sources.shape[0])
    assignments = RowMap(sources=sources, places=places)
    tokens = _of_tokens(assignments, experts.shape[1])
    return ExpertOrder(assignments=assignments, tokens=tokens, counts=bounds[1:] - bounds[:-1])


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
    flat, topk = experts.view(-1), experts.shape[1]
    preferred = torch.arange(flat.shape[0], device=flat.device)
    if probs is not None:
        preferred = probs.flatten().sort(descending=True, stable=True)[1]
    by_expert, order = _sorted(flat[preferred], num_experts)
    sources, bounds, by_expert = preferred[order], _bounds(by_expert, num_experts), by_expert.long()
    rank_in_expert = torch.arange(flat.shape[0], device=flat.device) - bounds[by_expert]
    is_kept = rank_in_expert < capacity
    if not pads:
        counts = (bounds[1:] - bounds[:-1]).clamp(max=capacity)
        kept = sources[is_kept]
        places = torch.where(is_kept, is_kept.cumsum(0) - 1, kept.shape[0])
        rows = RowMap(sources=kept, places=_inverse(sources, places, flat.shape[0]), has_gaps=True)
        return ExpertOrder(assignments=rows, tokens=_of_tokens(rows, topk), counts=counts)
    num_rows = num_experts * capacity
    places = torch.where(is_kept, by_expert * capacity + rank_in_expert, num_rows)
    padded = torch.full((num_rows + 1,), flat.shape[0], device=flat.device)
    padded[places] = sources
    rows = RowMap(sources=padded[:-1], places=_inverse(sources, places, flat.shape[0]), has_gaps=True)
    counts = torch.full((num_experts,), capacity, device=flat.device)
    return ExpertOrder(assignments=rows, tokens=_of_tokens(rows, topk), counts=counts, rows_of_each=capacity)


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
    copied = replace(rows, sources=sources, places=places[rows.places.squeeze(1)])
    topk = rows.places.shape[0] // order.tokens.places.shape[0]
    return replace(order, assignments=copied, tokens=_of_tokens(copied, topk), ends=None)


class Arrivals(NamedTuple):
    """Rows of l experts that came from g ranks."""

    rows: RowMap | None
    """From the order of arrival to that of experts, of one expert in the order of ranks; None where these are the same."""
    counts: torch.Tensor
    """[l] rows of each expert, int64."""
    ends: torch.Tensor | None
    """[l] where each expert's rows end, int32, where that is known."""


def arrivals(sizes: torch.Tensor, known_sizes: list[list[int]]) -> Arrivals:
    """The order of rows that arrive rank by rank, of each rank expert by expert.

    Args:
        sizes: [g, l] rows, int64. known_sizes: the same on the host, which does not wait.
    """
    if sizes.shape[1] == 1:
        return Arrivals(None, sizes.sum(dim=0), None)
    num_rows = sum(map(sum, known_sizes))
    kernels = _kernels_on(sizes.device)
    if kernels is not None:
        sources, places, counts, ends = kernels.sort_blocks(sizes, num_rows)
        return Arrivals(RowMap(sources=sources, places=places), counts, ends)
    rows = torch.arange(num_rows, device=sizes.device)
    by_expert = list(zip(*known_sizes, strict=True))
    sources = _transposed(rows, known_sizes)
    places = _transposed(rows, by_expert).unsqueeze(1)
    return Arrivals(RowMap(sources=sources, places=places), sizes.sum(dim=0), None)


def _transposed(rows: torch.Tensor, sizes: Sequence[Sequence[int]]) -> torch.Tensor:
    """[r] that lie as blocks of [p, q] sizes, in the order of [q, p]."""
    blocks = torch.split(rows, [size for line in sizes for size in line])
    num_columns = len(sizes[0])
    return torch.cat([block for column in range(num_columns) for block in blocks[column::num_columns]])


def _sorted(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[a] experts in their order, in a small dtype, and which assignment each is; of equal ones the first comes first."""
    # A radix sort passes over each byte of the keys.
    return experts.to(torch.int16 if num_experts < 2**15 else torch.int32).sort(stable=True)


def _bounds(by_expert: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[e + 1] where each expert's assignments begin in the sorted list, and the end."""
    edges = torch.arange(num_experts + 1, dtype=by_expert.dtype, device=by_expert.device)
    return torch.searchsorted(by_expert, edges)


def _inverse(sources: torch.Tensor, places: torch.Tensor, num_sources: int) -> torch.Tensor:
    """[n, 1] of ``places`` [n] in the order of ``sources``, each of which stands there once."""
    inverse = torch.empty(num_sources, dtype=places.dtype, device=places.device)
    inverse[sources] = places
    return inverse.unsqueeze(1)


def _kernels_on(device: torch.device) -> ModuleType | None:
    is_served = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return _kernels() if is_served else None


@functools.cache
def _kernels() -> ModuleType | None:
    """Triton is imported at the first use: on a CPU there may be none."""
    try:
        from megatron.core.transformer.moe import permutation_kernels
    except ImportError:
        return None
    return permutation_kernels
