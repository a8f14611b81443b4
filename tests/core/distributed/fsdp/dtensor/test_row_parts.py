"""DTensors whose rows are cut into parts give the numbers of the whole tensor, or refuse; never those of other columns."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Size, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp import fully_shard
from megatron.core.distributed.fsdp.dtensor.placements import (
    BlockShard,
    RowShard,
    _boxes,
    boxes_of,
    local_rows,
    pieces_of,
)
from megatron.core.distributed.fsdp.layout.flat_layout import FlatLayout, TensorSlot, pack_rows
from megatron.core.distributed.fsdp.layout.granule import Granule
from tests.support.dtensor_operations import (
    ELEMENTWISE,
    FOREACH,
    REDUCED,
    REFUSED,
    assert_optimizers_step_as_on_the_whole,
)
from tests.support.layouts import row_shard
from tests.support.rank_checks import RankChecks
from tests.support.shared_folder import shared_folder

CHECKS = RankChecks(__name__)

# Fewer rows than ranks, one row, more than two dimensions, parts of one column; vectors and 0 rows have no parts.
SHAPES = [Size(shape) for shape in [(5, 6), (3, 8), (7,), (2, 4, 3), (1, 12), (4, 6), (0, 4)]]
PARTS = [3, 4, 1, 2, 6, 6, 2]
GRANULES = [Granule.row_parts(parts) for parts in PARTS]
# What names a shape cannot be done to parts, which have another.
SHAPED = {"view_as", "view rows"}
GATHERED = {"new_zeros", "new_empty"}


def _layout(num_ranks: int) -> FlatLayout:
    return pack_rows(SHAPES, num_ranks=num_ranks, alignment=1, granules=GRANULES)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def _full(index: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPES[index], generator=torch.Generator().manual_seed(100 * seed + index))


def _owned(full: torch.Tensor, slot: TensorSlot, begin: int, end: int) -> torch.Tensor:
    """The elements [begin, end) of the flat buffer that are the tensor's, in the shape of its parts; by arithmetic alone."""
    buffer = torch.full((max(slot.start + slot.numel, end),), float("nan"))
    buffer[slot.start : slot.start + slot.numel] = full.flatten()
    first, last = max(begin, slot.start), min(end, slot.start + slot.numel)
    return buffer[first : max(first, last)].view(-1, *slot.cut_shape[1:])


def _split(full: torch.Tensor, mesh: DeviceMesh, layout: FlatLayout, index: int) -> Any:
    begin = mesh.get_local_rank() * layout.segment_numel
    local = _owned(full, layout.slots[index], begin, begin + layout.segment_numel).clone()
    placements = [row_shard(layout, index)]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def _all_split(mesh: DeviceMesh, seed: int = 0) -> list[Any]:
    layout = _layout(mesh.size())
    return [_split(_full(index, seed), mesh, layout, index) for index in range(len(SHAPES))]


def _assert_same(tensor: Any, full: torch.Tensor, placement: Placement | None = None) -> None:
    """This rank's parts of ``tensor``, placed as said where a placement is given, are those of ``full``."""
    assert isinstance(tensor, DTensor) and tensor.shape == full.shape
    assert placement is None or tensor.placements == (placement,)
    if any(each.is_partial() for each in tensor.placements):
        tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    assert torch.equal(tensor.to_local(), local_rows(tensor, full)), f"{tensor} is not {full}"


