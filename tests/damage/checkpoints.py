"""Mutated checkpoints: each is refused with its name before the model changes, or loads what was saved; nothing in it runs.

``python -m tests.damage.checkpoints --trials 400`` changes a file of a checkpoint of two ranks, or puts a pickle that would
run code in its place, loads it, and compares. Half of the trials are on a checkpoint as PyTorch writes it, without
``checkpoint.json``; there the checksums of ``torch.save`` must do, and a whole file of another save cannot be told.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron.core.distributed.fsdp import load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp.checkpoint.folder import MARKER, OWNER
from tests.damage.mutations import change_file, run_often
from tests.support.checkpoint_models import adamw, sharded_model, train, whole_state
from tests.support.launch import run_ranks


class _Payload:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def _payload(ran: Path, draw: random.Random) -> _Payload:
    """Return one of several ways to make the folder ``ran``."""
    text = f"__import__('os').mkdir({str(ran)!r})"
    return draw.choice(
        (_Payload(os.mkdir, str(ran)), _Payload(eval, text), _Payload(exec, text), _Payload(os.system, f"mkdir {ran}"))
    )


def save_two(folder: str) -> dict[str, Any]:
    """Save two checkpoints of a run; return what the first one holds."""
    model = sharded_model("optim_grads_params", num_blocks=1)
    optimizer = adamw(model)
    train(model, optimizer, 2)
    state = whole_state(model, optimizer)
    for name in ("saved", "other"):
        extra = {"iteration": 2 + len(name), "per_rank": {"rank": dist.get_rank()}}
        save_checkpoint(model, optimizer, f"{folder}/{name}", extra_state=extra)
        train(model, optimizer, 1, first=2)
    return state


def mutate_often(trials: int, *, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Change checkpoints and load them; return how often what came of it, and a line for each fault.

    Ranks: must be called where torch.distributed is not initialised.
    """
    draw, outcomes, faults = random.Random(seed), Counter[str](), []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        wanted = run_ranks(2, save_two, name)[0]
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            for kind in ("saved", "other"):
                shutil.copytree(root / kind, root / f"{kind} by PyTorch")
                _make_foreign(root / f"{kind} by PyTorch")
            for trial in range(trials):
                suffix = draw.choice(("", " by PyTorch"))
                path, ran = root / f"trial{trial}", root / "ran"
                shutil.copytree(root / f"saved{suffix}", path)
                done = _change(path, root / f"other{suffix}", ran, draw)
                outcome = "FAULT: a payload ran" if ran.exists() else _outcome(path, wanted)
                if suffix and done.startswith("exchanged") and done.endswith(".distcp") and "something else" in outcome:
                    outcome = "a file of another save, which that format cannot tell"
                outcomes[f"{outcome.split(':')[0]}{suffix and ', written by PyTorch'}"] += 1
                if outcome.startswith("FAULT"):
                    faults.append(f"trial {trial}, {done}{suffix}: {outcome}")
                for folder in (path, ran):
                    shutil.rmtree(folder, ignore_errors=True)
        finally:
            dist.destroy_process_group()
    return outcomes, faults


def _make_foreign(path: Path) -> None:
    metadata = FileSystemReader(path).read_metadata()
    metadata.storage_meta = None
    (path / "checkpoint.json").unlink(missing_ok=True)
    (path / MARKER).write_bytes(pickle.dumps(metadata))


def _change(path: Path, other: Path, ran: Path, draw: random.Random) -> str:
    file = draw.choice([entry for entry in sorted(path.iterdir()) if entry.name != OWNER])
    if draw.random() < 0.25:
        return f"payload in {_with_payload(file, ran, draw)}"
    if draw.random() < 0.1 and file.suffix == ".distcp":
        shutil.copy(
            file, file.with_name("__7_0.distcp" if draw.random() < 0.5 else f"__{1 - int(file.name[2])}_0.distcp")
        )
        return f"{file.name} copied"
    return f"{change_file(file, other / file.name, draw)} {file.name}"


def _with_payload(file: Path, ran: Path, draw: random.Random) -> str:
    payload = _payload(ran, draw)
    if file.name == MARKER:
        metadata = pickle.loads(file.read_bytes())
        where = draw.choice(("alone", "planner_data", "storage_meta", "entry", "place", "key"))
        if where == "alone":
            metadata = payload
        elif where == "entry":
            metadata.state_dict_metadata["blocks.0.up.weight"].properties = payload
        elif where == "place":
            next(iter(metadata.storage_data.values())).relative_path = payload
        elif where == "key":
            metadata.state_dict_metadata["x"] = {"y": payload}
        else:
            setattr(metadata, where, payload)
        file.write_bytes(pickle.dumps(metadata))
        return f"{file.name} ({where})"
    if file.suffix != ".distcp" or draw.random() < 0.3:
        file.write_bytes(pickle.dumps(payload))
        return file.name
    archive = io.BytesIO()
    torch.save(payload, archive)
    # The first item is replaced where it lies, as far as there is space; readers look for the archive's end.
    content = file.read_bytes()
    packed = archive.getvalue()
    file.write_bytes(packed + content[len(packed) :])
    return f"{file.name} (an item)"


def _outcome(path: Path, wanted: dict[str, Any]) -> str:
    model = sharded_model("optim_grads_params", seed=1, num_blocks=1)
    optimizer = adamw(model)
    before = whole_state(model, optimizer)
    try:
        extra = load_checkpoint(model, optimizer, path)
    except (ValueError, FileNotFoundError) as error:
        if str(path) not in str(error):
            return f"FAULT: an error that names no file: {error}"
        return "refused" if whole_state(model, optimizer) == before else f"FAULT: the model has changed: {error}"
    except Exception as error:
        return f"FAULT: {type(error).__name__}: {error}"
    if whole_state(model, optimizer) != wanted or extra != {"iteration": 7, "per_rank": {"rank": 0}}:
        return "FAULT: something else was loaded"
    return "loaded as it was saved"


if __name__ == "__main__":
    sys.exit(run_often(__doc__, 400, mutate_often))
