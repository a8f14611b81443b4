"""DTensors on unevenly split rows give the numbers of the whole tensor, or refuse; they never take rows for even."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Size
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import CommDebugMode

from megatron.core.distributed.fsdp.dtensor.placements import RowShard, local_rows
from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout, pack_rows
from megatron.core.distributed.fsdp.layout.granule import Granule
from tests.support.dtensor_operations import (
    ELEMENTWISE,
    FOREACH,
    REDUCED,
    REFUSED,
    assert_optimizers_step_as_on_the_whole,
)
from tests.support.launch import run_ranks
from tests.support.layouts import row_ranges, row_shard, rows

# Uneven rows, fewer rows than ranks, one dimension, more than two; large enough rows that some ranks own none; cut at
# blocks of rows, the last one short, and not at all.
SHAPES = [Size(shape) for shape in [(5, 3), (7,), (2, 4), (11, 2, 2), (1, 6), (3,), (10, 3), (16, 3), (4, 5)]]
GRANULES = [Granule.row()] * 6 + [Granule.rows(2), Granule.rows(3), Granule.whole()]

# Checks by the number of ranks that they run on; all of one number share one launch.
CHECKS: dict[int, dict[str, Callable[[], None]]] = {1: {}, 2: {}, 4: {}}


def on_ranks(*worlds: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(check: Callable[[], None]) -> Callable[[], None]:
        for world in worlds:
            CHECKS[world][check.__name__] = check
        return check

    return register


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _layout(num_ranks: int) -> FlatLayout:
    return pack_rows(SHAPES, num_ranks=num_ranks, alignment=1, granules=GRANULES)


def _full(index: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + index)
    return torch.randn(SHAPES[index], generator=generator)


def _split(full: torch.Tensor, mesh: DeviceMesh, placement: RowShard) -> Any:
    begin, end = placement.rows(full.shape[0], rank=mesh.get_local_rank(), num_ranks=mesh.size())
    local = full[begin:end].clone()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=full.shape, stride=full.stride())


def _all_split(mesh: DeviceMesh, seed: int = 0) -> list[Any]:
    layout = _layout(mesh.size())
    return [_split(_full(index, seed), mesh, row_shard(layout, index)) for index in range(len(SHAPES))]


def _counting() -> Any:
    """Counts the collectives that run in its scope."""
    return CommDebugMode()


def _elsewhere(placement: RowShard, full: torch.Tensor, mesh: DeviceMesh) -> RowShard:
    """Another split of the same rows: one row later in segments of one row more."""
    rows = -(-full.shape[0] // mesh.size()) + 1
    return RowShard(placement.row_numel, rows * placement.row_numel, placement.row_numel)


def _assert_same(tensor: Any, full: torch.Tensor, placement: RowShard | None = None) -> None:
    """This rank's rows of ``tensor``, placed as said where a placement is given, are those of ``full``.

    Compared in place: gathering each result, which is checked once below, would take most of the time.
    """
    assert isinstance(tensor, DTensor) and tensor.shape == full.shape
    assert placement is None or tensor.placements == (placement,)
    if any(each.is_partial() for each in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    assert torch.equal(tensor.to_local(), local_rows(tensor, full)), f"{tensor} is not {full}"


# The placement by itself.


def test_placements_are_values() -> None:
    placement = RowShard(3, 10, 2)
    assert placement == RowShard(3, 10, 2) and hash(placement) == hash(RowShard(3, 10, 2))
    for other in (RowShard(4, 10, 2), RowShard(3, 11, 2), RowShard(3, 10, 1), Shard(0), Replicate()):
        assert placement != other and other != placement
        assert (placement,) != (other,)
    assert isinstance(placement, Shard) and placement.is_shard() and placement.is_shard(0) and not placement.is_shard(1)
    assert not placement.is_replicate() and not placement.is_partial()
    assert repr(placement) == "RowShard(start=3, segment_numel=10, row_numel=2)"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_placements_can_be_copied_and_pickled(copied: Callable[[RowShard], RowShard]) -> None:
    clone = copied(RowShard(3, 10, 2))
    assert type(clone) is RowShard and clone == RowShard(3, 10, 2)


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"0 or more, got -1, 10 and 2"):
        RowShard(-1, 10, 2)


def test_a_tensor_beyond_the_segments_is_refused() -> None:
    """A placement used for another tensor or number of ranks would lose rows in silence."""
    with pytest.raises(ValueError, match="on 2 ranks holds 4 rows, got a tensor of 5"):
        RowShard(0, 4, 2).rows(5, rank=0, num_ranks=2)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)).map(Size), min_size=1, max_size=6),
    st.integers(1, 9),
    st.sampled_from([Granule.row(), Granule.rows(3), Granule.whole()]),
)
@settings(max_examples=200, deadline=None)
def test_rows_are_those_of_the_layout(shapes: list[Size], num_ranks: int, granule: Granule) -> None:
    """Of whatever granules: blocks of rows and whole tensors are rows, cut at fewer places."""
    layout = pack_rows(shapes, num_ranks=num_ranks, alignment=4, granules=[granule] * len(shapes))
    for index, shape in enumerate(shapes):
        placement = row_shard(layout, index)
        ranges = [placement.rows(shape[0], rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
        assert ranges == list(row_ranges(layout, index))


def test_blocks_of_rows_and_whole_tensors_are_cut_at_their_granules() -> None:
    """What the checks below run on, here on 4 ranks."""
    layout = _layout(4)
    assert row_ranges(layout, 6) == ((0, 0), (0, 6), (6, 10), (10, 10)), "blocks of 2 rows"
    assert row_ranges(layout, 7) == ((0, 15), (15, 16), (16, 16), (16, 16)), "blocks of 3 rows, the last of one row"
    assert sorted(end - begin for begin, end in row_ranges(layout, 8)) == [0, 0, 0, 4], "the whole tensor"


# Gathering and splitting.


@on_ranks(1, 2, 4)
def redistribution_makes_round_trips() -> None:
    mesh = _mesh()
    layout = _layout(mesh.size())
    for index, tensor in enumerate(_all_split(mesh)):
        full, placement = _full(index), row_shard(layout, index)
        _assert_same(tensor, full, placement)
        begin, end = placement.rows(full.shape[0], rank=dist.get_rank(), num_ranks=dist.get_world_size())
        assert torch.equal(tensor.to_local(), full[begin:end]) and torch.equal(tensor.full_tensor(), full)
        whole = tensor.redistribute(placements=[Replicate()])
        assert torch.equal(whole.to_local(), full)
        _assert_same(whole.redistribute(placements=[placement]), full, placement)
        even = tensor.redistribute(placements=[Shard(0)])
        expected = distribute_tensor(full, mesh, [Shard(0)])
        assert even.placements == (Shard(0),) and torch.equal(even.to_local(), expected.to_local())
        _assert_same(even.redistribute(placements=[placement]), full, placement)
        other = _elsewhere(placement, full, mesh)
        _assert_same(tensor.redistribute(placements=[other]), full, other)
        if full.ndim > 1:
            columns = tensor.redistribute(placements=[Shard(1)])
            assert torch.equal(columns.to_local(), distribute_tensor(full, mesh, [Shard(1)]).to_local())
            _assert_same(columns.redistribute(placements=[placement]), full, placement)
        partial = DTensor.from_local(full * (dist.get_rank() + 1), mesh, [Partial()], run_check=False)
        total = sum(range(1, mesh.size() + 1))
        torch.testing.assert_close(partial.redistribute(placements=[placement]).full_tensor(), full * total)
        _assert_same(tensor.to(torch.bfloat16), full.to(torch.bfloat16), placement)


@on_ranks(2)
def tensors_without_elements() -> None:
    mesh = _mesh()
    shapes = [Size(shape) for shape in [(0, 3), (4, 0), (5,)]]
    layout = pack_rows(shapes, num_ranks=mesh.size())
    for index, shape in enumerate(shapes):
        tensor = _split(torch.ones(shape), mesh, row_shard(layout, index))
        _assert_same(tensor * 2, torch.full(shape, 2.0))
        _assert_same(tensor.flatten(), torch.ones(shape).flatten())
        _assert_same(tensor.view(-1).view(shape), torch.ones(shape))
        leaf = tensor.requires_grad_()
        leaf.flatten().square().sum().backward()
        _assert_same(leaf.grad, torch.full(shape, 2.0))


@on_ranks(2)
def a_local_tensor_of_other_rows_is_refused() -> None:
    """PyTorch takes 2 rows on each of 2 ranks for 4; the placement says 3 and 1."""
    placement, local = RowShard(0, 9, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"must be told the shape of a tensor placed by Rows.*shape=p\.shape"):
        DTensor.from_local(local, _mesh(), [placement], run_check=False)
    shape = torch.Size((4, 3))
    tensor = DTensor.from_local(local, _mesh(), [placement], run_check=False, shape=shape, stride=(3, 1))
    with pytest.raises(ValueError, match=r"must hold rows \[\d, \d\) .* got 2 rows; pass shape and stride"):
        tensor.full_tensor()


@on_ranks(2)
def torchs_distribute_tensor_cuts_where_the_placement_says() -> None:
    """Also in integers that gloo does not know: the remainders of bf16 weights are int16."""
    layout = _layout(2)
    for index in range(len(SHAPES)):
        for dtype in (torch.float32, torch.int16):
            full, placement = _full(index).to(dtype), row_shard(layout, index)
            mine = full if dist.get_rank() == 0 else torch.zeros_like(full)  # the first rank's counts
            tensor = distribute_tensor(mine, _mesh(), [placement])
            begin, end = placement.rows(full.shape[0], rank=dist.get_rank(), num_ranks=2)
            assert tensor.placements == (placement,) and tensor.dtype == dtype
            assert torch.equal(tensor.to_local(), full[begin:end])
            assert torch.equal(tensor.full_tensor(), full)


@on_ranks(4)
def rows_split_on_one_axis_of_two() -> None:
    """Hybrid sharding: rows split over the inner axis of a mesh, replicated or split by columns over the outer."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    layout = _layout(2)
    for index in range(len(SHAPES)):
        full, placement = _full(index), row_shard(layout, index)
        begin, end = placement.rows(full.shape[0], rank=mesh.get_local_rank("inner"), num_ranks=2)
        tensor: Any = DTensor.from_local(
            full[begin:end], mesh, [Replicate(), placement], run_check=False, shape=full.shape, stride=full.stride()
        )
        doubled = tensor + tensor
        assert doubled.placements == (Replicate(), placement)
        assert torch.equal(doubled.full_tensor(), 2 * full)
        assert torch.equal(tensor.redistribute(placements=[Replicate(), Shard(0)]).full_tensor(), full)
        torch.testing.assert_close(tensor.norm().full_tensor(), full.norm())
        if full.ndim > 1:
            both = tensor.redistribute(placements=[Shard(1), placement])
            assert torch.equal((both * 3).full_tensor(), full * 3)
            assert torch.equal(both.redistribute(placements=[Replicate(), placement]).full_tensor(), full)


