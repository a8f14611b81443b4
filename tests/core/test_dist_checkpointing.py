"""Folders that ``dist_checkpointing.save`` writes: verified when they are loaded, and errors that say what to do."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.distributed.fsdp import save_checkpoint


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _state() -> dict[str, Any]:
    weight = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    return {"weight": ShardedTensor.from_rank_offsets("weight", weight), "iteration": 7}


def _loaded(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = dist_checkpointing.load(
        {"weight": ShardedTensor.from_rank_offsets("weight", torch.zeros(8, 8))}, folder
    )
    return found


def test_a_flipped_bit_in_any_file_is_refused_with_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    dist_checkpointing.save(_state(), folder)
    assert torch.equal(_loaded(folder)["weight"], _state()["weight"].data)
    draw = random.Random(0)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"metadata.json", ".metadata", "checkpoint.json", "__0_0.distcp"}
    for file in sorted(folder.iterdir()):
        whole = file.read_bytes()
        bits = 8 * len(whole)
        for bit in range(bits) if bits < 800 else [draw.randrange(bits) for _ in range(60)]:
            changed = bytearray(whole)
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
            with pytest.raises((ValueError, FileNotFoundError, CheckpointingException), match=str(folder)):
                _loaded(folder)
        file.write_bytes(whole)
    (folder / "metadata.json").unlink()
    with pytest.raises(CheckpointingException, match=r"got no metadata\.json"):
        _loaded(folder)


def test_what_is_advised_in_place_of_an_asynchronous_save_exists(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"save_checkpoint\(\.\.\., async_save=True\)"):
        dist_checkpointing.save(_state(), tmp_path / "saved", async_sharded_save=True)
    assert "async_save" in inspect.signature(save_checkpoint).parameters
