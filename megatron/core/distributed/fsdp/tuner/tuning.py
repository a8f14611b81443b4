"""``tune``: find the engine's fastest settings on these ranks, once, and keep them in a file."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from megatron.core.distributed.fsdp.api.module import contexts_of
from megatron.core.distributed.fsdp.comm.choose import TRANSPORTS, transport_problem
from megatron.core.distributed.fsdp.mesh.group_mesh import GroupMesh, device_of
from megatron.core.distributed.fsdp.tuner.figures import Settings
from megatron.core.distributed.fsdp.tuner.ranks import Ranks, TrialProcess, Worker, reachable_host
from megatron.core.distributed.fsdp.tuner.search import (
    Choice,
    Outcome,
    Search,
    check_plain,
    choices_in_words,
    in_words,
    table,
)
from megatron.core.distributed.fsdp.tuner.trial import Place, Trial
from megatron.core.distributed.fsdp.tuner.tuned_file import Entry, TunedFile

_MEETING = timedelta(minutes=10)


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What ``tune`` returns, alike on all ranks."""

    settings: dict[str, Any]
    """What was chosen; what it leaves out stays as the caller has it."""

    reason: str
    from_file: bool
    """It was read, not measured."""


def tune(
    trial: Trial,
    choices: Sequence[Choice],
    *,
    of: Mapping[str, str],
    file: str | Path | None = None,
    seconds: float = 600.0,
    refuses: Callable[[Settings], str | None] = lambda settings: None,
    words: Callable[[Settings], str] = in_words,
    device: torch.device | None = None,
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    start: Callable[[Trial, Place], Worker] = TrialProcess,
    say: Callable[[str], None] | None = None,
) -> Tuned:
    """Return the fastest settings: those of ``file`` if it has an entry for such a run, else what is measured now.

    Candidates are measured in processes of their own (``Trial``), in turn, several steps each. A choice is taken if it is
    faster by more than the noise. What this changes in the calling process: nothing.

    Args:
        trial: how a candidate is built and run.
        choices: what is to be chosen; ``engine_choices`` has those that leave all numbers as they are.
        of: what the run is, by name; a file's settings are taken for the same run with the same choices on as many ranks, and
            as many on each host, of the same devices with the same version of torch alone.
        file: is read if it is there, and gets what was measured; None: nothing is kept.
        seconds: after these, no further measurement begins. What was measured in too few is measured again where there are more.
        refuses: says why a candidate cannot be served, None if it can.
        words: describes settings in what is printed.
        device: this rank's; None: the current CUDA device if there is one, else the CPU.
        store: shared by the ranks; None: that of the default process group, which must be initialised.
        rank, world_size: None: those of the default process group.
        start: starts a process for trials.
        say: prints a line on rank 0; None: ``print``.

    Raises:
        ValueError: ``file`` is none of the tuner's, or damaged, or a folder; functions of the trial cannot be pickled; a setting of a
            choice is no plain JSON. On all ranks, before anything is measured, but for choices that follow from measurements.
        OSError: the file cannot be written. On all ranks, before anything is measured.

    Ranks: all; blocks. On CUDA, the devices need room for the trials beside what the callers hold.
    Source: ours.
    """
    rank = dist.get_rank() if rank is None else rank
    world_size = dist.get_world_size() if world_size is None else world_size
    device = device or _current_device()
    store = _own_keys(store or dist.distributed_c10d._get_default_store(), rank)
    say = say or partial(print, flush=True)
    whole = {**_identity(of, device, world_size), "choices": choices_in_words(choices)}

    def log(line: str) -> None:
        say(f" fsdp tune: {line}")

    def look() -> dict[str, Any]:
        kept = TunedFile(Path(file)) if file is not None else None
        entry = None if kept is None else kept.find(whole)
        too_few = None if entry is None else entry.too_few_seconds
        if entry is not None and (too_few is None or seconds <= too_few):
            log(f"the settings of {file}, measured {entry.when}: {words(entry.settings)}; {entry.reason}")
            if too_few is not None:
                log(
                    f"{too_few:.0f} s were too few to measure all candidates; give more to measure again, or delete "
                    "the file"
                )
            return {"settings": dict(entry.settings), "reason": entry.reason, "from_file": True}
        if not choices:
            log("there is nothing to choose for this run")
            return {"settings": {}, "reason": "there is nothing to choose", "from_file": False}
        _check_pickles(trial)
        for choice in choices:
            check_plain(choice.name, () if callable(choice.options) else choice.options)
        if kept is not None:
            kept.check_writable()
            other = f"; it has others, and the nearest differs: {kept.differences(whole)}" if kept.entries else ""
            lacks = f"has no settings for this run{other}"
            if too_few is not None:
                lacks = f"has settings for this run, for which {too_few:.0f} s were too few"
            log(f"{file} {lacks}. Measuring, for about {seconds:.0f} s at most")
        return {}

    found = _from_first(store, rank, "found in the file", look)
    if found:
        return Tuned(**found)
    trials = _store_of_trials(store, rank)
    place = Place(
        rank=rank,
        world_size=world_size,
        backend=_backend(device),
        device=str(device),
        store=(trials.host, trials.port),
        prefix="",
        timeout_s=max(60.0, seconds),
        log=os.devnull,
    )
    ranks = Ranks(
        store=store, rank=rank, world_size=world_size, start=lambda name: start(trial, replace(place, prefix=name))
    )
    if rank > 0:
        outcome = Outcome(**ranks.follow(_MEETING.total_seconds()))
        return Tuned(settings=outcome.settings, reason=outcome.reason, from_file=False)
    try:
        outcome = Search(choices, ranks.visit, seconds=seconds, refuses=refuses, words=words, say=log).run()
    finally:
        ranks.close()
    log("measured\n" + table(outcome.rows))
    log(f"chosen: {words(outcome.settings)}; {outcome.reason}")
    if file is not None and outcome.measured:
        entry = Entry(
            of=whole,
            settings=outcome.settings,
            reason=outcome.reason,
            when=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            rows=tuple(outcome.rows),
            too_few_seconds=seconds if outcome.num_late else None,
        )
        try:
            TunedFile(Path(file)).add(entry)
            log(f"written to {file}, where later runs of this kind read it; delete it to measure again")
        except (OSError, ValueError) as error:  # the choice still holds for this run
            log(f"{file} could not be written ({error}): the next run will measure again")
    # Last, since the others end their trials and go on to what may read the file.
    ranks.finish(asdict(outcome))
    return Tuned(settings=outcome.settings, reason=outcome.reason, from_file=False)