# Operations.


@on_ranks(1, 4)
def elementwise_operations_stay_on_their_rows() -> None:
    mesh = _mesh()
    layout = _layout(mesh.size())
    for name, operation in ELEMENTWISE.items():
        for index, (first, second) in enumerate(zip(_all_split(mesh, 0), _all_split(mesh, 1), strict=True)):
            full = _full(index, 0)
            with _counting() as communication:
                result = operation(first, second)
            assert communication.get_total_counts() == 0, f"{name} communicates"
            placement = row_shard(layout, index)
            _assert_same(result, operation(full, _full(index, 1)), placement)
            _assert_same(first, full, placement)


@on_ranks(1, 4)
def foreach_operations_stay_on_their_rows() -> None:
    mesh = _mesh()
    layout = _layout(mesh.size())
    for name, operation in FOREACH.items():
        split, full = _all_split(mesh, 0), [_full(index, 0) for index in range(len(SHAPES))]
        with _counting() as communication:
            results = operation(split, _all_split(mesh, 1))
        assert communication.get_total_counts() == 0, f"{name} communicates"
        expected = operation(full, [_full(index, 1) for index in range(len(SHAPES))])
        for index, (got, wanted) in enumerate(zip(results or split, expected or full, strict=True)):
            _assert_same(got, wanted, row_shard(layout, index))


