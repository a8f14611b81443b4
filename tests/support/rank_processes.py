"""Starts ranks as torchrun does, but without torchrun, which would end one when another dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from tests.support.warm_python import warm_python

_ROOT = Path(__file__).parents[2]

Start = Callable[..., list[subprocess.Popen[str]]]


@contextmanager
def starting() -> Iterator[Start]:
    """Yield a function that starts two ranks; they are ended after the scope, with what they started."""
    started: list[subprocess.Popen[str]] = []

    def start_ranks(flags: str, *, of_rank_1: str = "", script: str = "pretrain_gpt.py") -> list[subprocess.Popen[str]]:
        processes = _start(script, flags, of_rank_1)
        started.extend(processes)
        return processes

    try:
        yield start_ranks
    finally:
        end(started)


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts two ranks for the test."""
    with starting() as start_ranks:
        yield start_ranks


def end(processes: list[subprocess.Popen[str]]) -> None:
    """Kill what is left of these process groups, and close what they printed."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def free_port() -> int:
    """Return a port of this host that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _start(script: str, flags: str, of_rank_1: str) -> list[subprocess.Popen[str]]:
    port = free_port()
    environment = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(_ROOT),
    }
    return [
        subprocess.Popen(
            [warm_python(), script, *flags.split(), *(of_rank_1.split() if rank == 1 else ())],
            cwd=_ROOT,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a process group of its own, with all that it starts
        )
        for rank in range(2)
    ]


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Return what the process prints until a line with ``text``, inclusive."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} never came:\n{seen}")


def wait_until_gone(processes: list[subprocess.Popen[str]], seconds: float) -> None:
    """Fail unless these processes and all that they started are gone within so many seconds."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.wait(timeout=max(deadline - time.monotonic(), 0.1))
        while _is_alive(process.pid):
            assert time.monotonic() < deadline, f"processes of {process.args!r} are left"
            time.sleep(0.05)


def _is_alive(process_group: int) -> bool:
    try:
        os.killpg(process_group, 0)
    except ProcessLookupError:
        return False
    return True


def write_corpus(prefix: Path, *, bad_token: int | None = None) -> str:
    """Write 200 documents of ids below 99, in one half of them ``bad_token`` if given; return the flags that train on it."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    generator = np.random.default_rng(1)
    for index, length in enumerate(generator.integers(5, 60, size=200)):
        tokens = generator.integers(0, 99, size=length)
        builder.add_item(tokens if bad_token is None or index < 100 else np.full_like(tokens, bad_token))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return f"--data-path 1.0 {prefix} --split 1,0,0"
