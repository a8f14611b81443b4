"""Checkpoints of several ranks: any number of ranks, under any strategy, loads what any other saved."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron.core.distributed.fsdp import load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp.checkpoint import save as checkpoint_save
from megatron.core.distributed.fsdp.checkpoint.chunks import chunks_to_write
from megatron.core.distributed.fsdp.checkpoint.files import write_data
from tests.support.checkpoint_models import adamw, sharded_model, train, whole_state
from tests.support.launch import run_ranks

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def save_each(folder: str) -> dict[str, Any]:
    """Train and save under each strategy; return what was saved and the losses that follow."""
    saved = {}
    for strategy in STRATEGIES:
        model = sharded_model(strategy)
        optimizer = adamw(model)
        train(model, optimizer, 2)
        extra = {"iteration": 2, "per_rank": {"rng": torch.full((2,), dist.get_rank())}}
        assert save_checkpoint(model, optimizer, f"{folder}/{strategy}", extra_state=extra) is None
        state = whole_state(model, optimizer)
        saved[strategy] = (state, train(model, optimizer, 2, first=2))
    return saved


def load_each(folder: str, pairs: list[tuple[str, str]], saved: dict[str, Any], num_saving: int) -> None:
    """Load under other strategies, into other weights and a used optimizer or a new one; compare all."""
    for source, strategy in pairs:
        model = sharded_model(strategy, seed=1)
        optimizer = adamw(model)
        if source == strategy:
            train(model, optimizer, 1)
        extra = load_checkpoint(model, optimizer, f"{folder}/{source}")
        rank = dist.get_rank()
        assert extra["iteration"] == 2
        assert ("per_rank" in extra) == (rank < num_saving)
        if rank < num_saving:
            assert extra["per_rank"]["rng"].tolist() == [rank, rank]
        state, losses = saved[source]
        assert whole_state(model, optimizer) == state, f"{source} -> {strategy}"
        assert train(model, optimizer, 2, first=2) == losses, f"{source} -> {strategy}"


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, Any]]]:
    """Checkpoints that four ranks saved."""
    folder = str(tmp_path_factory.mktemp("four"))
    yield folder, run_ranks(4, save_each, folder)[0]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_fewer_ranks_load_what_four_saved(four_ranks: tuple[str, dict[str, Any]], num_ranks: int) -> None:
    """Every pair of strategies; weights, optimizer state and the losses that follow are the same to the last bit.

    All ranks train on the same batch, and the mean of 1, 2 or 4 equal gradients is exact, so nothing is rounded.
    """
    folder, saved = four_ranks
    pairs = [(source, strategy) for source in STRATEGIES for strategy in STRATEGIES]
    run_ranks(num_ranks, load_each, folder, pairs, saved, 4)


def save_and_load_on_more(folder: str, saved: dict[str, Any]) -> None:
    load_each(folder, [("no_shard", "optim_grads_params"), ("optim_grads_params", "optim")], saved, 1)


def test_more_ranks_load_what_one_saved(tmp_path: Path) -> None:
    """Four ranks, of which some own no row of a parameter; ranks that did not save get no state of their own."""
    saved = run_ranks(1, save_each, str(tmp_path))[0]
    run_ranks(4, save_and_load_on_more, str(tmp_path), saved)


def check_async(folder: str) -> None:
    model = sharded_model("optim_grads_params")
    optimizer = adamw(model)
    train(model, optimizer, 1)
    state = whole_state(model, optimizer)
    written = threading.Event()

    def write_later(*args: Any, **kwargs: Any) -> Any:
        assert written.wait(timeout=300)
        return write_data(*args, **kwargs)

    later = patch.object(checkpoint_save, "write_data", write_later)
    later.start()
    save = save_checkpoint(model, optimizer, f"{folder}/a", extra_state={"step": 1}, async_save=True)
    assert save is not None
    losses = train(model, optimizer, 2, first=1)  # must not meet the save's collectives
    assert not save.done()
    assert not Path(folder, "a").exists()
    assert whole_state(model, optimizer) != state
    written.set()
    save.wait()
    assert save.done()
    assert load_checkpoint(model, optimizer, f"{folder}/a") == {"step": 1}
    assert whole_state(model, optimizer) == state
    assert train(model, optimizer, 2, first=1) == losses
    later.stop()
    for step in range(12):  # each has its own process group, destroyed neither too late nor too early
        again = save_checkpoint(model, optimizer, f"{folder}/a", extra_state={"step": step}, async_save=True)
        assert again is not None
        train(model, optimizer, 1)
        again.wait()
        again.wait()
    assert load_checkpoint(model, optimizer, f"{folder}/a")["step"] == 11
    dist.barrier()
    assert [entry.name for entry in Path(folder).iterdir()] == ["a"]


def test_an_asynchronous_save_has_the_values_of_its_call_while_training_goes_on(tmp_path: Path) -> None:
    run_ranks(2, check_async, str(tmp_path))


def check_failures(folder: str) -> None:
    model = sharded_model("optim_grads_params")
    path = f"{folder}/a"
    save_checkpoint(model, None, path, extra_state={"step": 1})

    def disk_full(*args: Any, rank: int, **kwargs: Any) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return write_data(*args, rank=rank, **kwargs)

    with patch.object(checkpoint_save, "write_data", disk_full):
        with pytest.raises(OSError, match=r"No space left on device \[rank 1\]"):
            save_checkpoint(model, None, path, extra_state={"step": 2})
        save = save_checkpoint(model, None, path, extra_state={"step": 2}, async_save=True)
        assert save is not None
        for _ in range(2):
            with pytest.raises(OSError, match=r"No space left on device \[rank 1\]"):
                save.wait()
    for async_save in (False, True):
        with pytest.raises(TypeError, match=r"extra_state\['rng'\]\[1\] must be a tensor.*builtins.set.*\[rank 1\]"):
            rng = [0, {1} if dist.get_rank() == 1 else 1]
            save_checkpoint(model, None, path, extra_state={"rng": rng}, async_save=async_save)
    with pytest.raises(ValueError, match=r"all ranks must save to one path.*/b1 \(rank 1\)"):
        save_checkpoint(model, None, f"{folder}/b{dist.get_rank()}")
    other = nn.Linear(2, 2, bias=dist.get_rank() == 0)
    with pytest.raises(ValueError, match=r"must save the same model.*than rank 0's on rank 1;"):
        save_checkpoint(other, None, path)
    with (
        patch.object(checkpoint_save, "chunks_to_write", lambda tensors: chunks_to_write(tensors)[: dist.get_rank()]),
        pytest.raises(
            RuntimeError, match=r"together must write the 55 elements of embedding.weight once, got \d+; its mesh"
        ),
    ):
        save_checkpoint(model, None, path)
    with pytest.raises(FileNotFoundError, match=r"nothing there; check the path \[rank 1\]"):
        load_checkpoint(model, None, path if dist.get_rank() == 0 else f"{folder}/nowhere")
    assert load_checkpoint(model, None, path) == {"step": 1}
    dist.barrier()
    assert [entry.name for entry in Path(folder).iterdir()] == ["a"]


def test_what_one_rank_cannot_do_all_raise_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    run_ranks(2, check_failures, str(tmp_path))


def count_calls(folder: str) -> list[tuple[int, int]]:
    """Count the collectives of a save and of a load, for models of different sizes."""
    calls = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return function(*args, **kwargs)

        return call

    names = ("all_gather", "all_reduce", "barrier", "broadcast", "gather", "reduce_scatter", "scatter", "send")
    c10d = dist.distributed_c10d
    for name in names:
        setattr(c10d, name, counted(getattr(c10d, name)))
    found = []
    for num_blocks in (1, 5):
        model = sharded_model("optim_grads_params", num_blocks=num_blocks)
        optimizer = adamw(model)
        train(model, optimizer, 1)
        calls = 0
        save_checkpoint(model, optimizer, f"{folder}/{num_blocks}")
        num_saving, calls = calls, 0
        load_checkpoint(model, optimizer, f"{folder}/{num_blocks}")
        found.append((num_saving, calls))
    return found


def test_the_number_of_collectives_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Offsets come from the layout. Two agreements: each gathers (sizes, then data) and broadcasts (likewise)."""
    assert run_ranks(2, count_calls, str(tmp_path))[0] == [(8, 8), (8, 8)]