@on_ranks(1, 4)
def reductions_and_gathered_operations_are_those_of_the_whole() -> None:
    mesh = _mesh()
    for name, operation in REDUCED.items():
        for index, tensor in enumerate(_all_split(mesh)):
            full = _full(index)
            if full.ndim > 2 and name in ("matmul", "outer"):
                continue
            got, wanted = operation(tensor), operation(full)
            got = got.full_tensor() if isinstance(got, DTensor) else got
            # Sums over ranks are in another order.
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6, msg=lambda text: f"{name} {index}: {text}")  # noqa: B023


@on_ranks(2)
def operations_that_cannot_be_right_are_refused() -> None:
    """Views and writes through them would be lost, random numbers would depend on the split."""
    tensor = _all_split(_mesh())[0]
    for name, operation in REFUSED.items():
        before = tensor.to_local().clone()
        try:
            operation(tensor)
        except (NotImplementedError, RuntimeError):
            assert torch.equal(tensor.to_local(), before), f"{name} wrote before it was refused"
        else:
            raise AssertionError(f"{name} was not refused")


@on_ranks(2, 4)
def views_of_columns_share_memory() -> None:
    """The views keep the tensor's rows, so nothing is gathered, and writes to them reach the tensor."""
    mesh = _mesh()
    layout = _layout(mesh.size())
    for index, tensor in enumerate(_all_split(mesh)):
        full, placement = _full(index), row_shard(layout, index)
        views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "unsqueeze": lambda a: a.unsqueeze(-1),
            "squeeze": lambda a: a.unsqueeze(1).squeeze(1),
        }
        if full.ndim > 1:
            views |= {"slice": lambda a: a[:, 1:3], "select": lambda a: a[:, 1]}
        for view in views.values():
            written, expected = tensor.clone(), full.clone()
            with _counting() as counted:
                seen = view(written)
                seen.mul_(3)
            assert counted.get_total_counts() == 0
            _assert_same(seen, view(expected).mul_(3), placement)
            _assert_same(written, expected, placement)
        if full.ndim > 1:
            sums, wanted = tensor.sum(dim=-1, keepdim=True), full.sum(dim=-1, keepdim=True)
            _assert_same(sums.expand(full.shape), wanted.expand(full.shape), placement)
            normalized: Any = torch.nn.functional.normalize(tensor, dim=-1)
            torch.testing.assert_close(normalized.full_tensor(), torch.nn.functional.normalize(full, dim=-1))