def _elsewhere(full: torch.Tensor, mesh: DeviceMesh) -> RowShard:
    """Whole rows, one later in segments of one row more."""
    row_numel = full[0].numel() if len(full) else 1
    rows = -(-full.shape[0] // mesh.size()) + 1
    return RowShard(row_numel, rows * row_numel, row_numel)


# The placement by itself.


def test_placements_are_values() -> None:
    placement = RowShard(3, 10, 2, 4)
    assert placement == RowShard(3, 10, 2, 4) and hash(placement) == hash(RowShard(3, 10, 2, 4))
    assert placement != RowShard(3, 10, 2) and RowShard(3, 10, 2) == RowShard(3, 10, 2, 1)
    assert copy.deepcopy(placement) == placement == pickle.loads(pickle.dumps(placement))
    assert repr(placement) == "RowShard(start=3, segment_numel=10, row_numel=2, row_parts=4)"
    assert str(placement) == "Rows(3:10:2:1/4)"
    with pytest.raises(ValueError, match="row_parts must be 1 or more, got 0"):
        RowShard(3, 10, 2, 0)
    with pytest.raises(ValueError, match="on 2 ranks holds 10 rows, got a tensor of 12"):
        RowShard(0, 10, 2, 4).rows(3, rank=0, num_ranks=2)
    with pytest.raises(ValueError, match="row_parts must divide dim 1"):
        RowShard(0, 24, 2, 4).part(torch.zeros(3, 6), rank=0, num_ranks=1)


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.data())
@settings(max_examples=300, deadline=None)
def test_a_range_of_parts_is_at_most_three_boxes(rows: int, parts: int, width: int, data: st.DataObject) -> None:
    """The rest of a row, whole rows, the beginning of one: together they are the range, in order, each element once."""
    begin = data.draw(st.integers(0, rows * parts))
    end = data.draw(st.integers(begin, rows * parts))
    column = data.draw(st.integers(0, 3))
    full = torch.arange(rows * parts * width).view(rows, parts * width)
    wider = nn.functional.pad(full, (column, 2), value=-1)  # columns that another axis has cut away
    boxes = list(_boxes(begin * width, end * width, Size((rows, parts * width)), (0, column)))
    pieces = [wider[r : r + m, c : c + n].flatten() for (r, c), (m, n) in ((box.offsets, box.sizes) for box in boxes)]
    assert torch.cat(pieces).tolist() == list(range(begin * width, end * width))
    assert len(boxes) <= 3 and (begin == end or all(box.sizes.numel() for box in boxes))


# Gathering and splitting.


@CHECKS.on(2, 4)
def redistribution_makes_round_trips() -> None:
    mesh = _mesh()
    for index, tensor in enumerate(_all_split(mesh)):
        full, (placement,) = _full(index), tensor.placements
        _assert_same(tensor, full, placement)
        whole = tensor.redistribute(placements=[Replicate()])
        assert torch.equal(whole.to_local(), full)
        _assert_same(whole.redistribute(placements=[placement]), full, placement)
        even = tensor.redistribute(placements=[Shard(0)])
        assert torch.equal(even.to_local(), distribute_tensor(full, mesh, [Shard(0)]).to_local())
        _assert_same(even.redistribute(placements=[placement]), full, placement)
        _assert_same(tensor.redistribute(placements=[_elsewhere(full, mesh)]), full)
        if full.ndim > 1:
            columns = tensor.redistribute(placements=[Shard(1)])
            assert torch.equal(columns.to_local(), distribute_tensor(full, mesh, [Shard(1)]).to_local())
            _assert_same(columns.redistribute(placements=[placement]), full, placement)
        partial = DTensor.from_local(full * (dist.get_rank() + 1), mesh, [Partial()], run_check=False)
        total = sum(range(1, mesh.size() + 1))
        torch.testing.assert_close(partial.redistribute(placements=[placement]).full_tensor(), full * total)
        _assert_same(tensor.to(torch.bfloat16), full.to(torch.bfloat16), placement)


