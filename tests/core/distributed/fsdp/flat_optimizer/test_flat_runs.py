"""Runs hold all parameters and no padding; blocks cover each element of a run once."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate

from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatBuffer
from megatron.core.distributed.fsdp.flat_optimizer.flat_runs import Run, block_table, merged, runs_of
from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout, TensorSlot

_RUNS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40), st.integers(0, 2), st.integers(0, 1)), max_size=8)


def _runs(pieces: list[tuple[int, int, int, int]]) -> list[Run]:
    """Return consecutive runs made of (gap, length, table row, weight), as of tensors in their order."""
    runs, at = [], 0
    for place, (gap, length, table_row, weight) in enumerate(pieces):
        runs.append(Run(at + gap, at + gap + length, table_row, weight, place))
        at += gap + length
    return runs


@given(_RUNS)
def test_merging_keeps_the_elements_and_leaves_nothing_to_merge(pieces: list[tuple[int, int, int, int]]) -> None:
    runs = _runs(pieces)
    found = merged(reversed(runs))
    assert {(at, *r[2:]) for r in runs for at in range(r.begin, r.end)} == {
        (at, *r[2:]) for r in found for at in range(r.begin, r.end)
    }
    assert all(a.end < b.begin or a[2:] != b[2:] for a, b in pairwise(found))


@given(_RUNS, st.sampled_from([1, 4, 16]))
def test_blocks_cover_each_element_once_with_its_table_row(pieces: list[tuple[int, int, int, int]], size: int) -> None:
    runs = _runs(pieces)
    table = block_table(runs, size)
    assert table.dtype == torch.int32 and table.shape[1] == 6
    covered = [(block * size + i, *of) for block, first, last, *of, _ in table.tolist() for i in range(first, last)]
    assert covered == [(at, *r[2:4]) for r in runs for at in range(r.begin, r.end)]
    assert all(0 <= first < last <= size for _, first, last, *_ in table.tolist())
    places = table[:, 5].tolist()
    assert len(set(places)) == len(places) and all(place < -(-runs[-1].end // size) + len(runs) for place in places)


def test_runs_of_a_buffer_leave_out_padding_and_empty_tensors() -> None:
    slots = (TensorSlot(torch.Size((2, 3)), 0), TensorSlot(torch.Size((4,)), 6), TensorSlot(torch.Size((0,)), 0))
    layout = FlatLayout((*slots, TensorSlot(torch.Size(()), 12)), 1, 16)
    buffer = FlatBuffer(layout, [Replicate()], [None], torch.empty(16))  # type: ignore[list-item]
    assert runs_of(buffer, [0, 0, 5, 0]) == [Run(0, 10, 0), Run(12, 13, 0)]
    by_tensor = [Run(0, 6, 0, 0, 0), Run(6, 10, 0, 1, 1), Run(12, 13, 0, 3, 2)]
    assert runs_of(buffer, [0, 0, 5, 0], by_tensor=True) == by_tensor
    assert runs_of(buffer, [0, 0, 5, 0], [True, False, True, True], by_tensor=True) == [by_tensor[0], by_tensor[2]]
    assert runs_of(buffer, [1, 0, 5, 0]) == [Run(0, 6, 1), Run(6, 10, 0), Run(12, 13, 0)]