@on_ranks(2, 4)
def tensors_with_fewer_rows_than_ranks_are_written_by_broadcasting() -> None:
    """Torch's own rules treat such a tensor as one that cannot be split."""
    mesh = _mesh()
    for index, tensor in enumerate(_all_split(mesh)):
        full = _full(index)
        if full.ndim > 1:
            tensor.sub_(tensor.mean(dim=-1, keepdim=True)).mul_(tensor.amax(dim=-1, keepdim=True))
            full.sub_(full.mean(dim=-1, keepdim=True)).mul_(full.amax(dim=-1, keepdim=True))
            torch.testing.assert_close(tensor.full_tensor(), full)


PENALTIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sums of rows": lambda a: a.sum(dim=-1).square().sum(),
    "norms of rows": lambda a: a.norm(dim=-1).sum(),
    "norms of columns": lambda a: a.norm(dim=0).sum(),
    "distance from the mean": lambda a: (a - a.mean()).square().sum(),
    "distance from means of rows": lambda a: (a - a.mean(dim=-1, keepdim=True)).pow(3).sum(),
    "distance from means of columns": lambda a: (a - a.mean(dim=0)).pow(3).sum(),
    "products with sums of rows": lambda a: (a * a.sum(dim=-1, keepdim=True)).sum(),
    "normalized": lambda a: (a / a.norm()).pow(3).sum(),
    "columns": lambda a: (a[..., 1:] if a.ndim > 1 else a).square().sum(),
    "unsqueezed": lambda a: a.unsqueeze(-1).square().sum(),
}


