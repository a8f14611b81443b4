"""The process in which candidates are measured, one for each rank.

Trials run in processes of their own, so nothing of them is left in the process that trains: no memory, no random numbers
drawn, no compiled code, no process groups. And a trial may end as it likes: a rank that runs out of memory leaves the others
in a collective that no one can leave, and they are killed.

See [Note: trials].
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from megatron.core.child_process import end_with_parent
from megatron.core.distributed.fsdp.comm.peer_memory import peer_memory_nbytes
from megatron.core.distributed.fsdp.matrices.replayed_work import no_garbage_collection
from megatron.core.distributed.fsdp.tuner.figures import Settings, Visit
from megatron.core.distributed.fsdp.tuner.search import OUT_OF_MEMORY

_WARMUP_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Trial:
    """How a candidate is built and run. Functions are pickled: they are of a module, or ``functools.partial`` of such ones.

    Ranks: all call each of them together, in a process in which torch.distributed is initialised and the device current.
    """

    build: Callable[[Settings], Any]
    """Builds model and optimizer from the settings of a candidate; returns what ``step`` needs."""

    step: Callable[[Any], object]
    """Runs one step with what ``build`` has returned."""

    close: Callable[[Any], object] | None = None
    """Frees what the garbage collector does not."""

    facts: Callable[[Any], Mapping[str, Any]] | None = None
    """Returns facts of the model on which options of later choices depend; see ``engine_facts``. Called between the first steps and
    the measured ones, so what it allocates counts, too."""

    warmup_steps: Callable[[Settings], int] | None = None
    """Steps before those that are measured. None: three, since the engine records the first, and follows its plan from the second on."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a trial process belongs."""

    rank: int
    world_size: int
    backend: str
    device: str
    store: tuple[str, int]
    """Host and port."""

    prefix: str
    """Of the keys of these processes, which no others have had."""

    timeout_s: float
    log: str
    """The file that takes what the process prints."""


def serve(trial: Trial, place: Place, requests: Connection) -> None:
    """Measure what is asked for until the parent is gone. Runs in a process of its own."""
    end_with_parent()
    _print_into(place.log)
    device: torch.device | None = None
    with suppress(EOFError, OSError):
        while True:
            settings, num_steps = requests.recv()
            try:
                device = device or _join(place)
                answer: Any = measure(trial, settings, num_steps, device)
            except BaseException as error:
                traceback.print_exc()
                answer = reason_of(error)
            sys.stdout.flush()
            requests.send(answer)


def reason_of(error: BaseException) -> str:
    """Say in one line why a candidate is lost."""
    text = " ".join(str(error).split())
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in text.lower():
        return f"{OUT_OF_MEMORY}: {text[:160]}"
    return f"{type(error).__name__}: {text[:300]}"


def _print_into(path: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):  # as they are: a caller may have put others in their place
        with suppress(AttributeError, OSError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _join(place: Place) -> torch.device:
    """Meet the other trial processes; return the device. Ranks: all; blocks."""
    device = torch.device(place.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=place.timeout_s)
    store = TCPStore(*place.store, is_master=False, timeout=timeout, wait_for_workers=False)
    dist.init_process_group(
        place.backend,
        store=PrefixStore(place.prefix, store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return device


def measure(trial: Trial, settings: Settings, num_steps: int, device: torch.device) -> Visit:
    """Build a candidate, step it, and free it; return what this rank measured. Ranks: all; blocks."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    built = trial.build(settings)
    try:
        for _ in range(_WARMUP_STEPS if trial.warmup_steps is None else trial.warmup_steps(settings)):
            trial.step(built)
        facts = {} if trial.facts is None else dict(trial.facts(built))
        gc.collect()
        with no_garbage_collection():
            trial.step(built)  # the host has waited; steps are measured in a row
            moments = [_now(device)]
            for _ in range(num_steps):
                trial.step(built)
                moments.append(_now(device))
            if device.type == "cuda":
                torch.cuda.synchronize()
                seconds = tuple(begin.elapsed_time(end) / 1e3 for begin, end in pairwise(moments))
            else:
                seconds = tuple(end - begin for begin, end in pairwise(moments))
        peak, spare, total = _memory(device)
    finally:
        if trial.close is not None:
            trial.close(built)
    del built
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Visit(seconds=seconds, peak_nbytes=peak, spare_nbytes=spare, total_nbytes=total, facts=facts)


def _now(device: torch.device) -> Any:
    """Return the time in seconds, or on CUDA an event of it: the host does not wait between steps."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _memory(device: torch.device) -> tuple[int, int, int]:
    """Return the peak since the visit began, what is left beside it, and the whole, in bytes."""
    if device.type != "cuda":
        page = os.sysconf("SC_PAGE_SIZE")
        of_host = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        free, total = (os.sysconf(name) * page // of_host for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"))
        return 0, free, total
    free, total = torch.cuda.mem_get_info(device)
    not_reserved_now = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device) + peer_memory_nbytes(device)
    return peak, max(0, free - not_reserved_now), total
