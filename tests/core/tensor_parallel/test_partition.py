"""``assemble`` undoes ``partition``, and parts have the rows of Megatron's partition stride."""

from __future__ import annotations

import pytest
import torch

from megatron.core.tensor_parallel.partition import assemble, part_extent, part_ranges, partition


def test_a_part_of_two_matrices_is_a_part_of_each() -> None:
    """[gate; up] of 4 rows each over 2 ranks."""
    full = torch.arange(8).unsqueeze(1)
    assert partition(full, 0, 2, 0, 2).flatten().tolist() == [0, 1, 4, 5]
    assert partition(full, 0, 2, 1, 2).flatten().tolist() == [2, 3, 6, 7]
    assert partition(full, 0, 1, 1, 2).flatten().tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_assembling_undoes_the_cut(dim: int, stride: int, size: int) -> None:
    full = torch.randn(24, 48)
    parts = [partition(full, dim, stride, rank, size) for rank in range(size)]
    assert all(part.shape[dim] == part_extent(full.shape[dim], stride, size) for part in parts)
    assert torch.equal(assemble(parts, dim, stride), full)


def test_ranges_are_where_the_part_lies() -> None:
    full = torch.arange(24)
    for rank in range(2):
        pieces = [full[start:end] for start, end in part_ranges(24, 3, rank, 2)]
        assert torch.equal(torch.cat(pieces), partition(full, 0, 3, rank, 2))


def test_an_extent_that_does_not_divide_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(ValueError, match=r"multiple of 4 \(2 matrices x 2 ranks\), got 6"):
        partition(torch.zeros(6), 0, 2, 0, 2)
    with pytest.raises(ValueError, match=r"multiple of 4 \(4 ranks\), got 6"):
        part_extent(6, 1, 4)
    with pytest.raises(ValueError, match=r"multiple of partition_stride \(2\), got 3"):
        assemble([torch.zeros(3), torch.zeros(3)], 0, 2)
