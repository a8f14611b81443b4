"""SIGKILL at random moments of saving: the path always names a complete checkpoint."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import load_checkpoint, save_checkpoint
from tests.support.checkpoint_models import adamw, sharded_model, train

NUM_RANKS, NUM_KILLS = 2, 8
ANNOUNCED = "announced"


def fork(function: Callable[..., None], *args: Any) -> int:
    """Fork a child that runs the function and exits with 0 if it returns; return its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        function(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def fill(model: torch.nn.Module, optimizer: torch.optim.Optimizer, value: int) -> None:
    """Set every element of weights and optimizer state to ``value``."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())):
            tensor.fill_(value)


def join(folder: Path, attempt: int, rank: int, num_ranks: int) -> None:
    store = f"file://{folder}/store{attempt}.{num_ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)


def save_forever(folder: Path, attempt: int, rank: int) -> None:
    """Overwrite one checkpoint again and again, every other time asynchronously, and announce each that is complete."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the death of the other rank prints errors
    join(folder, attempt, rank, NUM_RANKS)
    model = sharded_model("optim_grads_params", num_blocks=1)
    optimizer = adamw(model)
    train(model, optimizer, 1)
    count = load_checkpoint(model, optimizer, folder / "ck" / "latest")["count"] if attempt else 0
    while True:
        count += 1
        fill(model, optimizer, count)
        extra = {"count": count, "per_rank": [count, rank]}
        save = save_checkpoint(model, optimizer, folder / "ck" / "latest", extra_state=extra, async_save=count % 2 == 0)
        if save is not None:
            fill(model, optimizer, -1)
            save.wait()
        if rank == 0:
            (folder / "beside").write_text(str(count))
            os.replace(folder / "beside", folder / ANNOUNCED)


def check_newest(folder: Path, attempt: int) -> None:
    """Check that all of the checkpoint is from one save, which is no older than the last one announced."""
    join(folder, attempt, 0, 1)
    model = sharded_model("no_shard", num_blocks=1)
    optimizer = adamw(model)
    extra = load_checkpoint(model, optimizer, folder / "ck" / "latest")
    count = extra["count"]
    assert count in (announced(folder), announced(folder) + 1), (count, announced(folder))
    assert extra["per_rank"] == [count, 0]
    for tensor in (*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        assert (local == count).all()


def announced(folder: Path) -> int:
    return int((folder / ANNOUNCED).read_text()) if (folder / ANNOUNCED).exists() else 0


def kill_and_check(folder: Path) -> None:
    """Return 0 if each kill left a complete checkpoint."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # the first DTensor would; it takes longer than all else here
    draw = random.Random(0)
    for attempt in range(NUM_KILLS):
        before = announced(folder)
        ranks = [fork(save_forever, folder, attempt, rank) for rank in range(NUM_RANKS)]
        deadline = time.monotonic() + 60
        while announced(folder) < before + 2:
            assert time.monotonic() < deadline, "the ranks did not save"
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.15))
        first = draw.randrange(NUM_RANKS)
        os.kill(ranks[first], signal.SIGKILL)
        time.sleep(draw.choice((0, 0.1)))  # the other rank may have time to see it, or none
        os.kill(ranks[1 - first], signal.SIGKILL)
        for child in ranks:
            os.waitpid(child, 0)
        checker = fork(check_newest, folder, attempt)
        _, status = os.waitpid(checker, 0)
        assert status == 0, f"after kill {attempt}"


def test_killed_saves_leave_a_checkpoint_that_loads(tmp_path: Path) -> None:
    """Kill both ranks, in either order, several times; each attempt starts from what the last one left."""
    # A process of its own, which has no threads yet, can fork ranks that need not import anything.
    process = multiprocessing.get_context("forkserver").Process(target=kill_and_check, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0, "see the traceback above"
    assert announced(tmp_path) >= 2 * NUM_KILLS
