"""The division of samples into global batches, microbatches and ranks; a global batch is the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    """Samples of one step, over all ranks and microbatches."""

    data_parallel_size: int
    """Ranks that share a global batch."""

    def __post_init__(self) -> None:
        if min(self.micro_batch_size, self.global_batch_size, self.data_parallel_size) < 1:
            raise ValueError(f"batch sizes must be positive, got {self}")
        if self.global_batch_size % self.samples_per_microbatch != 0:
            raise ValueError(
                f"--global-batch-size must be a multiple of --micro-batch-size times the data-parallel ranks, got "
                f"{self.global_batch_size} and {self.micro_batch_size} * {self.data_parallel_size} = "
                f"{self.samples_per_microbatch}; change one of the sizes or the number of ranks"
            )

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