def _store_of_trials(store: Store, rank: int) -> TCPStore:
    """Return a store that the trial processes reach. It is in rank 0 itself, since they come and go. Ranks: all; blocks."""
    key = "store of trials"
    if rank == 0:
        served = TCPStore(reachable_host(), 0, is_master=True, wait_for_workers=False, timeout=_MEETING)
        store.set(key, json.dumps([served.host, served.port]))
        return served
    store.wait([key], _MEETING)
    host, port = json.loads(store.get(key))
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_MEETING)


def engine_facts(model: torch.nn.Module) -> dict[str, Any]:
    """Return what the options of ``engine_choices`` depend on: of any module with units, wrapped or not. Ranks: all; blocks."""
    groups = [group for context in contexts_of(model) for group in context.groups]
    sizes = [
        group.weights.full_storage.nbytes
        for group in groups
        if group.weights.needs_gather and group.weights.full_storage is not None
    ]
    inner = {group.group_mesh.axes[-1].name: group.group_mesh for group in groups}
    return {
        "transports": sorted(inner),
        "serving": sorted(set.intersection(*(set(_serving(mesh)) for mesh in inner.values()))),
        "unsharded_nbytes": sum(sizes),
        "largest_unit_nbytes": max(sizes, default=0),
        "largest_unit_numel": max((group.layout.segment_numel * group.layout.num_ranks for group in groups), default=0),
    }


def _serving(mesh: GroupMesh) -> list[str]:
    """Return the transports that can serve the innermost axis. Ranks: all of it; blocks."""
    group = mesh.mesh.get_group(mesh.mesh.ndim - 1)
    if group.size() == 1:
        return list(TRANSPORTS)
    return [kind for kind in TRANSPORTS if transport_problem(kind, group, device_of(mesh.mesh)) is None]


def _identity(of: Mapping[str, str], device: torch.device, world_size: int) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    own = {
        "number of ranks": str(world_size),
        "ranks on each host": os.environ.get("LOCAL_WORLD_SIZE", str(world_size)),
        "devices": name,
        "version of torch": torch.__version__,
    }
    return {**own, **{key: str(value) for key, value in of.items()}}


def _backend(device: torch.device) -> str:
    """Return the backends of the default process group, if there is one, such as "cpu:gloo,cuda:nccl"."""
    if device.type != "cuda":
        return "gloo"
    return str(dist.get_backend_config()) if dist.is_initialized() else "nccl"


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _own_keys(store: Store, rank: int) -> Store:
    """Return the store with keys of this call alone. Ranks: all call ``tune`` equally often with one store."""
    return PrefixStore(f"fsdp tune/{store.add(f'fsdp tune/calls of {rank}', 1)}", store)


def _from_first(store: Store, rank: int, key: str, do: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return on all ranks what rank 0 did, or raise its error. Ranks: all."""
    if rank == 0:
        try:
            value = do()
        except (ValueError, OSError) as error:
            store.set(key, json.dumps({"error": str(error), "is_value": isinstance(error, ValueError)}))
            raise
        store.set(key, json.dumps({"value": value}))
        return value
    store.wait([key], _MEETING)
    answer: dict[str, Any] = json.loads(store.get(key))
    if "error" in answer:
        raise (ValueError if answer["is_value"] else OSError)(answer["error"])
    return dict(answer["value"])


def _check_pickles(trial: Trial) -> None:
    try:
        pickle.dumps(trial)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"functions that are measured must be of a module, since other processes call them, got one that is not ({error}); "
            "define them at the top of a file, not inside of functions"
        ) from error
