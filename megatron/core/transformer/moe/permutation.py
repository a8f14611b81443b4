"""Permutations of rows into expert order, with copies and dropped rows, without atomics in forward or backward.

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
    """A permutation of rows in both directions: the source of each destination row, and the copies of each source row.

    ``take`` and ``sum`` are each other's adjoint; autograd records neither.

    Attributes:
        sources: [r] source row of each destination row; n means none, and the row is zeros.
        places: [n, c] destination rows that are copies of each source row; r means none.
        has_gaps: whether some entry is n or r.
    """

    sources: torch.Tensor
    places: torch.Tensor
    has_gaps: bool = False

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the destination rows: [n, ...] -> [r, ...]."""
        if not self.has_gaps and (kernels := self._kernels_for_copies(x)) is not None:
            taken: torch.Tensor = kernels.copy_rows(x, self.places)
            return taken
        return _take(x, self.sources, self.has_gaps)

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        """Sum the copies of each source row in a fixed order: [r, ...] -> [n, ...]."""
        num_sources, copies = self.places.shape
        kernels = self._kernels_for_copies(y)
        if kernels is not None:
            sums: torch.Tensor = kernels.sum_rows(y, self.places, has_gaps=self.has_gaps)
            return sums
        taken = _take(y, self.places.view(-1), self.has_gaps)
        return taken if copies == 1 else taken.view(num_sources, copies, *y.shape[1:]).sum(dim=1)

    def _kernels_for_copies(self, x: torch.Tensor) -> ModuleType | None:
        return _kernels_on(x.device) if x.dim() == 2 and self.places.shape[1] > 1 else None


def _take(x: torch.Tensor, indices: torch.Tensor, has_gaps: bool) -> torch.Tensor:
    """Gather rows of x at ``indices``; an index equal to the number of rows gives zeros."""
    if not has_gaps:
        return x.index_select(0, indices)
    kernels = _kernels_on(x.device)
    if kernels is not None and x.dim() <= 2:
        # A sum of one row, in one pass; from fp32 on it is exact, and so is the row's own dtype.
        rows = x if x.dim() == 2 else x.unsqueeze(1)
        taken: torch.Tensor = kernels.sum_rows(rows, indices.unsqueeze(1), has_gaps=True)
        return taken if x.dim() == 2 else taken.squeeze(1)
    if x.shape[0] == 0:
        return x.new_zeros(indices.shape[0], *x.shape[1:])
    rows = x.index_select(0, indices.clamp(max=x.shape[0] - 1))
    is_gap = indices == x.shape[0]
    return rows.masked_fill_(is_gap if x.dim() == 1 else is_gap.unsqueeze(1), 0)


@dataclass(frozen=True, kw_only=True)
class ExpertOrder:
    """Assignments of tokens to experts, sorted by expert.

    Attributes:
        assignments: maps the [a] assignments to rows in expert order.
        tokens: maps tokens to the same rows; a token is the source of a / (number of tokens) consecutive assignments.
        counts: [e] rows of each expert, int64.
        ends: [e] index after each expert's last row, int32; None: not computed.
        rows_of_each: number of rows of each expert, where all have the same and the host knows it.
        bounds: [e + 1] bounds of each expert's assignments, dropped ones among them, where ``counts`` includes padding.
    """

    assignments: RowMap
    tokens: RowMap
    counts: torch.Tensor
    ends: torch.Tensor | None = None
    rows_of_each: int | None = None
    bounds: torch.Tensor | None = None

    def num_kept(self) -> torch.Tensor:
        """Return the [e] assignments of each expert that are not dropped, int64. The host does not wait."""
        if self.bounds is None:
            return self.counts
        return (self.bounds[1:] - self.bounds[:-1]).clamp(max=self.rows_of_each)


