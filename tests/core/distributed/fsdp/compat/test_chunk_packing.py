"""Buffers that users construct have Megatron-FSDP's layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.distributed.fsdp.compat.chunk_packing import GlobalLayout, non_leading_numel, pack_chunks


@pytest.mark.parametrize(
    ("shapes", "num_ranks", "starts", "size"),
    [
        # A small tensor fills the free end of a large one's last chunk of 12.
        ([(5, 4), (2, 6), (3,)], 2, (0, 24, 20), 48),
        # Each begins at a multiple of its row size.
        ([(4, 4), (1, 6)], 2, (0, 18), 24),
        # Two large ones share a chunk, with a small one between them.
        ([(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)], 5, (0, 12, 32, 28, 48), 60),
        ([(8, 4)], 1, (0,), 32),
        ([(), (3,)], 2, (0, 1), 4),
        ([], 3, (), 0),
    ],
)
def test_layouts_are_megatron_fsdps(
    shapes: list[tuple[int, ...]], num_ranks: int, starts: tuple[int, ...], size: int
) -> None:
    layout = GlobalLayout.build(shapes, num_ranks)
    assert (layout.tensor_to_offset, layout.size) == (starts, size)
    assert layout.tensor_shapes == tuple(map(torch.Size, shapes))


@given(
    st.lists(st.lists(st.integers(1, 9), max_size=3), max_size=8),
    st.integers(1, 6),
)
def test_any_tensors_find_a_place(shapes: list[list[int]], num_ranks: int) -> None:
    """The layout's constructor checks that tensors do not overlap and that ranks get whole rows."""
    layout = pack_chunks(shapes, num_ranks=num_ranks)
    assert all(
        start % non_leading_numel(torch.Size(shape)) == 0
        for shape, start in zip(shapes, layout.tensor_to_offset, strict=True)
    )


def test_rows_without_elements_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows must have elements, got a tensor of shape \[3, 0\]"):
        pack_chunks([(3, 0)], num_ranks=2)
    with pytest.raises(ValueError, match="num_ranks must be positive, got 0"):
        pack_chunks([(3,)], num_ranks=0)
