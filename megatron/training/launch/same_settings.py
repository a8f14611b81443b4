"""The comparison of all ranks' settings at the start, in the store, before anything is allocated."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from enum import Enum
from typing import Any

import torch

from megatron.core.datasets.fingerprint import corpus_fingerprint, path_fingerprint
from megatron.training.launch.refusals import StartRefusedError
from megatron.training.launch.rendezvous import Rendezvous, ranks_text

MAY_DIFFER = {
    "data.cache_path": "a local folder",
    "data.data_path": "local files: their content is compared",
    "data.train_data_path": "local files: their content is compared",
    "data.valid_data_path": "local files: their content is compared",
    "data.test_data_path": "local files: their content is compared",
    "logging.logging_level": "how much a rank says",
    "logging.tensorboard_dir": "a local folder",
    "logging.tensorboard_queue_size": "of the one rank that writes",
    "logging.wandb_save_dir": "a local folder",
    "tuning.file": "of the one rank that reads and writes",
    "watch.prometheus_file": "of the one rank that writes",
    "watch.status_page": "of the one rank that writes",
    "tokenizer.tokenizer_model": "a local file or folder: its content is compared",
    "tokenizer.vocab_file": "a local file: its content is compared",
    "tokenizer.merge_file": "a local file: its content is compared",
    "launch_line.words": "what is in effect is compared where it is read",
    "megatron_lm.values": "saved for another program; what is in effect is compared where it is read",
    "profiling.trace_folder": "a local folder",
    "profiling.chakra_folder": "a local folder",
    "profiling.memory_snapshot_path": "a local file",
}
"""Settings that ranks may give differently, and why. All others must be the same."""

_PATIENCE = timedelta(seconds=5)


class SettingsDifferError(StartRefusedError):
    """Ranks were given different settings, or one of them refuses its own."""


def values_to_compare(settings: Any) -> dict[str, str]:
    """Return the settings that must be the same on all ranks, by name, and what they read: corpora, tokenizer, torch.

    Args:
        settings: a dataclass of dataclasses.

    Ranks: each alone; reads the ``.idx`` files of the data, and a few kilobytes of each ``.bin``.
    """
    values = flat_values(settings)
    values["version of torch"] = torch.__version__
    data = settings.data
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        given: tuple[str, ...] = getattr(data, name) or ()
        # A weight is itself, a prefix is what its files hold.
        fingerprint = path_fingerprint if data.sft else corpus_fingerprint
        values[f"data.{name}"] = " ".join(part if _is_number(part) else fingerprint(part) for part in given)
    return values | tokenizer_fingerprints(settings)


def tokenizer_fingerprints(settings: Any) -> dict[str, str]:
    """Return what the files of the tokenizer hold, by the names of their settings."""
    return {f"tokenizer.{name}": path_fingerprint(path) for name, path in settings.tokenizer.files().items()}


def flat_values(settings: Any) -> dict[str, str]:
    """Return the settings that must be the same on all ranks, by name, as texts that are the same in any process."""
    return {name: text for name, text in _flat(settings, "") if name not in MAY_DIFFER}


def compare_settings(values: Mapping[str, str], rendezvous: Rendezvous, timeout: timedelta) -> None:
    """Compare values by name between all ranks: a digest, and the values only where digests differ.

    Raises:
        SettingsDifferError: on all ranks, with each value that differs and its ranks; or a rank called ``report_refusal``.
        RuntimeError: ranks have not come in time.

    Ranks: all; blocks. Each makes a constant number of requests to the store.
    """
    store, world_size = rendezvous.store, rendezvous.world_size
    text = json.dumps(dict(values), sort_keys=True)
    own = hashlib.sha256(text.encode()).hexdigest()
    if rendezvous.rank == 0:
        store.set("settings/of rank 0", own)
    store.add(f"settings/{own}", 1)
    if store.add("settings/ranks", 1) == world_size:  # the last one: all digests are there
        _decide(rendezvous, "alike" if store.add(f"settings/{own}", 0) == world_size else "different")
    try:
        store.wait(["settings/verdict"], timeout)
    except RuntimeError as error:
        come = store.add("settings/ranks", 0)
        raise RuntimeError(
            f"all {world_size} ranks must come to compare their settings, got {come} within "
            f"{timeout.total_seconds():.0f} s; look for ranks that have ended or hang"
        ) from error
    verdict = store.get("settings/verdict").decode()
    if verdict == "different":
        verdict = _differences(values, own, rendezvous, timeout)
    if verdict != "alike":
        _wait_for_readers(rendezvous)
        raise SettingsDifferError(verdict, rendezvous)


def report_refusal(text: str, rendezvous: Rendezvous, report: Callable[[str], None]) -> None:
    """Tell all ranks that this one refuses its settings: they raise in ``compare_settings``.

    Args:
        text: why.
        report: is called with ``text`` before, except where rank 0 refuses for the same reason.

    Ranks: those that refuse; blocks for a few seconds at most.
    """
    store, own = rendezvous.store, f"refused {text}"
    if rendezvous.rank == 0:
        report(text)
        store.set("settings/of rank 0", own)
    elif not _is_of_rank_0(rendezvous, own):
        report(text)
    lines = "\n".join(f"  {line}" for line in text.splitlines())
    _decide(rendezvous, f"rank {rendezvous.rank} refuses its command line:\n{lines}")
    _wait_for_readers(rendezvous)


def _is_of_rank_0(rendezvous: Rendezvous, own: str) -> bool:
    try:
        rendezvous.store.wait(["settings/of rank 0"], _PATIENCE)
    except RuntimeError:
        return False
    return rendezvous.store.get("settings/of rank 0").decode() == own


def _wait_for_readers(rendezvous: Rendezvous) -> None:
    """Note that this rank knows the verdict; where the store ends with this process, wait for the others a few seconds."""
    store, deadline = rendezvous.store, time.monotonic() + _PATIENCE.total_seconds()
    num_readers = store.add("settings/readers", 1)
    while rendezvous.serves and num_readers < rendezvous.world_size and time.monotonic() < deadline:
        time.sleep(0.05)
        num_readers = store.add("settings/readers", 0)


def _decide(rendezvous: Rendezvous, verdict: str) -> None:
    """Set the verdict, unless there is one."""
    if rendezvous.store.add("settings/verdicts", 1) == 1:
        rendezvous.store.set("settings/verdict", verdict)


def _differences(values: Mapping[str, str], own: str, rendezvous: Rendezvous, timeout: timedelta) -> str:
    """Return the message that names what differs; rank 0 compares what the ranks unlike it have sent."""
    store, rank = rendezvous.store, rendezvous.rank
    is_as_first = store.get("settings/of rank 0").decode() == own
    store.set(f"settings/values/{rank}", "" if is_as_first else json.dumps(dict(values)))
    if rank == 0:
        keys = [f"settings/values/{other}" for other in range(rendezvous.world_size)]
        store.wait(keys, timeout)
        sent = [store.get(key).decode() for key in keys]
        store.set("settings/differences", _describe([json.loads(text) if text else values for text in sent]))
    store.wait(["settings/differences"], timeout + _PATIENCE)
    return store.get("settings/differences").decode()


def _describe(values_of: list[Mapping[str, str]]) -> str:
    lines = []
    for name in dict.fromkeys(name for values in values_of for name in values):
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, values in enumerate(values_of):
            ranks_of[values.get(name, "nothing")].append(rank)
        if len(ranks_of) > 1:
            got = " and ".join(f"{value or 'nothing'} on {ranks_text(ranks)}" for value, ranks in ranks_of.items())
            lines.append(f"{name} must be the same on all ranks, got {got}")
    return "\n".join((*lines, "give all ranks one command line, and the same files"))


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            if not field.name.endswith("init_method"):  # made from other fields
                yield from _flat(getattr(value, field.name), f"{name}.{field.name}" if name else field.name)
    else:
        yield name, _text(value)


def _text(value: Any) -> str:
    """Return what is the same for equal values in any process."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text(value[key])}' for key in sorted(value, key=str))}}}"
    if isinstance(value, Enum):
        return value.name
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return str(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