@CHECKS.on(4)
def an_outer_axis_cuts_the_parts_that_the_inner_one_leaves() -> None:
    """[Note: cuts go inside out]: the inner axis, which comes first, cuts rows into parts; to the outer one these are rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inner", "outer"))
    layout = _layout(4)
    inner, outer = mesh.get_local_rank("inner"), mesh.get_local_rank("outer")
    segment = layout.segment_numel
    begin = inner * 2 * segment
    for index, slot in enumerate(layout.slots):
        full = _full(index)
        placements = [
            RowShard(slot.start, 2 * segment, slot.row_numel, slot.row_parts),
            RowShard(max(slot.start - begin, 0), segment, slot.row_numel),
        ]
        local = _owned(full, slot, begin + outer * segment, begin + (outer + 1) * segment)
        tensor: Any = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
        )
        assert torch.equal(tensor.full_tensor(), full)
        assert torch.equal(local_rows(tensor, full), local)
        assert sum(box.sizes.numel() for box in boxes_of(tensor)) == local.numel()
        for box, piece in pieces_of(tensor):
            for dim, (first, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                full = full.narrow(dim, first, size)
            assert torch.equal(piece, full)
            full = _full(index)
        result = tensor * 2 + tensor
        assert result.placements == tensor.placements and torch.equal(result.full_tensor(), 3 * full)
        inner_alone = tensor.redistribute(placements=[placements[0], Replicate()])
        assert torch.equal(inner_alone.to_local(), _owned(full, slot, begin, begin + 2 * segment))
        whole = tensor.redistribute(placements=[Replicate(), Replicate()])
        assert torch.equal(whole.redistribute(placements=placements).to_local(), local)
        torch.testing.assert_close(tensor.norm().full_tensor(), full.norm())


@CHECKS.on(4)
def a_tensor_parallel_axis_cuts_before_rows_are() -> None:
    """Its columns, rows or blocks; what it leaves to a rank is cut into parts there."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    full = torch.arange(144.0).view(12, 12)
    kinds: list[Placement] = [Shard(0), Shard(1), BlockShard(2), BlockShard(3), Replicate()]
    tensors = {}
    for kind in kinds:
        part = DTensor.from_local(full, mesh["tp"], [Replicate()], run_check=False)
        shape = part.redistribute(placements=[kind]).to_local().shape
        layout = pack_rows(
            [Size((5,)), shape], num_ranks=2, alignment=1, granules=[Granule.row(), Granule.row_parts(3)]
        )
        placements = [kind, row_shard(layout, 1)]
        replicas = DTensor.from_local(full, mesh, [Replicate()] * 2, run_check=False)
        tensor: Any = replicas.redistribute(placements=placements)
        mine = part.redistribute(placements=[kind]).to_local()
        begin = mesh.get_local_rank("dp") * layout.segment_numel
        local = _owned(mine, layout.slots[1], begin, begin + layout.segment_numel)
        assert torch.equal(tensor.to_local(), local) and torch.equal(local_rows(tensor, full), local), kind
        _assert_same(tensor, full)
        _assert_same(tensor * 2 + tensor, 3 * full)
        even = _quietly(tensor, [Shard(0), Shard(0)])
        _assert_same(even, full)
        _assert_same(_quietly(even, placements), full)
        torch.testing.assert_close(tensor.norm().full_tensor(), full.norm())
        for box, piece in pieces_of(tensor):
            (row, column), (rows, columns) = box.offsets, box.sizes
            assert torch.equal(piece, full[row : row + rows, column : column + columns]), kind
        tensors[str(kind)] = tensor
    with shared_folder() as folder:
        _assert_stored(folder, tensors, dict.fromkeys(tensors, full))


