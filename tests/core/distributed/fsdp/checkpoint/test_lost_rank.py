"""When a rank is lost in an asynchronous save, the others end within the time-out and say what they waited for."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core.distributed.fsdp import save_checkpoint
from megatron.core.distributed.fsdp.checkpoint import save as checkpoint_save
from tests.support.gloo_device import share_gloo_device
from tests.support.launch import PRELOAD
from tests.support.rank_processes import free_port

_TIMEOUT_S = 4.0
"""Of the default process group; far less than gloo's own 30 minutes."""

_PATIENCE_S = 400.0
"""Of the test: a busy machine may take long to start the ranks, and the time-out passes more than once."""

_MOMENTS = {
    "before the group": (dist, "new_group", "make the process group of the asynchronous save to"),
    "as the group is made": (
        distributed_c10d,
        "_new_process_group_helper",
        "(make the process group of|agree on what)",
    ),
    "before its share": (checkpoint_save, "write_data", "write their shares of"),
}


def _save(rank: int, port: int, how: str, moment: str, lost: int, folder: str) -> None:
    """Save; one rank leaves at ``moment``; the others write down how they ended."""
    share_gloo_device()
    store = dist.TCPStore("127.0.0.1", port, 3, is_master=rank == 0, timeout=timedelta(seconds=_PATIENCE_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=_PATIENCE_S))
    dist.barrier()
    distributed_c10d._set_pg_timeout(timedelta(seconds=_TIMEOUT_S))
    model, said, begin = torch.nn.Linear(4, 4), Path(folder) / f"said by {rank}", time.monotonic()
    owner, name, _ = _MOMENTS[moment]
    as_it_is = getattr(owner, name)

    def leave(*args: Any, **kwargs: Any) -> Any:
        if how == "raises":
            raise KeyError("of the caller's")
        if moment == "as the group is made":
            as_it_is(*args, **kwargs)  # the others have connected to this rank
        os.kill(os.getpid(), signal.SIGSTOP if how == "stopped" else signal.SIGKILL)

    try:
        with patch.object(owner, name, leave if rank == lost else as_it_is):
            save = save_checkpoint(model, None, f"{folder}/saved", async_save=True)
            assert save is not None
            save.wait()
        words = "saved"
    except RuntimeError as error:
        words = str(error)
    said.with_suffix(".new").write_text(f"{time.monotonic() - begin}\n{words}")
    said.with_suffix(".new").rename(said)
    time.sleep(_PATIENCE_S)  # the store's server, and connections, stay until all have said it


@pytest.mark.parametrize(
    ("how", "moment", "lost"),
    [
        ("killed", "before the group", 1),
        ("stopped", "before the group", 1),
        ("raises", "before the group", 1),
        ("stopped", "before the group", 0),
        ("killed", "before the group", 0),
        ("killed", "as the group is made", 1),
        ("stopped", "as the group is made", 2),
        ("killed", "before its share", 1),
        ("stopped", "before its share", 2),
        ("stopped", "before its share", 0),
    ],
)
def test_the_others_say_what_they_waited_for(how: str, moment: str, lost: int, tmp_path: Path) -> None:
    """Rank 0 serves the store, of which some questions have no time-out."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    arguments = (free_port(), how, moment, lost, str(tmp_path))
    ranks = [context.Process(target=_save, args=(rank, *arguments), daemon=True) for rank in range(3)]
    for process in ranks:
        process.start()
    others = [tmp_path / f"said by {rank}" for rank in {0, 1, 2} - {lost}]
    deadline = time.monotonic() + _PATIENCE_S
    while not all(path.exists() for path in others) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in ranks:
        process.kill()
        process.join()
    for path in others:
        seconds, words = path.read_text().split("\n", 1)
        assert re.match(rf"all ranks must {_MOMENTS[moment][2]}.* {tmp_path}/saved; rank {path.name[-1]} ", words), (
            words
        )
        assert float(seconds) < 10 * _TIMEOUT_S, "far less than the patience of the test"
    assert not (tmp_path / "saved").exists()
