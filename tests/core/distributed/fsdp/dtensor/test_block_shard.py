"""DTensors of tensors that are split over a tensor-parallel axis and, unevenly, over a data-parallel one."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.dtensor.placements import BlockShard, RowShard, boxes_of, local_rows, pieces_of
from tests.support.launch import run_ranks

FULL = torch.arange(72.0).view(24, 3)
KINDS: list[Placement] = [BlockShard(2), BlockShard(3), Shard(0), Shard(1), Replicate()]


def _split(mesh: DeviceMesh, kind: Placement, full: torch.Tensor = FULL) -> Any:
    """The full tensor over (tp, dp); data-parallel rank 0 has the larger part of the rows."""
    tp, dp = mesh.get_local_rank(0), mesh.get_local_rank(1)
    if isinstance(kind, BlockShard):
        part = kind.part(full, rank=tp, num_ranks=2)
    else:
        part = full.chunk(2, kind.dim)[tp] if isinstance(kind, Shard) else full
    rows = RowShard(0, (part.shape[0] // 2 + 1) * part.shape[1], part.shape[1])
    begin, end = rows.rows(part.shape[0], rank=dp, num_ranks=2)
    return DTensor.from_local(
        part[begin:end].clone(), mesh, [kind, rows], run_check=False, shape=full.shape, stride=full.stride()
    )


def _quietly_redistribute(tensor: DTensor, placements: list[Placement]) -> DTensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gloo has no all-to-all
        return tensor.redistribute(placements=placements)


def dtensor_is_right_on_them() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    everywhere = [Replicate(), Replicate()]
    for kind in KINDS:
        tensor = _split(mesh, kind)
        assert torch.equal(tensor.full_tensor(), FULL), kind
        assert torch.equal(local_rows(tensor, FULL), tensor.to_local()), kind
        whole = tensor.redistribute(placements=everywhere)
        assert torch.equal(whole.redistribute(placements=tensor.placements).to_local(), tensor.to_local()), kind
        even = _quietly_redistribute(tensor, [Shard(0), Shard(0)])
        assert torch.equal(even.full_tensor(), FULL), kind
        assert torch.equal(_quietly_redistribute(even, list(tensor.placements)).to_local(), tensor.to_local()), kind
        result = tensor * 2 + tensor
        assert result.placements == tensor.placements and torch.equal(result.full_tensor(), 3 * FULL), kind
        zeros: Any = torch.zeros_like(tensor)
        assert zeros.placements == tensor.placements
        assert torch.allclose(tensor.sum().full_tensor(), FULL.sum()), kind
        parameter: Any = nn.Parameter(tensor.detach().clone())
        parameter.grad = tensor.clone()
        norm = nn.utils.clip_grad_norm_([parameter], 1.0)
        assert torch.allclose(norm.full_tensor(), FULL.norm()), kind  # type: ignore[attr-defined]
        assert torch.allclose(parameter.grad.full_tensor(), FULL / FULL.norm(), atol=1e-5), kind
        torch.optim.AdamW([parameter]).step()
    # The rows of the outer part are no rows of the whole: that is refused, never taken for the same.
    with pytest.raises(ValueError, match="holds 14 rows, got a tensor of 24"):
        tensor = _split(mesh, BlockShard(2))
        tensor.redistribute(placements=[Replicate(), tensor.placements[1]])


def test_dtensor_is_right_on_them() -> None:
    """``full_tensor``, redistribution both ways, elementwise operations, norms, clipping and optimizers."""
    run_ranks(4, dtensor_is_right_on_them)


def boxes_are_those_of_the_whole_tensor(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    tensors = {str(kind): _split(mesh, kind) for kind in KINDS}
    for name, tensor in tensors.items():
        for box, local in pieces_of(tensor):
            rows = slice(box.offsets[0], box.offsets[0] + box.sizes[0])
            columns = slice(box.offsets[1], box.offsets[1] + box.sizes[1])
            assert torch.equal(local, FULL[rows, columns]), name
    # Where torch's own answer is right, ours is the same.
    for kind in (Shard(0), Shard(1), Replicate()):
        (own,) = tensors[str(kind)].__create_chunk_list__()
        assert boxes_of(tensors[str(kind)]) == [own]
    save(dict(tensors), checkpoint_id=folder)
    read = {name: torch.zeros_like(FULL) for name in tensors}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(dict(read), checkpoint_id=folder, no_dist=True)
    for name, whole in read.items():
        assert torch.equal(whole, FULL), name
    empty: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load(dict(empty), checkpoint_id=folder)
    for name, loaded in empty.items():
        assert torch.equal(loaded.full_tensor(), FULL), name


def test_boxes_are_those_of_the_whole_tensor(tmp_path: Path) -> None:
    """PyTorch's distributed checkpoints take each part for one box, which a part of several blocks is not."""
    run_ranks(4, boxes_are_those_of_the_whole_tensor, str(tmp_path))


def test_a_placement_is_told_from_others() -> None:
    blocks = BlockShard(2)
    assert blocks == pickle.loads(pickle.dumps(blocks)) == copy.deepcopy(blocks) and hash(blocks) == hash(BlockShard(2))
    assert blocks != Shard(0) and Shard(0) != blocks and blocks != BlockShard(3)
    with pytest.raises(ValueError, match="num_blocks must be 2 or more, got 1"):
        BlockShard(1)
    with pytest.raises(ValueError, match=r"multiple of 4 \(2 blocks x 2 ranks\), got 6"):
        blocks.part(torch.zeros(6), rank=0, num_ranks=2)


def test_rows_of_a_part_are_ranges_of_the_whole() -> None:
    blocks = BlockShard(2)
    whole = torch.arange(12)
    for rank in range(3):
        part = blocks.part(whole, rank=rank, num_ranks=3)
        ranges = blocks.full_ranges(12, rank=rank, num_ranks=3)
        rows = [row for first, last in ranges for row in range(first, last)]
        assert torch.equal(part, whole.view(2, 3, 2)[:, rank].flatten())
        assert rows == part.tolist() and all(last > first for first, last in ranges)
