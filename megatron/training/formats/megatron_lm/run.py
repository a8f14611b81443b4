"""What a run of Megatron-LM goes on from, beside its tensors: arguments, counters, schedule and the steps of its optimizer.

They are read as inert values: see [Note: pickles as data] in the engine's ``pickles.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core.distributed.fsdp.checkpoint import CheckpointReader, Record, StoredValue, read_inert
from megatron.core.regular_file import is_regular, read_regular
from megatron.training.formats.foreign_run import ForeignRun

COMMON = "common_state/shard_0_1"  # since Megatron-Core 0.19; a file of its own before
_COMMON_FILE = "common.pt"
_OLD_NAMES_OF_SCHEDULE = {
    "start_lr": "max_lr",
    "warmup_iter": "lr_warmup_steps",
    "warmup_steps": "lr_warmup_steps",
    "end_iter": "lr_decay_steps",
    "decay_steps": "lr_decay_steps",
    "decay_style": "lr_decay_style",
    "num_iters": "num_steps",
}
_PLAIN = (type(None), bool, int, float, str, torch.dtype)
# State that has no counterpart here, and what is in its place.
_NOT_TAKEN = {
    "rng_state": "dropout is seeded by --seed and the iteration",
    "rerun_state_machine": "steps are not run twice",
    "grad_scaler": "there is no loss scaling with bf16",
}


def read_run(stored: CheckpointReader) -> ForeignRun:
    """Read what a distributed checkpoint of Megatron-LM, ``torch_dist`` or ``fsdp_dtensor``, says of its run.

    Raises:
        ValueError: what is there is not what Megatron-LM writes.
    """
    state = _common_state(stored)
    if state is None:
        state = _nested_state(stored)
    objects = [name for name in stored.entries if _OPTIMIZER_OBJECT.fullmatch(name)]
    parts = stored.inert_values(objects[:_MAX_OBJECTS])
    there = {name.partition("/")[0].partition(".")[0] for name in stored.entries}
    state = {**state, "optimizer": [state.get("optimizer"), list(parts.values())]}
    return _run_of(
        stored.folder,
        state,
        there,
        file=_file_of_args(stored),
        has_state=any(name == "optimizer" or name.startswith("chained_") for name in there),
    )


def run_of_archive(folder: Path, state: Any, file: Path) -> ForeignRun:
    """Return what an archive of ``--ckpt-format torch`` says of its run, without the state of its optimizer."""
    return _run_of(folder, state if isinstance(state, dict) else {}, set(), file=file)


def _run_of(
    folder: Path, state: Mapping[str, Any], names: set[str], *, file: Path, has_state: bool = False
) -> ForeignRun:
    args, not_plain = _plain_args(state.get("args"))
    found = state.get("opt_param_scheduler", state.get("lr_scheduler"))
    schedule = found if isinstance(found, Mapping) else {}
    iteration = state.get("iteration", state.get("total_iters"))
    if type(iteration) is int and iteration < 0:
        raise ValueError(f"{folder} must hold an iteration from 0 on, got {iteration}; load another checkpoint")
    content = state.get("content_metadata")
    sharding = content.get("distrib_optim_sharding_type", "") if isinstance(content, Mapping) else ""
    if not sharding:
        sharding = next((str(kind) for kind in _values_of(state.get("optimizer"), "param_state_sharding_type")), "")
    there = names | state.keys()
    return ForeignRun(
        path=folder,
        args=args,
        not_plain=not_plain,
        file=file,
        has_state=has_state,
        iteration=iteration if type(iteration) is int else None,
        is_release=folder.name == "release",
        schedule={_OLD_NAMES_OF_SCHEDULE.get(str(name), str(name)): value for name, value in schedule.items()},
        steps=tuple(sorted(set(_steps_in(state.get("optimizer"))))),
        sharding=sharding,
        not_taken=tuple(f"{name} ({instead})" for name, instead in _NOT_TAKEN.items() if name in there),
    )


_OPTIMIZER_OBJECT = re.compile(
    r"(?:chained_[0-9]+\.)?optimizer\.distributed\.dp_group_idx_[0-9]+\.optimizer(?:/shard_0_1)?"
)
_MAX_OBJECTS = 64  # all model-parallel ranks' param groups say the same


def _plain_args(args: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the plain ones of saved arguments by name, of an enum its value, and the names of others."""
    state = args.state if isinstance(args, Record) else None
    values, others = {}, set()
    for name, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, Record) and len(value.arguments) == 1:
            (value,) = value.arguments
        if isinstance(value, _PLAIN) or (isinstance(value, list) and all(isinstance(item, _PLAIN) for item in value)):
            values[str(name)] = value
        else:
            others.add(str(name))
    return values, frozenset(others)


def _file_of_args(stored: CheckpointReader) -> Path:
    common, entry = stored.folder / _COMMON_FILE, stored.entries.get(COMMON, stored.entries.get("args"))
    return stored.folder / entry.place.file if isinstance(entry, StoredValue) and not is_regular(common) else common


def _common_state(stored: CheckpointReader) -> dict[str, Any] | None:
    """Return the state that ``torch_dist`` keeps in one object; None if there is none."""
    file = stored.folder / _COMMON_FILE
    if is_regular(file):
        try:
            state = read_inert(read_regular(file))
        except ValueError as error:
            raise ValueError(f"{file} must be {error}; the checkpoint is damaged, load another one") from error
    elif isinstance(stored.entries.get(COMMON), StoredValue):
        (state,) = stored.inert_values([COMMON]).values()
        state = state[0] if isinstance(state, list) and state else state
    else:
        return None
    if not isinstance(state, dict):
        raise ValueError(f"{stored.folder} must have a dict as its common state, got a {type(state).__name__}")
    return state


def _nested_state(stored: CheckpointReader) -> dict[str, Any]:
    """Return the plain values of ``fsdp_dtensor``, each of which has an entry of its own, as a nest of dicts."""
    names = [
        name
        for name, entry in stored.entries.items()
        if isinstance(entry, StoredValue)
        and (name in ("args", "iteration", "checkpoint_version") or name.startswith("opt_param_scheduler."))
    ]
    of_steps = [name for name in stored.entries if name.startswith("optimizer.") and name.endswith(".step")]
    steps = [name for name in of_steps if isinstance(stored.entries[name], StoredValue)]
    state: dict[str, Any] = {}
    values = stored.inert_values(names + steps)
    for name in names:
        group, _, key = name.rpartition(".")
        (state.setdefault(group, {}) if group else state)[key] = values[name]
    tensors = [name for name in of_steps if name not in steps]
    state["optimizer"] = [{"step": value} for value in (*(values[n] for n in steps), *map(stored.tensor, tensors))]
    return state


def _steps_in(value: Any) -> Iterator[int]:
    for found in (*_values_of(value, "step"), *_values_of(value, "common_step")):
        number = found.item() if isinstance(found, torch.Tensor) and found.numel() == 1 else found
        if isinstance(number, (int, float)):
            yield int(number)


def _values_of(value: Any, key: str) -> Iterator[Any]:
    """Yield what a nest of dicts, lists and tuples has under a key."""
    if isinstance(value, Mapping):
        if key in value:
            yield value[key]
        for item in value.values():
            yield from _values_of(item, key)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _values_of(item, key)