@on_ranks(2, 4)
def penalties_have_the_gradients_of_the_whole() -> None:
    mesh = _mesh()
    for name, penalty in PENALTIES.items():
        for index, tensor in enumerate(_all_split(mesh)):
            leaf, whole = tensor.requires_grad_(), _full(index).requires_grad_()
            penalty(leaf).backward()
            penalty(whole).backward()
            torch.testing.assert_close(
                leaf.grad.full_tensor(),
                whole.grad,
                rtol=1e-5,
                atol=1e-5,
                msg=lambda text: f"{name} {index}: {text}",  # noqa: B023
            )


@on_ranks(2)
def square_tensors_do_not_confuse_rows_with_columns() -> None:
    """Three rows and one: a vector as long as the columns, and views whose even split torch would allow."""
    mesh = _mesh()
    full = torch.arange(16.0).view(4, 4)
    square = _split(full, mesh, RowShard(0, 12, 4))
    row_sums = square.sum(dim=1)
    _assert_same(row_sums, full.sum(dim=1), RowShard(0, 12, 4))
    _assert_same(square * row_sums, full * full.sum(dim=1))
    _assert_same(row_sums + square, full + full.sum(dim=1))
    _assert_same(square.sum(dim=0) - square, full.sum(dim=0) - full)
    for shape in [(2, 8), (2, 2, 4)]:
        with pytest.raises(RuntimeError, match=r"view|flatten"):
            square.view(shape)


@on_ranks(2)
def views_share_memory_where_ranks_hold_whole_rows_of_them() -> None:
    """As custom optimizers flatten parameters, and put what they computed back into shape."""
    mesh = _mesh()
    full = torch.arange(16.0).view(4, 4)
    square = _split(full, mesh, RowShard(0, 12, 4))
    with CommDebugMode() as communication:
        flat, pairs = square.view(-1), square.reshape(8, 2)
        again = flat.mul(2).view_as(square)
    assert communication.get_total_counts() == 0
    _assert_same(flat, full.flatten(), RowShard(0, 12, 1))
    _assert_same(pairs, full.view(8, 2), RowShard(0, 12, 2))
    _assert_same(again, 2 * full, RowShard(0, 12, 4))
    _assert_same(torch.cat([flat, flat]), torch.cat([full.flatten()] * 2))
    pairs[:, 1].mul_(0)
    flat.add_(1)
    full.view(8, 2)[:, 1] = 0
    _assert_same(square, full + 1, RowShard(0, 12, 4))
    leaf = square.detach().clone().requires_grad_()
    leaf.flatten().square().sum().backward()
    _assert_same(leaf.grad, 2 * (full + 1), RowShard(0, 12, 4))
    parts = distribute_tensor(full, mesh, [RowShard(2, 12, 2, row_parts=2)])
    _assert_same(parts.view(-1), full.flatten(), RowShard(2, 12, 1))
    with pytest.raises(NotImplementedError, match=r"aten.view.* cannot be a view of unevenly split rows"):
        parts.view(-1).view(4, 4)


@on_ranks(4)
def other_splits_are_redistributed_before_they_combine() -> None:
    mesh = _mesh()
    for index, tensor in enumerate(_all_split(mesh)):
        full = _full(index)
        (placement,) = tensor.placements
        assert isinstance(placement, RowShard)
        elsewhere = _elsewhere(placement, full, mesh)
        others = [
            _split(full, mesh, elsewhere),
            distribute_tensor(full, mesh, [Shard(0)]),
            distribute_tensor(full, mesh, [Replicate()]),
        ]
        for other in others:
            _assert_same(tensor * other, full * full)
            _assert_same(other - tensor, full - full)
            if full.ndim > 1:
                column = other.sum(dim=-1, keepdim=True)
                _assert_same(tensor * column, full * column.full_tensor())
            _assert_same(torch._foreach_add([tensor, tensor], [other, tensor])[0], 2 * full)
            _assert_same(tensor.clone().add_(other), 2 * full, placement)
            # Torch refuses to write into an even split of fewer rows than ranks; what it does write is right.
            with contextlib.suppress(RuntimeError) if full.shape[0] < mesh.size() else contextlib.nullcontext():
                written = other.clone().copy_(tensor * 3).sub_(tensor)
                assert written.placements == other.placements
                _assert_same(written, 3 * full - full)
            with contextlib.suppress(RuntimeError):
                _assert_same(torch.add(tensor, tensor, out=other.clone()), 2 * full)
            copies = [tensor.clone()]
            torch._foreach_mul_(copies, [other])
            _assert_same(copies[0], full * full, placement)


