"""Checkpoints of ``dcp.save({"model": ..., "optimizer": ...})`` with the dicts that PyTorch's state dict functions return.

Megatron-FSDP's version 2 saves like that. Weights have the prefix ``model.``; state has the names of ours, and param groups an entry for
each of their keys, by number or, flattened, by the name of the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from megatron.core.distributed.fsdp.checkpoint.description import Entries, StoredTensor
from megatron.core.distributed.fsdp.checkpoint.optimizer import EXECUTION, KIND, PARAM_GROUPS, STATE
from megatron.core.distributed.fsdp.checkpoint.reader import CheckpointReader, TensorReader
from megatron.core.distributed.fsdp.checkpoint.views import Part, View, ViewReader

MODEL = "model."
_GROUP = re.compile(rf"{re.escape(PARAM_GROUPS)}\.(?P<group>.+)\.(?P<key>[a-z_]+)")
_OF_SCHEDULES = ("initial_lr", "params", "param_names")


def in_our_layout(stored: CheckpointReader, weights: Iterable[str]) -> TensorReader:
    """Return a reader of a checkpoint under our names, which ``stored`` is unless it is in the layout above.

    Args:
        weights: names of the model's tensors.
    """
    entries = stored.entries
    if (
        KIND in entries
        or any(name in entries for name in weights)
        or not any(MODEL + name in entries for name in weights)
    ):
        return stored
    own = {name: name.removeprefix(MODEL) for name in entries if name.startswith(MODEL)}
    views = {name: _renamed(full, entries) for full, name in own.items() if isinstance(entries[full], StoredTensor)}
    values = stored.values([name for name in own if not isinstance(entries[name], StoredTensor)])
    # States of modules that have none are None.
    plain = {own[full]: value for full, value in values.items() if value is not None}
    groups = _param_groups(stored)
    if groups:
        names = dict.fromkeys(key for group in groups for key in group if key not in (*_OF_SCHEDULES, *EXECUTION))
        plain[PARAM_GROUPS] = groups
        plain[KIND] = {"class": "", "hyperparameters": list(names), "scalar_state": sorted(_keys_of_numbers(entries))}
    kept = [name for name in entries if name not in own and not name.startswith(f"{PARAM_GROUPS}.")]
    return ViewReader(stored, views, plain, keeps=kept)


def _renamed(full: str, entries: Entries) -> View:
    size = entries[full].size  # type: ignore[union-attr]
    start = (0,) * len(size)
    return View(size, [Part(start, tuple(size), full, start)])


def _keys_of_numbers(entries: Entries) -> set[str]:
    """Return the keys of state that has one number for a whole parameter, such as ``step``."""
    found: set[str] = set()
    for full, entry in entries.items():
        name, _, key = full.removeprefix(STATE).rpartition(".")
        weight = entries.get(MODEL + name)
        if full.startswith(STATE) and isinstance(entry, StoredTensor) and isinstance(weight, StoredTensor):
            found.update({key} if not entry.size and (weight.size or key == "step") else ())
    return found


def _param_groups(stored: CheckpointReader) -> list[dict[str, Any]]:
    """Return param groups as we store them; flattened ones each with one parameter."""
    found: dict[str, dict[str, Any]] = {}
    names = {name: match for name in stored.entries if (match := _GROUP.fullmatch(name)) is not None}
    tensors = {name: stored.tensor(name) for name in names if isinstance(stored.entries[name], StoredTensor)}
    values: Mapping[str, Any] = {**stored.values([name for name in names if name not in tensors]), **tensors}
    for name, match in names.items():
        if match["key"] not in EXECUTION and match["key"] != "initial_lr":
            found.setdefault(match["group"], {})[match["key"]] = values[name]
    return [{**group, "params": group.get("params", [key])} for key, group in found.items()]
