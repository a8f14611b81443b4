"""Megatron-Core's import path of small functions of tensor parallelism."""

from __future__ import annotations

import torch


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Cut the last dim into equal parts: views, or copies with ``contiguous_split_chunks``.

    Raises:
        ValueError: it is not a multiple of the parts.
    """
    if tensor.shape[-1] % num_partitions:
        raise ValueError(f"the last dim must be a multiple of {num_partitions} parts, got {tensor.shape[-1]}")
    parts = tensor.split(tensor.shape[-1] // num_partitions, dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


class VocabUtility:
    """The range of token ids of a tensor-parallel rank."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return (first id, first id of the next rank)."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """Return (first id, first id of the next rank); the vocabulary must be a multiple of the ranks."""
        if global_vocab_size % world_size:
            raise ValueError(f"the vocabulary must be a multiple of {world_size} ranks, got {global_vocab_size}")
        part = global_vocab_size // world_size
        return rank * part, (rank + 1) * part