# Training.


@on_ranks(1, 4)
def optimizers_step_as_on_the_whole() -> None:
    mesh = _mesh()
    layout = _layout(mesh.size())
    assert_optimizers_step_as_on_the_whole(
        len(SHAPES), _full, lambda index, full: _split(full, mesh, row_shard(layout, index))
    )


@on_ranks(1, 4)
def gradient_norms_and_clipping_count_each_element_once() -> None:
    mesh = _mesh()
    for foreach in (True, False):
        for order in (2.0, 1.0, float("inf")):
            split, whole = _all_split(mesh), [_full(index) for index in range(len(SHAPES))]
            got = torch.nn.utils.get_total_norm(split, order, foreach=foreach)
            wanted = torch.nn.utils.get_total_norm(whole, order)
            got = got.full_tensor() if isinstance(got, DTensor) else got
            # The sum over ranks is in another order.
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0.0)
            parameters = [[torch.nn.Parameter(torch.zeros_like(t)) for t in tensors] for tensors in (split, whole)]
            for parameters_, tensors in zip(parameters, (split, whole), strict=True):
                for parameter, gradient in zip(parameters_, tensors, strict=True):
                    parameter.grad = gradient
                torch.nn.utils.clip_grad_norm_(parameters_, 0.5, order, foreach=foreach)
            for clipped, expected in zip(*parameters, strict=True):
                torch.testing.assert_close(clipped.grad.full_tensor(), expected.grad, rtol=1e-6, atol=0.0)


# Checkpoints.


def _state(mesh: DeviceMesh, fill: float | None = None) -> dict[str, Any]:
    """Parameters and an Adam state made by ``zeros_like``, as an optimizer makes it."""
    state: dict[str, Any] = {}
    for index, tensor in enumerate(_all_split(mesh)):
        moment = torch.zeros_like(tensor).add_(tensor, alpha=2.0)
        state[f"weight.{index}"], state[f"moment.{index}"] = tensor, moment
    return state if fill is None else {name: torch.full_like(tensor, fill) for name, tensor in state.items()}


def _save(folder: str) -> None:
    save(_state(_mesh()), checkpoint_id=folder)


def _load_rows(folder: str) -> None:
    state = _state(_mesh(), fill=float("nan"))
    load(state, checkpoint_id=folder)
    layout = _layout(dist.get_world_size())
    for index in range(len(SHAPES)):
        _assert_same(state[f"weight.{index}"], _full(index), row_shard(layout, index))
        _assert_same(state[f"moment.{index}"], 2 * _full(index), row_shard(layout, index))


def _load_even_and_plain(folder: str) -> None:
    mesh = _mesh()
    even = {f"weight.{i}": distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]) for i, shape in enumerate(SHAPES)}
    plain = {f"moment.{i}": torch.zeros(shape) for i, shape in enumerate(SHAPES)}
    load(even | plain, checkpoint_id=folder)
    for index in range(len(SHAPES)):
        _assert_same(even[f"weight.{index}"], _full(index))
        assert torch.equal(plain[f"moment.{index}"], 2 * _full(index))


def _save_even(folder: str) -> None:
    mesh = _mesh()
    state = {f"weight.{i}": distribute_tensor(_full(i), mesh, [Shard(0)]) for i in range(len(SHAPES))}
    save(state | {f"moment.{i}": 2 * _full(i) for i in range(len(SHAPES))}, checkpoint_id=folder)