def of_tokens(assignments: RowMap, topk: int) -> RowMap:
    """Make the map of tokens, each of which is the source of ``topk`` assignments, from the map of assignments."""
    # The mark for no source, a, becomes a // topk, the number of tokens: again the mark for none.
    places = assignments.places.view(assignments.places.shape[0] // topk, -1)
    return replace(assignments, sources=assignments.sources // topk, places=places)


def expert_order(experts: torch.Tensor, num_experts: int) -> ExpertOrder:
    """Sort all [t, k] assignments by expert, those of one expert by token. The host does not wait."""
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
    tokens = of_tokens(assignments, experts.shape[1])
    return ExpertOrder(assignments=assignments, tokens=tokens, counts=bounds[1:] - bounds[:-1])


def expert_order_up_to(
    capacity: int, experts: torch.Tensor, num_experts: int, *, probs: torch.Tensor | None, pads: bool
) -> ExpertOrder:
    """Sort assignments by expert, keep at most ``capacity`` of each and drop the others.

    Args:
        experts: [t, k] expert of each assignment.
        probs: [t, k] probabilities: the most probable are kept (the first of equal ones); None: the first are kept.
        pads: give each expert exactly ``capacity`` rows, the last of which may have no source. Without it the host waits
            for the device to learn how many rows there are.
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
        return ExpertOrder(assignments=rows, tokens=of_tokens(rows, topk), counts=counts)
    num_rows = num_experts * capacity
    places = torch.where(is_kept, by_expert * capacity + rank_in_expert, num_rows)
    padded = torch.full((num_rows + 1,), flat.shape[0], device=flat.device)
    padded[places] = sources
    rows = RowMap(sources=padded[:-1], places=_inverse(sources, places, flat.shape[0]), has_gaps=True)
    counts = torch.full((num_experts,), capacity, device=flat.device)
    tokens = of_tokens(rows, topk)
    return ExpertOrder(assignments=rows, tokens=tokens, counts=counts, rows_of_each=capacity, bounds=bounds)


def with_copies(order: ExpertOrder, num_copies: int, num_owners: int) -> ExpertOrder:
    """Repeat the rows of each owner of consecutive experts ``num_copies`` times, block after block."""
    rows, device = order.assignments, order.counts.device
    num_rows = rows.sources.shape[0]
    sizes = order.counts.view(num_owners, -1).sum(dim=1)
    owners = torch.arange(num_owners, device=device).repeat_interleave(sizes, output_size=num_rows)
    before = (sizes.cumsum(0) - sizes)[owners] * (num_copies - 1)
    copies = torch.arange(num_copies, device=device)
    places = (torch.arange(num_rows, device=device) + before).unsqueeze(1) + copies * sizes[owners].unsqueeze(1)
    sources = rows.sources.new_empty(num_rows * num_copies)
    sources[places] = rows.sources.unsqueeze(1)
    # Dropped assignments have no copies either: their mark is the end of the new list.
    places = torch.cat((places, places.new_full((1, num_copies), sources.shape[0])))
    copied = replace(rows, sources=sources, places=places[rows.places.squeeze(1)])
    topk = rows.places.shape[0] // order.tokens.places.shape[0]
    return replace(order, assignments=copied, tokens=of_tokens(copied, topk), ends=None)


class Arrivals(NamedTuple):
    """Order of the rows of l experts that were received from g ranks."""

    rows: RowMap | None
    """Permutes received rows into expert order, those of one expert by rank; None: they are in this order already."""
    counts: torch.Tensor
    """[l] rows of each expert, int64."""
    ends: torch.Tensor | None
    """[l] index after each expert's last row, int32; None: not computed."""


def arrivals(sizes: torch.Tensor, known_sizes: list[list[int]]) -> Arrivals:
    """Compute the permutation into expert order of rows that arrive by rank, and of each rank by expert.

    Args:
        sizes: [g, l] numbers of rows, int64, on the device.
        known_sizes: the same on the host, which does not wait.
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
    """Reorder [r] rows that lie in blocks of [p, q] sizes to the block order [q, p]."""
    blocks = torch.split(rows, [size for line in sizes for size in line])
    num_columns = len(sizes[0])
    return torch.cat([block for column in range(num_columns) for block in blocks[column::num_columns]])


def _sorted(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort [a] experts stably; return them, in a small dtype, and the assignment of each."""
    # A radix sort makes one pass for each byte of the keys.
    return experts.to(torch.int16 if num_experts < 2**15 else torch.int32).sort(stable=True)


def _bounds(by_expert: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the [e + 1] bounds of each expert's assignments in the sorted list."""
    edges = torch.arange(num_experts + 1, dtype=by_expert.dtype, device=by_expert.device)
    return torch.searchsorted(by_expert, edges)


def _inverse(sources: torch.Tensor, places: torch.Tensor, num_sources: int) -> torch.Tensor:
    """Reorder ``places`` [n] by ``sources``, a permutation of n, to [n, 1]."""
    inverse = torch.empty(num_sources, dtype=places.dtype, device=places.device)
    inverse[sources] = places
    return inverse.unsqueeze(1)


def has_kernels(device: torch.device) -> bool:
    """Return whether Triton's kernels compute permutations on this device."""
    return _kernels_on(device) is not None


def _kernels_on(device: torch.device) -> ModuleType | None:
    is_served = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    return _kernels() if is_served else None


@functools.cache
def _kernels() -> ModuleType | None:
    """Import the Triton kernels at first use; None where Triton is not installed, as on a CPU."""
    try:
        from megatron.core.transformer.moe import permutation_kernels
    except ImportError:
        return None
    return permutation_kernels
