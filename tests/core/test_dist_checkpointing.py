"""Folders that ``dist_checkpointing.save`` writes: verified when they are loaded, and errors that say what to do."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest, async_calls
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import CachedMetadataFileSystemReader
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from tests.support.launch import run_ranks


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


def test_an_asynchronous_save_is_of_what_there_was_when_it_was_asked_for(tmp_path: Path) -> None:
    """It is no checkpoint before its request is finalized; functions that callers add follow."""
    folder, state, done = tmp_path / "saved", {**_state(), "losses": [1.0]}, list[str]()
    request = dist_checkpointing.save(state, folder, async_sharded_save=True)
    assert request is not None
    state["weight"].data.zero_()
    state["losses"].append(2.0)
    request.add_finalize_fn(lambda: done.append("finalized"))
    assert not dist_checkpointing.check_is_distributed_checkpoint(folder)
    number = async_calls.schedule_async_request(request)
    assert async_calls.get_num_unfinalized_calls() == 1 and done == []
    assert async_calls.maybe_finalize_async_calls(blocking=True) == [number] and done == ["finalized"]
    assert async_calls.maybe_finalize_async_calls() == [] and async_calls.get_num_unfinalized_calls() == 0
    found = _loaded(folder)
    assert torch.equal(found["weight"], _state()["weight"].data) and found["losses"] == [1.0]
    sync = dist_checkpointing.save(_state(), tmp_path / "sync", async_sharded_save=True)
    assert sync is not None
    sync.execute_sync()
    assert _loaded(tmp_path / "sync")["iteration"] == 7
    with pytest.raises(RuntimeError, match="before it is scheduled"):
        sync.freeze().add_finalize_fn(list)


def test_a_save_beside_training_that_fails_is_an_error_where_it_is_finalized(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    request = dist_checkpointing.save(_state(), folder, async_sharded_save=True)
    assert request is not None
    shutil.rmtree(folder)
    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(request)
    with pytest.raises(OSError, match="__0_0"):
        queue.maybe_finalize_async_calls(blocking=True)
    waits = threading.Event()
    queue.schedule_async_request(AsyncRequest(waits.wait, (), []))
    assert queue.maybe_finalize_async_calls(no_dist=True) == []
    waits.set()
    queue.close()
    assert queue.get_num_unfinalized_calls() == 0
    queue.schedule_async_request(AsyncRequest(None, (), [lambda: pytest.fail("it was aborted")]))
    queue.close(abort=True)


def _finalized() -> list[list[int]]:
    """Schedule what ends on rank 1 at once; finalize before and after it ends on rank 0."""
    ends = threading.Event()
    if dist.get_rank() == 1:
        ends.set()
    async_calls.schedule_async_request(AsyncRequest(ends.wait, (), [dist.barrier]))
    before = async_calls.maybe_finalize_async_calls()
    ends.set()
    return [before, async_calls.maybe_finalize_async_calls(blocking=True)]


def test_a_request_is_finalized_when_all_ranks_have_run_it() -> None:
    assert run_ranks(2, _finalized) == [[[], [1]]] * 2


def test_the_state_of_an_optimizer_lies_as_the_weights_do(tmp_path: Path) -> None:
    """As callers describe an optimizer that is not the framework's."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    sharded = {
        name: ShardedTensor.from_rank_offsets(f"model.{name}", tensor, (0, 1, 2))
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    places = get_param_id_to_sharded_param_map(sharded, model.parameters())
    assert {place: leaf.key for place, leaf in places.items()} == {0: "model.weight", 1: "model.bias"}
    state = optimizer.state_dict()
    optim_state_to_sharding_state(state, places, exclude_keys=("step",))
    moment = state["state"][0]["exp_avg_sq"]
    assert (moment.key, moment.global_shape, moment.global_offset) == (
        "optimizer.state.exp_avg_sq.model.weight", (4, 3), (2, 0),
    )  # fmt: skip
    assert moment.data is optimizer.state[model.weight]["exp_avg_sq"]
    assert sorted(state["state"][1]) == ["exp_avg", "exp_avg_sq"]
    assert state["param_groups"][0]["params"].unwrap() == [0, 1] and state["param_groups"][0]["lr"] == 1e-3
    with pytest.raises(ValueError, match="must have all parameters with state, got none for 1"):
        optim_state_to_sharding_state(optimizer.state_dict(), {0: places[0]}, ("step",))


