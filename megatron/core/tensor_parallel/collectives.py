"""Asynchronous collectives of tensor parallelism; their results are waited for where they are read.

All work on contiguous tensors, along the first dim. On CUDA a wait makes the current stream wait, not the host, so work
that is launched before the wait overlaps the collective. Shapes: s sequence (the first dim), n ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

# torch 2.13 renames these collectives and warns about the old names, which are the only ones in 2.11.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending(NamedTuple):
    """A collective in flight."""

    result: torch.Tensor
    work: Any

    def wait(self) -> torch.Tensor:
        """Make the current stream wait for the collective and return its result."""
        self.work.wait()
        return self.result


def begin_gather(part: torch.Tensor, group: ProcessGroup) -> Pending:
    """Start to gather the ranks' parts [s/n, ...] to [s, ...], in rank order. Ranks: all of the group."""
    part = part.contiguous()
    full = part.new_empty((part.shape[0] * group.size(), *part.shape[1:]))
    return Pending(full, _gather(full, part, group=group, async_op=True))


def begin_sum(tensor: torch.Tensor, group: ProcessGroup) -> Pending:
    """Start to sum ``tensor``, which must be contiguous, over ranks in place. Ranks: all of the group."""
    return Pending(tensor, dist.all_reduce(tensor, group=group, async_op=True))


def begin_sum_and_scatter(full: torch.Tensor, group: ProcessGroup) -> Pending:
    """Start to sum ``full`` [s, ...] over ranks and scatter it to parts [s/n, ...]. Ranks: all of the group.

    Raises:
        ValueError: s is not a multiple of the number of ranks.
    """
    part = full.new_empty((rows_of_a_part(full, group), *full.shape[1:]))
    return Pending(part, _reduce_scatter(part, full.contiguous(), group=group, async_op=True))


def rows_of_a_part(full: torch.Tensor, group: ProcessGroup) -> int:
    """Return s/n of ``full`` [s, ...].

    Raises:
        ValueError: s is not a multiple of the number of ranks.
    """
    if full.shape[0] % group.size() != 0:
        raise ValueError(
            "the sequence length must be a multiple of the tensor-parallel ranks that share it, got"
            f" {full.shape[0]} and {group.size()} ranks; pad the samples"
        )
    return full.shape[0] // group.size()
