"""Generated documents for benchmarks and tests."""

from __future__ import annotations

from typing import Any

import numpy


class MockGPTLowLevelDataset:
    """Documents that count upwards from 1 and end with the tokenizer's end of document.

    A document depends on its index alone; counts beyond the vocabulary wrap around.

    Source: Megatron-Core's mock data, the same tokens where the vocabulary has 4,096 ids or more.
    """

    seed: int = 0
    """Seed of the lengths."""
    size: int = 100000
    """Number of documents."""
    max_sequence_length: int = 4096
    """Upper bound of the lengths (exclusive), in tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.path_prefix = "mock data"
        generator = numpy.random.default_rng(seed=self.seed)
        self.sequence_lengths = generator.integers(
            low=1, high=self.max_sequence_length, size=self.size, dtype=numpy.int32
        )
        self._counts = numpy.arange(1, self.max_sequence_length, dtype=numpy.int64)
        num_ids = getattr(tokenizer, "vocab_size", None)
        if num_ids is not None:
            self._counts %= num_ids

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> numpy.ndarray:
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> numpy.ndarray:
        """Return ``length`` tokens of document ``idx`` from token ``offset`` on; None: up to its end."""
        end = int(self.sequence_lengths[idx])
        stop = end if length is None else offset + length
        tokens = self._counts[offset:stop].copy()
        if stop == end and tokens.size:
            tokens[-1] = self.tokenizer.eod
        return tokens
