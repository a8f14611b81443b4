"""The division of samples into global batches, microbatches and ranks; a global batch is the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.utils.data import Sampler


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The division of a global batch into microbatches and ranks.

    Raises:
        ValueError: the global batch is not a multiple of the samples of all ranks in one forward.
    """

    micro_batch_size: int
    """Samples of one rank in one forward."""

    global_batch_size: int
    """Samples of one step, over all ranks and microbatches; with a schedule, of the last steps."""

    data_parallel_size: int
    """Ranks that share a global batch."""

    schedule: tuple[tuple[int, int], ...] = ()
    """(consumed samples, global batch size from there on), ascending from 0 on; empty: the size is constant."""

    def __post_init__(self) -> None:
        for flag, batch_size in (("micro", self.micro_batch_size), ("global", self.global_batch_size)):
            if batch_size < 1:
                raise ValueError(f"--{flag}-batch-size must be at least 1, got {batch_size}")
        starts = [start for start, _ in self.schedule]
        if starts and (
            starts[0] != 0 or starts != sorted(set(starts)) or self.schedule[-1][1] != self.global_batch_size
        ):
            raise ValueError(
                "a schedule of batch sizes must begin at 0, ascend and end with the global batch size, got "
                f"{self.schedule} and {self.global_batch_size}"
            )
        for size in dict.fromkeys((*(size for _, size in self.schedule), self.global_batch_size)):
            if size < 1 or size % self.samples_per_microbatch != 0:
                raise ValueError(
                    f"{'a scheduled batch size' if self.schedule else '--global-batch-size'} must be a multiple of "
                    f"--micro-batch-size times the data-parallel ranks, got {size} and {self.micro_batch_size} * "
                    f"{self.data_parallel_size} = {self.samples_per_microbatch}; change one of the sizes or the number of ranks"
                )

    def at(self, consumed_samples: int) -> BatchConfig:
        """Return the division of the global batch that begins after so many samples, of constant size."""
        if not self.schedule:
            return self
        size = [size for start, size in self.schedule if start <= consumed_samples][-1]
        return replace(self, global_batch_size=size, schedule=())

    def consumed_after(self, iterations: int, consumed_samples: int = 0) -> int:
        """Return the samples that are consumed when so many more iterations are done."""
        for size, end in self._parts():
            if end is not None and consumed_samples >= end:
                continue
            count = iterations if end is None else min(iterations, -(-(end - consumed_samples) // size))
            consumed_samples += count * size
            iterations -= count
        return consumed_samples

    def iterations_until(self, samples: int, consumed_samples: int = 0) -> int:
        """Return how many more global batches fit into so many samples, consumed ones included."""
        iterations = 0
        for size, end in self._parts():
            if end is not None and consumed_samples >= end:
                continue
            count = max(0, samples - consumed_samples) // size
            if end is not None and consumed_samples + count * size >= end:
                count = -(-(end - consumed_samples) // size)
                consumed_samples += count * size
                iterations += count
            else:
                return iterations + count
        return iterations

    def _parts(self) -> list[tuple[int, int | None]]:
        """Return [(global batch size, consumed samples at which it ends)]; None: never."""
        if not self.schedule:
            return [(self.global_batch_size, None)]
        ends = [start for start, _ in self.schedule[1:]]
        return list(zip((size for _, size in self.schedule), (*ends, None), strict=True))

    @property
    def samples_per_microbatch(self) -> int:
        """Number of samples of all ranks in one forward."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of a rank in one step."""
        return self.global_batch_size // self.samples_per_microbatch


class SequentialBatchSampler(Sampler[list[int]]):
    """A sampler of one rank's microbatches in one pass over the data.

    Microbatch ``m`` of a step that starts at sample ``s`` has the samples from ``s + (m * ranks + rank) * size`` on, so all
    ranks together use consecutive samples.

    Args:
        total_samples: number of samples; an incomplete microbatch at the end is dropped.
        consumed_samples: samples that all ranks have used before.

    Ranks: pure; each its own part.
    """

    def __init__(self, batch: BatchConfig, *, rank: int, total_samples: int, consumed_samples: int = 0) -> None:
        self.batch, self.rank = batch, rank
        self.total_samples, self.consumed_samples = total_samples, consumed_samples

    def __len__(self) -> int:
        return max(0, self.total_samples - self.consumed_samples) // self.batch.samples_per_microbatch

    def __iter__(self) -> Iterator[list[int]]:
        size = self.batch.micro_batch_size
        for microbatch in range(len(self)):
            start = self.consumed_samples + microbatch * self.batch.samples_per_microbatch + self.rank * size
            yield list(range(start, start + size))


class CyclicBatchSampler(Sampler[list[int]]):
    """A sampler of one rank's microbatches in epochs without end, each in a random order that follows from its number.

    Args:
        total_samples: number of samples; those of an incomplete microbatch of all ranks are left out of an epoch.
        consumed_samples: samples that all ranks have used before; a multiple of a microbatch of all ranks.
        shards_data: each rank draws from a part of its own; off, all draw from one order.

    Raises:
        ValueError: there is no whole microbatch for all ranks, or one was begun.

    Ranks: pure; each its own part.
    Source: the orders of Megatron-LM's sampler for ``--dataloader-type cyclic``.
    """

    def __init__(
        self,
        batch: BatchConfig,
        *,
        rank: int,
        total_samples: int,
        consumed_samples: int = 0,
        shards_data: bool = True,
    ) -> None:
        self.batch, self.rank, self.shards_data = batch, rank, shards_data
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        of_all = batch.samples_per_microbatch
        if total_samples < of_all or consumed_samples % of_all != 0:
            raise ValueError(
                f"the data must have at least {of_all} samples, and the consumed ones must be a multiple of that (--micro-batch-size "
                f"times the data-parallel ranks), got {total_samples} and {consumed_samples}"
            )

    def __iter__(self) -> Iterator[list[int]]:
        of_all = self.batch.samples_per_microbatch
        num_batches = self.total_samples // of_all
        epoch, first = divmod(self.consumed_samples // of_all, num_batches)
        while True:
            yield from self._batches(epoch, first, num_batches)
            epoch, first = epoch + 1, 0

    def _batches(self, epoch: int, first: int, num_batches: int) -> Iterator[list[int]]:
        size, ranks = self.batch.micro_batch_size, self.batch.data_parallel_size
        generator = torch.Generator().manual_seed(epoch)
        if self.shards_data:
            own = num_batches * size
            order = torch.randperm(own, generator=generator)[first * size :] + self.rank * own
        else:
            whole = self.total_samples // size * size
            order = torch.randperm(whole, generator=generator)[first * size * ranks :][self.rank :: ranks]
        for start in range(0, (num_batches - first) * size, size):
            yield order[start : start + size].tolist()
