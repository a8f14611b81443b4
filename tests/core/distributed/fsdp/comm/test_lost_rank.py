"""When a rank is lost, the others end within the process group's time-out and say what they waited for."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from megatron.core.distributed.fsdp.buffers.gradients import Gradients
from megatron.core.distributed.fsdp.buffers.weights import Weights
from megatron.core.distributed.fsdp.comm.process_group import RankOrderTransport
from tests.support.launch import run_ranks
from tests.support.models import loss_of as net_loss
from tests.support.models import make_net, my_piece, shard_net

# Of the group; far less than the launcher's, which must see the ranks' own words.
_GROUP_TIMEOUT_S = 10.0


def _survive(moment: str, strategy: str, path: str) -> None:
    """Train; rank 1 leaves in the third step at ``moment``; the others write down how they ended."""
    rank = dist.get_rank()
    dist.barrier()  # no rank leaves the group while another still connects to it
    dist.destroy_process_group()
    timeout = timedelta(seconds=_GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=3, timeout=timeout)
    net = shard_net(make_net(), strategy)
    for step in range(2):
        net_loss(net, my_piece(step)).backward()
    begin = time.monotonic()

    def leave(*_: Any) -> None:
        if rank == 1:
            # Stopped, a process hangs and its connections stay open.
            os.kill(os.getpid(), signal.SIGSTOP if moment.startswith("stopped") else signal.SIGKILL)

    def run(block: Any, x: torch.Tensor) -> torch.Tensor:
        if block is net.blocks[1] and moment.endswith("forward"):
            leave()
        out: torch.Tensor = block(x)
        return out

    net.around = run
    if moment.endswith("backward"):
        net.blocks[1].parameter_groups[0].unsharded[0].register_hook(leave)
    try:
        net_loss(net, my_piece(2)).backward()
        words = "finished"
    except RuntimeError as error:
        words = f"{time.monotonic() - begin}\n{error.__cause__}\n{error}"
    Path(f"{path}/said by {rank}").write_text(words)
    os._exit(0)  # the group is broken: there is nothing to end in order


@pytest.mark.parametrize(
    ("moment", "strategy", "waited_for"),
    [
        (
            "killed in forward",
            "optim_grads_params",
            r"all-gather of the weights of blocks\.\d\.norm\.weight and 4 more",
        ),
        ("killed in backward", "no_shard", r"reduction of the gradients of blocks\.\d\.norm\.weight and 4 more"),
        (
            "stopped in backward",
            "optim_grads_params",
            r"(all-gather|reduction) of the .* of (blocks\.\d\.)?\w+\.weight",
        ),
    ],
)
def test_the_others_say_what_they_waited_for(moment: str, strategy: str, waited_for: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(3, _survive, moment, strategy, str(tmp_path), timeout_s=300, grace_s=120)
    for rank in (0, 2):
        seconds, cause, message = (tmp_path / f"said by {rank}").read_text().split("\n", 2)
        assert float(seconds) < 10 * _GROUP_TIMEOUT_S, "far less than the launcher waits"
        assert re.match(waited_for, message), message
        assert f"must be joined by all of ranks [0-2], and did not finish on rank {rank}" in message
        assert cause and cause in message, "the backend's own words are kept"


def _lose_a_loader_process(owner: type, name: str) -> str:
    """Train; a process of a loader dies while the method runs for the first time. Return what backward or forward raised."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # ranks are, and may have no children
    net = shard_net(make_net(), "optim_grads_params")
    loader = DataLoader(TensorDataset(torch.arange(1000)), num_workers=1, multiprocessing_context="fork")
    batches = iter(loader)
    next(batches)
    (process,) = multiprocessing.active_children()

    def die(*_: Any, **__: Any) -> None:
        process.kill()
        time.sleep(20.0)  # PyTorch's handler of SIGCHLD raises in here
        raise AssertionError("nobody told of the process's end")

    with mock.patch.object(owner, name, die):
        try:
            net_loss(net, my_piece(0)).backward()
        except RuntimeError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("owner", "name"), [(Weights, "gather"), (Gradients, "reduce"), (RankOrderTransport, "all_reduce")]
)
def test_the_death_of_a_loader_process_is_told_as_such(owner: type, name: str) -> None:
    """PyTorch raises from a signal handler, wherever the rank is: it is no collective that did not finish."""
    for said in run_ranks(2, _lose_a_loader_process, owner, name, timeout_s=60):
        assert re.match(r"DataLoader worker \(pid \d+\) is killed by signal: Killed", said), said
