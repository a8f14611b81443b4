"""Which stretches of a flat shard are parameters, not padding, and which of them the optimizer treats alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from megatron.core.distributed.fsdp.buffers.dbuffer import DBuffer


class Run(NamedTuple):
    """Elements [begin, end) of a flat shard, all of one cohort: they are updated with the same coefficients."""

    begin: int
    end: int
    cohort: int = 0


def runs_of(buffer: DBuffer, cohorts: Sequence[int], only: Sequence[bool] | None = None) -> list[Run]:
    """The fewest runs that hold all elements of the tensors that lie here, ascending, and nothing of the padding.

    Args:
        buffer: whose local part is cut; other buffers of its layout and placements are cut alike.
        cohorts: [T] the cohort of each tensor.
        only: [T] False for tensors to be left out; all are taken when None.

    Ranks: pure; each computes its own.
    """
    spans = []
    for index, cohort in enumerate(cohorts):
        if only is not None and not only[index]:
            continue
        view = buffer.view(index)
        begin = int(view.storage_offset() - buffer.local.storage_offset())
        if view.numel():
            spans.append(Run(begin, begin + view.numel(), cohort))
    return merged(spans)


def merged(runs: Iterable[Run]) -> list[Run]:
    """Runs that touch and have one cohort are one run."""
    found: list[Run] = []
    for run in sorted(runs):
        if found and found[-1].end == run.begin and found[-1].cohort == run.cohort:
            found[-1] = found[-1]._replace(end=run.end)
        else:
            found.append(run)
    return found


def block_table(runs: Sequence[Run], block_numel: int) -> torch.Tensor:
    """[B, 4] int32 (block, first, last, cohort) for each block of ``block_numel`` elements that a run lies in.

    A block begins at a multiple of its size, so that whole ones can be read in wide words whatever the runs are; the
    run has elements [first, last) of it. A block that several runs share has an entry for each.
    """
    parts = []
    for run in runs:
        blocks = torch.arange(run.begin // block_numel, -(-run.end // block_numel))
        first = (run.begin - blocks * block_numel).clamp(min=0)
        last = (run.end - blocks * block_numel).clamp(max=block_numel)
        parts.append(torch.stack((blocks, first, last, torch.full_like(blocks, run.cohort)), dim=1))
    return torch.cat(parts).int() if parts else torch.empty(0, 4, dtype=torch.int32)
