"""Runs a function on several ranks, each a process of one thread, and brings back results or the first traceback."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Children fork from a server that has imported torch once: a rank starts in a fraction of a second.
PRELOAD = [
    "torch",
    "megatron.core.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.utils.tensorboard",
    "pytest",
    "pretrain_gpt",
    "tests.support.agreement",
    "tests.support.gloo_device",
    "tests.support.hybrid",
    "tests.support.rank_checks",
    "tests.support.tiny_gpt",
    "tests.support.frozen_imports",
]


_GRACE_S = 3.0
"""For all ranks to end, once one has failed. A test of how they end gives more, for a busy machine."""


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 400.0,
    grace_s: float = _GRACE_S,
    backend: str = "gloo",
) -> list[Any]:
    """Call ``function(*args)`` on ``num_ranks`` ranks and return [num_ranks] results, in rank order.

    Args:
        function: a module-level function (it is pickled); in it ``torch.distributed`` is initialised.
        backend: "gloo" on the CPU, or "nccl" with a CUDA device for each rank, which is its current one. Where there are fewer
            devices than ranks, a device serves several, each of another host to NCCL: what they send each other goes over
            sockets, and they take turns on the device. Peer copy serves them as if they had devices of their own.
        timeout_s: seconds until all ranks are ended and the call fails.
        grace_s: seconds in which all ranks may end by themselves, once one has failed.

    Raises:
        AssertionError: a rank raised (its traceback is the message), died, or did not finish in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            receiver, sender = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(rank, num_ranks, f"{folder}/store", sender, function, args, timeout_s, backend),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, timeout_s)
        finally:
            for pipe in pipes:
                pipe.close()
            deadline = time.monotonic() + grace_s
            for process in processes:
                while process.is_alive() and not _is_stopped(process.pid) and time.monotonic() < deadline:
                    process.join(timeout=0.1)
                if process.is_alive():
                    process.kill()
                    process.join()


def _is_stopped(pid: int | None) -> bool:
    """Return whether SIGSTOP has stopped a process, which therefore will not end by itself."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def num_simulated_hosts() -> int:
    """How many ranks may share a device in tests that are marked as needing more devices: ``SIMULATED_HOSTS``."""
    return int(os.environ.get("SIMULATED_HOSTS", "1"))


def served_transports(*names: str) -> list[str]:
    """Return those of ``names`` that ranks on shared devices have too: symmetric memory needs a device each."""
    return [name for name in names if name != "symm" or num_simulated_hosts() == 1]


def _collect(pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    pending = {pipe: rank for rank, pipe in enumerate(pipes)}
    while pending:
        ready: list[Any] = wait(list(pending), timeout=timeout_s)
        if not ready:
            raise AssertionError(f"ranks {sorted(pending.values())} did not finish in {timeout_s} s")
        for pipe in ready:
            rank = pending.pop(pipe)
            try:
                succeeded, value = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            if not succeeded:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return results


def _rank_main(
    rank: int,
    num_ranks: int,
    store: str,
    sender: Connection,
    function: Any,
    args: Any,
    timeout_s: float,
    backend: str,
) -> None:
    import torch
    import torch.distributed as dist

    from tests.support.gloo_device import share_gloo_device

    share_gloo_device()
    warnings.simplefilter("error")
    # What torch.compile itself imports.
    warnings.filterwarnings("ignore", message=".*torch.jit.script_method.* is deprecated", category=DeprecationWarning)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(max(0.9 * timeout_s, timeout_s - 5.0))  # where it stands when the limit is near
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    try:
        if backend == "nccl":
            host, device = divmod(rank, torch.cuda.device_count())
            torch.cuda.set_device(device)
            os.environ["LOCAL_RANK"] = str(device)
            if num_ranks > torch.cuda.device_count():
                # NCCL accepts a device once per host, and finds no network between hosts that are one.
                os.environ["NCCL_HOSTID"] = f"host{host}"
                os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
                os.environ.setdefault("NCCL_IB_DISABLE", "1")
                os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        result = function(*args)
        sender.send((True, result))
        # A group that is left while others still connect to it is an error there: stay until the caller has all results.
        with suppress(EOFError, ConnectionError):
            sender.recv()
        dist.destroy_process_group()
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()
        sender.close()