# Placements on a mesh of two axes: (outer, inner).
PLACEMENTS = {
    "hybrid": (Replicate(), Shard(0)),
    "outer": (Shard(0), Replicate()),
    "both": (Shard(0), Shard(1)),
    "neither": (Replicate(), Replicate()),
}


def model_on(mesh: DeviceMesh | None, seed: int) -> nn.Module:
    """Return a model whose weights another library has distributed, or that are plain tensors."""
    model = nn.Module()
    for name, placements in PLACEMENTS.items():
        whole = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
        tensor = whole if mesh is None else distribute_tensor(whole, mesh, placements)
        model.register_parameter(name, nn.Parameter(tensor))
    return model


def check_meshes(folder: str) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = model_on(mesh, 0)
    save_checkpoint(model, None, f"{folder}/a")
    other = model_on(mesh, 1)
    load_checkpoint(other, None, f"{folder}/a")
    assert whole_state(other) == whole_state(model)
    whole = model_on(None, 1)
    load_checkpoint(whole, None, f"{folder}/a")
    assert whole_state(whole) == whole_state(model_on(None, 0))
    replicas = nn.Module()
    for index in range(8):
        weight = nn.Parameter(distribute_tensor(torch.randn(100, 100), mesh, PLACEMENTS["neither"]))
        replicas.register_parameter(f"weight{index}", weight)
    save_checkpoint(replicas, None, f"{folder}/b")
    return [Path(folder, "b", f"__{rank}_0.distcp").stat().st_size for rank in range(4)]


def test_any_mesh_and_placement_is_saved_once_and_replicas_share_the_writing(tmp_path: Path) -> None:
    nbytes = run_ranks(4, check_meshes, str(tmp_path))[0]
    assert max(nbytes) < 1.01 * min(nbytes) and sum(nbytes) < 8 * 100 * 100 * 4 * 1.2