def test_a_narrowed_tensor_is_that_range_of_each_ranks_box() -> None:
    data = torch.arange(24.0).view(4, 6)
    whole = ShardedTensor.from_rank_offsets("weight", data, (0, 2, 3), (1, 1, 2), prepend_axis_num=1)
    (part,) = ShardedTensor.from_rank_offsets("weight", data, (1, 2, 3), (0, 1, 2), prepend_axis_num=1).narrow(0, 1, 2)
    assert part.data is not None and torch.equal(part.data, data[1:3])
    assert (part.local_shape, part.global_shape, part.global_offset) == ((2, 6), (2, 6, 6), (1, 4, 0))
    (last,) = whole.without_data().narrow(-1, 2, 4)
    assert last.data is None and (last.local_shape, last.global_shape) == ((4, 4), (3, 8, 4))
    uneven = replace(part, global_offset=(1, 3, 0))
    with pytest.raises(CheckpointingException, match="boxes along dim 0 must be equal"):
        uneven.narrow(0, 0, 1)


def test_metadata_of_a_folder_are_read_once(tmp_path: Path) -> None:
    dist_checkpointing.save(_state(), tmp_path / "saved")
    CachedMetadataFileSystemReader.clear_metadata_cache()
    first = CachedMetadataFileSystemReader(tmp_path / "saved").read_metadata()
    shutil.rmtree(tmp_path / "saved")
    assert "weight" in first.state_dict_metadata
    assert CachedMetadataFileSystemReader(str(tmp_path / "saved")).read_metadata() is first
    with pytest.raises(FileNotFoundError):
        CachedMetadataFileSystemReader(tmp_path / "saved", cache_metadata=False).read_metadata()
    CachedMetadataFileSystemReader.clear_metadata_cache()
    with pytest.raises(FileNotFoundError):
        CachedMetadataFileSystemReader(tmp_path / "saved").read_metadata()


class _Blocking(FileSystemWriterAsync):
    """As slime derives it: tensors are copied while the host waits."""

    @staticmethod
    def preload_tensors(*args: Any, **kwargs: Any) -> Any:
        return FileSystemWriterAsync.preload_tensors(args[0], non_blocking=False)


@pytest.mark.parametrize("writer", [FileSystemWriterAsync, _Blocking])
def test_a_writer_writes_copies_in_another_thread(writer: type[FileSystemWriterAsync], tmp_path: Path) -> None:
    state: dict[str, Any] = {"weight": torch.arange(6.0), "steps": torch.tensor(3), "text": "plain"}
    dcp.save(dict(state), storage_writer=writer(tmp_path / "at once"))
    later, planner = writer(tmp_path / "later"), DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    later.set_up_storage_writer(is_coordinator=True)
    plan = later.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = later.prepare_global_plan(plans)
    later.prepare_write_data(planner.finish_plan(plan), planner)
    write, preload, further = later.get_save_function_and_args()
    buckets = preload()
    state["weight"].zero_()
    thread = threading.Thread(target=write, args=(buckets, *further))
    thread.start()
    thread.join()
    later.finish(metadata, [later.retrieve_write_results()])
    for folder in ("at once", "later"):
        found: dict[str, Any] = {"weight": torch.ones(6), "steps": torch.tensor(0), "text": ""}
        dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / folder))
        assert (found["weight"].tolist(), int(found["steps"]), found["text"]) == ([*map(float, range(6))], 3, "plain")