def _load_on_two_and_save_again(folder: str) -> None:
    _load_rows(f"{folder}/rows_of_four")
    _load_even_and_plain(f"{folder}/rows_of_four")
    _save(f"{folder}/rows_of_two")
    _save_even(f"{folder}/even_of_two")


def _load_on_four(folder: str) -> None:
    _load_rows(f"{folder}/rows_of_two")
    _load_rows(f"{folder}/even_of_two")


def test_checkpoints_load_on_other_numbers_of_ranks_and_other_placements(tmp_path: Path) -> None:
    """Saved as rows on 4 ranks; loaded on 2 as rows, even shards and plain tensors, on 1, and from 2 on 4 again."""
    run_ranks(4, _save, f"{tmp_path}/rows_of_four")
    run_ranks(1, _load_rows, f"{tmp_path}/rows_of_four")
    run_ranks(2, _load_on_two_and_save_again, str(tmp_path))
    run_ranks(4, _load_on_four, str(tmp_path))


@on_ranks(4)
def chunk_offsets_come_from_the_layout() -> None:
    mesh = _mesh()
    layout = _layout(mesh.size())
    for index, tensor in enumerate(_all_split(mesh)):
        with _counting() as communication:
            moment: Any = torch.zeros_like(tensor)
            (chunk,) = moment.__create_chunk_list__()
            shape, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
        assert communication.get_total_counts() == 0
        begin, end = rows(layout, index, dist.get_rank())
        assert (chunk.sizes[0], shape[0]) == (end - begin, end - begin)
        assert begin == end or (chunk.offsets[0], offsets[0]) == (begin, begin)


@on_ranks(2)
def tensors_can_be_saved_and_loaded_with_weights_only() -> None:
    for tensor in _all_split(_mesh()):
        stream = io.BytesIO()
        torch.save({"tensor": tensor}, stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=True)["tensor"]
        assert loaded.placements == tensor.placements
        assert torch.equal(loaded.to_local(), tensor.to_local())
        assert torch.equal(loaded.full_tensor(), tensor.full_tensor())


@on_ranks(2)
def gradients_are_placed_as_their_parameters() -> None:
    mesh = _mesh()
    for index, tensor in enumerate(_all_split(mesh)):
        parameter: Any = torch.nn.Parameter(tensor)
        (parameter.redistribute(placements=[Replicate()]) * 3).sum().backward()
        _assert_same(parameter.grad, torch.full(SHAPES[index], 3.0), tensor.placements[0])
        parameter.grad = None
        (parameter * parameter).sum().backward()
        _assert_same(parameter.grad, 2 * _full(index), tensor.placements[0])


@on_ranks(2)
def even_shards_take_torchs_own_path() -> None:
    mesh = _mesh()
    even: Any = distribute_tensor(_full(0), mesh, [Shard(0)])
    assert (even * 2).placements == (Shard(0),)


def test_distribute_tensor_is_the_function_that_was_imported_before() -> None:
    """Most files import torch first: with another function in its place theirs would make even shards."""
    assert type(distribute_tensor) is types.FunctionType
    assert distribute_tensor.__module__.startswith("torch.distributed.tensor")
    assert list(inspect.signature(distribute_tensor).parameters)[:3] == ["tensor", "device_mesh", "placements"]


def _run_checks() -> list[str]:
    passed: list[str] = []
    for name, check in CHECKS[dist.get_world_size()].items():
        try:
            check()
        except BaseException as error:
            raise AssertionError(f"{name} failed, after {passed} had passed") from error
        passed.append(name)
    return passed


@functools.cache
def _outcome(num_ranks: int) -> list[str] | str:
    """Names of the checks that passed, or the first failure."""
    try:
        passed: list[str] = run_ranks(num_ranks, _run_checks, timeout_s=240.0)[0]
        return passed
    except AssertionError as error:
        return str(error)


@pytest.mark.parametrize(("num_ranks", "name"), [(world, name) for world in CHECKS for name in CHECKS[world]])
def test_on_ranks(num_ranks: int, name: str) -> None:
    outcome = _outcome(num_ranks)
    assert not isinstance(outcome, str), outcome
    assert name in outcome
