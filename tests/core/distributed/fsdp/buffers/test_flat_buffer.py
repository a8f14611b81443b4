"""One flat buffer under any placement: which elements rest on a rank, and how they come together and apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.buffers.flat_buffer import FlatBuffer, FlatStorage, local_range
from megatron.core.distributed.fsdp.comm.transport import Transport, scale_and_accumulate
from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout, pack_rows

SHAPES = [torch.Size(shape) for shape in [(5, 3), (), (7,), (2, 4), (0, 3)]]
CPU = torch.device("cpu")


class Axis(Transport):
    """One rank's place on a mesh axis; moves by looking at the other ranks' buffers, which ``pieces`` gives in order."""

    name = "stand-in"

    def __init__(self, size: int, rank: int, pieces: list[torch.Tensor] | None = None) -> None:
        self.size, self.rank, self.ranks = size, rank, list(range(size))
        self.pieces = pieces or []

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        assert torch.equal(shard, self.pieces[self.rank])
        full.copy_(torch.cat(self.pieces))

    def reduce_scatter(
        self, out: torch.Tensor, full: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        scale_and_accumulate(
            out, torch.stack(self.pieces).sum(0).chunk(self.size)[self.rank], scale=scale, accumulate=accumulate
        )

    def all_reduce(
        self, out: torch.Tensor, full: torch.Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        scale_and_accumulate(out, torch.stack(self.pieces).sum(0), scale=scale, accumulate=accumulate)

    def broadcast(self, tensor: torch.Tensor) -> None:
        raise AssertionError("a buffer broadcasts nothing")

    def maximum(self, tensor: torch.Tensor) -> None:
        raise AssertionError("a buffer compares nothing")

    def exchange(self, value: Any) -> list[Any]:
        raise AssertionError("a buffer exchanges nothing")


def _layout(num_ranks: int) -> FlatLayout:
    return pack_rows(SHAPES, num_ranks=num_ranks, alignment=1)


def _buffer(placements: list[Placement], axes: list[Axis], local: torch.Tensor | None = None) -> FlatBuffer:
    num_ranks = 1
    for axis in axes:
        num_ranks *= axis.size
    layout = _layout(num_ranks)
    begin, end = local_range(layout, placements, axes)
    return FlatBuffer(layout, placements, axes, torch.empty(end - begin) if local is None else local)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
def test_ranks_share_all_elements_in_order(num_ranks: int) -> None:
    layout = _layout(num_ranks)
    ranges = [local_range(layout, [Shard(0)], [Axis(num_ranks, rank)]) for rank in range(num_ranks)]
    assert [begin for begin, _ in ranges] + [layout.total_numel] == [0] + [end for _, end in ranges]
    assert local_range(layout, [Replicate()], [Axis(num_ranks, 0)]) == (0, layout.total_numel)


def test_cuts_go_inside_out() -> None:
    """With two axes a rank's inner piece is contiguous, and the outer axis cuts that piece again."""
    layout = _layout(8)
    quarter, eighth = layout.total_numel // 4, layout.total_numel // 8
    for outer in range(2):
        for inner in range(4):
            axes = [Axis(2, outer), Axis(4, inner)]
            assert local_range(layout, [Replicate(), Shard(0)], axes) == (inner * quarter, (inner + 1) * quarter)
            begin = inner * quarter + outer * eighth
            assert local_range(layout, [Shard(0), Shard(0)], axes) == (begin, begin + eighth)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_views_are_the_rows_that_rest_here(num_ranks: int) -> None:
    whole = _buffer([Replicate()], [Axis(num_ranks, 0)])
    whole.local.copy_(torch.arange(whole.local.numel()))
    for index, shape in enumerate(SHAPES):
        full = whole.view(index)
        assert full.shape == shape
        if not shape:
            continue
        parts = []
        for rank in range(num_ranks):
            axes = [Axis(num_ranks, rank)]
            shard = _buffer([Shard(0)], axes, _buffer([Replicate()], axes, whole.local).piece([Shard(0)]))
            parts.append(shard.view(index))
            assert shard.view(index).untyped_storage().data_ptr() == whole.local.untyped_storage().data_ptr()
        assert torch.equal(torch.cat(parts), full)


def test_a_buffer_takes_only_storage_of_its_size() -> None:
    with pytest.raises(ValueError, match=r"must have .* elements, got 3"):
        _buffer([Shard(0)], [Axis(2, 0)], torch.zeros(3))
    buffer = _buffer([Shard(0)], [Axis(2, 0)])
    assert buffer.local_nbytes == 4 * buffer.local.numel() == 4 * buffer.layout.segment_numel


def test_gather_and_reduce() -> None:
    whole = torch.arange(_layout(2).total_numel, dtype=torch.float32)
    pieces = list(whole.chunk(2))
    for rank in range(2):
        axes = [Axis(2, rank, pieces)]
        full = _buffer([Replicate()], axes)
        for all_gather, target, shard in _buffer([Shard(0)], axes, pieces[rank]).gathers(full):
            all_gather(target, shard)
        assert torch.equal(full.local, whole)
        partial = _buffer([Partial()], [Axis(2, rank, [whole, 2 * whole])], whole)
        for placement, expected in ((Shard(0), 3 * pieces[rank]), (Replicate(), 3 * whole)):
            out = torch.empty_like(expected)
            reduce, summand = partial.reduction([placement])
            reduce(out, summand, scale=1.0, accumulate=False)
            assert torch.equal(out, expected)


def test_moves_that_are_none() -> None:
    axes = [Axis(2, 0)]
    assert not _buffer([Replicate()], axes).gathers(_buffer([Replicate()], axes)), "what is whole needs no gather"
    with pytest.raises(ValueError, match="gather goes from shards to replicas"):
        _buffer([Replicate()], axes).gathers(_buffer([Shard(0)], axes))
    with pytest.raises(NotImplementedError, match="one partial axis is reduced at a time"):
        _buffer([Shard(0)], axes).reduction([Replicate()])
    two = [Axis(2, 0), Axis(2, 0)]
    with pytest.raises(NotImplementedError, match="one partial axis"):
        _buffer([Partial(), Partial()], two).reduction([Shard(0), Shard(0)])


def test_storage_comes_and_goes_under_its_views() -> None:
    storage = FlatStorage(10, torch.float32, CPU)
    view = storage.flat[2:5]
    storage.free()
    assert storage.flat.untyped_storage().size() == 0 and not storage.allocated
    storage.free()
    storage.allocate()
    storage.flat.fill_(3.0)
    assert view.tolist() == [3.0] * 3 and storage.nbytes == 40
    storage.move(torch.ones(10))
    storage.free()
    assert storage.in_arena and storage.allocated and storage.flat.sum() == 10, "a range of an arena stays"