def _quietly(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gloo has no all-to-all
        return tensor.redistribute(placements=placements)


@CHECKS.on(2, 4)
def what_cannot_be_moved_is_refused() -> None:
    """Columns cut behind parts would be columns of parts; torch takes an axis of one rank to change nothing."""
    world = dist.get_world_size()
    tensor, full = _all_split(_mesh())[1], _full(1)
    mesh = init_device_mesh("cpu", (world // 2, 2))
    two: Any = DTensor.from_local(full, mesh, [Replicate()] * 2, run_check=False)
    if world == 4:
        layout = pack_rows([full.shape], num_ranks=2, alignment=1, granules=[Granule.row_parts(2)])
        with pytest.raises(NotImplementedError, match="columns must be cut before parts of rows"):
            two.redistribute(placements=[row_shard(layout, 0), Shard(1)])
    else:
        with pytest.raises(NotImplementedError, match="an axis of one rank cuts nothing"):
            two.redistribute(placements=[RowShard(0, 24, 2, 4), Replicate()])
    with pytest.raises(NotImplementedError, match="must be one box of the whole tensor"):
        compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


# Operations.


@CHECKS.on(2)
def elementwise_operations_stay_on_their_parts() -> None:
    mesh = _mesh()
    layout = _layout(mesh.size())
    for name, operation in ELEMENTWISE.items():
        if name in SHAPED:
            continue
        for index, (first, second) in enumerate(zip(_all_split(mesh, 0), _all_split(mesh, 1), strict=True)):
            full = _full(index, 0)
            with CommDebugMode() as communication:
                result = operation(first, second)
            gathers = name in GATHERED and PARTS[index] > 1
            assert gathers or communication.get_total_counts() == 0, f"{name} communicates"
            placement = row_shard(layout, index)
            _assert_same(result, operation(full, _full(index, 1)), None if gathers else placement)
            _assert_same(first, full, placement)


@CHECKS.on(4)
def foreach_operations_stay_on_their_parts() -> None:
    """Lists hold tensors with parts and without."""
    mesh = _mesh()
    layout = _layout(mesh.size())
    for name, operation in FOREACH.items():
        split, full = _all_split(mesh, 0), [_full(index, 0) for index in range(len(SHAPES))]
        with CommDebugMode() as communication:
            results = operation(split, _all_split(mesh, 1))
        assert communication.get_total_counts() == 0, f"{name} communicates"
        expected = operation(full, [_full(index, 1) for index in range(len(SHAPES))])
        for index, (got, wanted) in enumerate(zip(results or split, expected or full, strict=True)):
            _assert_same(got, wanted, row_shard(layout, index))


@CHECKS.on(2)
def reductions_and_gathered_operations_are_those_of_the_whole() -> None:
    mesh = _mesh()
    for name, operation in REDUCED.items():
        for index, tensor in enumerate(_all_split(mesh)):
            full = _full(index)
            if not full.numel() or (full.ndim > 2 and name in ("matmul", "outer")):
                continue
            got, wanted = operation(tensor), operation(full)
            got = got.full_tensor() if isinstance(got, DTensor) else got
            # Sums over ranks are in another order.
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6, msg=lambda text: f"{name} {index}: {text}")  # noqa: B023


@CHECKS.on(2)
def operations_that_cannot_be_right_are_refused() -> None:
    refused = REFUSED | {name: lambda a, name=name: ELEMENTWISE[name](a, a) for name in SHAPED}
    for tensor in _all_split(_mesh())[:2]:
        for name, operation in refused.items():
            before = tensor.to_local().clone()
            with pytest.raises((NotImplementedError, RuntimeError)):
                operation(tensor)
            assert torch.equal(tensor.to_local(), before), f"{name} wrote before it was refused"


@CHECKS.on(2)
def what_is_for_rows_or_columns_meets_whole_rows() -> None:
    """What is written cannot be gathered, so there it is refused; one element is the same for all parts."""
    mesh = _mesh()
    for index in (0, 1, 5):
        tensor, full = _all_split(mesh)[index], _full(index)
        vectors = [full[0], full[:, :1], full[:1], full.flatten()[0], full[:1, :1]]
        for vector in vectors:
            other: Any = DTensor.from_local(vector.contiguous(), mesh, [Replicate()], run_check=False)
            _assert_same(tensor * other, full * vector)
            _assert_same(other - tensor, vector - full)
            copied = tensor.clone()
            if vector.numel() == 1:
                _assert_same(copied.add_(other), full + vector, tensor.placements[0])
                torch._foreach_mul_([copied], [other])
                _assert_same(copied, (full + vector) * vector, tensor.placements[0])
                continue
            for write in (lambda: copied.add_(other), lambda: torch._foreach_mul_([copied], [other])):  # noqa: B023
                with pytest.raises(NotImplementedError, match="would be lost"):
                    write()
            _assert_same(copied, full)
        _assert_same(tensor.sum(dim=1, keepdim=True) + tensor, full.sum(dim=1, keepdim=True) + full)


@CHECKS.on(2)
def other_splits_are_redistributed_before_they_combine() -> None:
    mesh = _mesh()
    for index, tensor in enumerate(_all_split(mesh)):
        full, (placement,) = _full(index), tensor.placements
        if not full.numel():
            continue
        replicas = DTensor.from_local(full, mesh, [Replicate()], run_check=False)
        whole_rows: Any = replicas.redistribute(placements=[_elsewhere(full, mesh)])
        for other in (whole_rows, distribute_tensor(full, mesh, [Shard(0)]), distribute_tensor(full, mesh)):
            _assert_same(tensor * other, full * full)
            _assert_same(other - tensor, full - full)
            _assert_same(torch._foreach_add([tensor, tensor], [other, tensor])[0], 2 * full)
            _assert_same(tensor.clone().add_(other), 2 * full, placement)
            copies = [tensor.clone()]
            torch._foreach_mul_(copies, [other])
            _assert_same(copies[0], full * full, placement)
        written: Any = whole_rows.clone().copy_(tensor * 3)
        assert written.placements == whole_rows.placements
        _assert_same(written, 3 * full)


# Training.


@CHECKS.on(4)
def optimizers_step_as_on_the_whole() -> None:
    mesh = _mesh()
    layout = _layout(mesh.size())
    assert_optimizers_step_as_on_the_whole(len(SHAPES), _full, lambda index, full: _split(full, mesh, layout, index))


@CHECKS.on(4)
def gradient_norms_and_clipping_count_each_element_once() -> None:
    mesh = _mesh()
    for foreach in (True, False):
        for order in (2.0, 1.0, float("inf")):
            split, whole = _all_split(mesh)[:-1], [_full(index) for index in range(len(SHAPES) - 1)]
            got = nn.utils.get_total_norm(split, order, foreach=foreach)
            got = got.full_tensor() if isinstance(got, DTensor) else got
            torch.testing.assert_close(got, nn.utils.get_total_norm(whole, order), rtol=1e-6, atol=0.0)
            parameters = [[nn.Parameter(torch.zeros_like(t)) for t in tensors] for tensors in (split, whole)]
            for own, tensors in zip(parameters, (split, whole), strict=True):
                for parameter, gradient in zip(own, tensors, strict=True):
                    parameter.grad = gradient
                nn.utils.clip_grad_norm_(own, 0.5, order, foreach=foreach)
            for clipped, expected in zip(*parameters, strict=True):
                torch.testing.assert_close(clipped.grad.full_tensor(), expected.grad, rtol=1e-6, atol=0.0)


@CHECKS.on(2)
def gradients_are_placed_as_their_parameters() -> None:
    mesh = _mesh()
    for index, tensor in enumerate(_all_split(mesh)):
        parameter: Any = nn.Parameter(tensor)
        (parameter.redistribute(placements=[Replicate()]) * 3).sum().backward()
        _assert_same(parameter.grad, torch.full(SHAPES[index], 3.0), tensor.placements[0])
        parameter.grad = None
        (parameter * parameter).sum().backward()
        _assert_same(parameter.grad, 2 * _full(index), tensor.placements[0])


# Checkpoints.


def _assert_stored(folder: str, tensors: dict[str, Any], full: dict[str, torch.Tensor]) -> None:
    """PyTorch's distributed checkpoints give the whole tensors to one process, and to the same placements. Ranks: all."""
    save(dict(tensors), checkpoint_id=folder)
    read = {name: torch.zeros_like(whole) for name, whole in full.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        load(dict(read), checkpoint_id=folder, no_dist=True)
    for name, whole in full.items():
        assert torch.equal(read[name], whole), name
    parts: dict[str, Any] = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    load(dict(parts), checkpoint_id=folder)
    for name, tensor in parts.items():
        assert torch.equal(tensor.to_local(), tensors[name].to_local()), name


@CHECKS.on(4)
def checkpoints_hold_the_whole_tensors() -> None:
    mesh = _mesh()
    tensors = {f"weight.{index}": tensor for index, tensor in enumerate(_all_split(mesh))}
    tensors |= {name.replace("weight", "moment"): torch.zeros_like(t).add_(t) for name, t in tensors.items()}
    full = {name: _full(int(name.split(".")[1])) for name in tensors}
    with shared_folder() as folder:
        _assert_stored(folder, tensors, full)
        for placement in (Shard(0), Replicate()):
            others = {
                name: distribute_tensor(torch.zeros_like(whole), mesh, [placement]) for name, whole in full.items()
            }
            load(dict(others), checkpoint_id=folder)
            for name, other in others.items():
                assert torch.equal(other.full_tensor(), full[name]), name
        save(dict(others), checkpoint_id=f"{folder}/whole")
        parts: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        load(dict(parts), checkpoint_id=f"{folder}/whole")
        for name, part in parts.items():
            _assert_same(part, full[name], tensors[name].placements[0])


@CHECKS.on(2)
def tensors_can_be_saved_and_loaded_with_weights_only() -> None:
    for tensor in _all_split(_mesh()):
        stream = io.BytesIO()
        torch.save({"tensor": tensor}, stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=True)["tensor"]
        assert loaded.placements == tensor.placements
        assert torch.equal(loaded.full_tensor(), tensor.full_tensor())


@CHECKS.on(2)
def compiled_graphs_of_unequal_parts_have_keys_of_their_own() -> None:
    """torch's own key has no local shape, and ranks of a host share its cache: one would run the graph of the other's rows."""
    if not hasattr(DTensor, "_stable_hash_for_caching"):
        return  # torch 2.11 has no such keys
    layer: Any = fully_shard(nn.Linear(3, 5, bias=False))
    own = (tuple(layer.weight.to_local().shape), layer.weight._stable_hash_for_caching())
    found: list[Any] = [None, None]
    dist.all_gather_object(found, own)
    (shape, key), (other_shape, other_key) = found
    assert shape != other_shape and key != other_key


@pytest.mark.parametrize(("num_ranks", "name"), CHECKS.parameters)
def test_on_ranks(num_ranks: int, name: str) -> None:
    CHECKS.assert_passed(num_ranks, name)
