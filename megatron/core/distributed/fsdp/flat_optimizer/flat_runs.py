"""Runs: stretches of a flat shard that an update treats alike, and the blocks that its kernel cuts them into."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatBuffer


class Run(NamedTuple):
    """Elements [begin, end) of a flat shard, which share a row of the ``HyperparameterTable``, and ``weight`` if that matters.

    ``place``: if that matters, how many tensors have elements before those of this run's tensor.
    """

    begin: int
    end: int
    table_row: int = 0
    weight: int = 0
    place: int = 0


def runs_of(
    buffer: FlatBuffer, table_rows: Sequence[int], only: Sequence[bool] | None = None, *, by_tensor: bool = False
) -> list[Run]:
    """Return the fewest runs, ascending, that cover this rank's elements of the tensors and no padding.

    Args:
        buffer: the buffer whose local part is cut into runs. They hold for all buffers of its layout and placements.
        table_rows: [T] row of each tensor.
        only: [T] False for tensors to leave out; None takes all.
        by_tensor: each run is of one tensor, whose index is its ``weight``, with its ``place``.

    Ranks: pure; each computes its own.
    """
    spans = []
    for index, table_row in enumerate(table_rows):
        view = buffer.view(index)
        begin = int(view.storage_offset() - buffer.local.storage_offset())
        if view.numel():
            spans.append(Run(begin, begin + view.numel(), table_row, index))
    runs = [run._replace(place=place) for place, run in enumerate(sorted(spans)) if only is None or only[run.weight]]
    return merged(runs if by_tensor else [run._replace(weight=0, place=0) for run in runs])


def merged(runs: Iterable[Run]) -> list[Run]:
    """Join runs that touch and have the same row, weight and place."""
    found: list[Run] = []
    for run in sorted(runs):
        if found and found[-1].end == run.begin and found[-1][2:] == run[2:]:
            found[-1] = found[-1]._replace(end=run.end)
        else:
            found.append(run)
    return found


def block_table(runs: Sequence[Run], block_numel: int) -> torch.Tensor:
    """Return [B, 6] int32 (block, first, last, table row, weight, piece), one entry for each run in each block that it touches.

    A block is ``block_numel`` elements and begins at a multiple of that, so that whole blocks are read in wide words
    wherever runs begin. The entry's run covers elements [first, last) of the block. ``piece`` is where scales of moments are.
    """
    parts = []
    for run in runs:
        blocks = torch.arange(run.begin // block_numel, -(-run.end // block_numel))
        first = (run.begin - blocks * block_numel).clamp(min=0)
        last = (run.end - blocks * block_numel).clamp(max=block_numel)
        same = [torch.full_like(blocks, value) for value in (run.table_row, run.weight)]
        parts.append(torch.stack((blocks, first, last, *same, blocks + run.place), dim=1))
    return torch.cat(parts).int() if parts else torch.empty(0, 6, dtype=torch.int32)
