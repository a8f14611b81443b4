"""Megatron-LM's distributed checkpoints: ``torch_dist`` and ``fsdp_dtensor``, both folders that PyTorch's DCP wrote.

For names and layouts see [Note: Megatron-LM's names] in ``names.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.core.distributed.fsdp.checkpoint import (
    CheckpointReader,
    Entries,
    StoredTensor,
    TensorReader,
    View,
    ViewReader,
    hyperparameter_names,
)
from megatron.core.regular_file import is_regular, parse_json, read_regular
from megatron.training.formats.architecture import Architecture, sizes_of
from megatron.training.formats.foreign import ForeignCheckpoint
from megatron.training.formats.foreign_run import ForeignRun
from megatron.training.formats.megatron_lm.buffers import bucket_views, has_buckets
from megatron.training.formats.megatron_lm.names import EMBEDDING, OUTPUT, views_in
from megatron.training.formats.megatron_lm.optimizer import (
    MAIN_WEIGHT,
    STATE_KEYS,
    main_weight_views,
    state_names,
    state_views,
)
from megatron.training.formats.megatron_lm.run import read_run
from megatron.training.formats.rules import check_stored

CONFIG = "metadata.json"
_OURS = ("optimizer.", "extra_state.", "optional_state.")
_PREFIXES = ("", "model.module.", "model.module.module.", "model.")


def prefix_of(entries: Entries) -> str | None:
    """Return what stands before the model's names in a checkpoint of Megatron-LM; None if it is none."""
    return next((prefix for prefix in _PREFIXES if prefix + EMBEDDING in entries), None)


def open_distributed(folder: Path, *, verify: bool = True) -> ForeignCheckpoint | None:
    """Open a checkpoint in ``torch_dist`` or ``fsdp_dtensor``; None if the folder, which DCP wrote, is neither.

    Args:
        verify: compare what is read with its checksums.

    Raises:
        ValueError: a file is not what it must be.
        NotImplementedError: it is in an older layout.
    """
    stored = CheckpointReader(folder, verify=verify)
    prefix = prefix_of(stored.entries)
    is_torch_dist = is_regular(folder / CONFIG)
    if prefix is None or (not is_torch_dist and prefix == ""):
        return None
    if is_torch_dist:
        _check_backend(folder / CONFIG)

    run = read_run(stored)

    def views(architecture: Architecture, state_keys: Sequence[str] | None) -> ViewReader:
        parameters, buffers = sizes_of(architecture)
        found = views_in(stored.entries, {**parameters, **buffers}, architecture, prefix)
        check_stored(
            found,
            stored.entries,
            folder,
            unused=lambda name: not _is_of_model(name, prefix) or _is_tied(name, prefix, architecture),
            may_be_longer=lambda name: name.removeprefix(prefix) in (EMBEDDING, OUTPUT),
        )
        if state_keys is None:
            return ViewReader(stored, found)
        if has_buckets(stored.entries):
            main, by_key = bucket_views(stored, found, parameters, architecture, run.args, state_keys)
            of_weights = {
                f"optimizer.state.{n}.{key}": view for key, views in by_key.items() for n, view in views.items()
            }
            state = {**of_weights, **main}
        else:
            state = _state_by_name(stored.entries, run, parameters, architecture, state_keys)
        more, plain = steps_and_groups(run, parameters, state_keys)
        return ViewReader(stored, {**found, **state, **more}, plain)

    kind = "torch_dist" if is_torch_dist else "fsdp_dtensor"
    embedding = stored.entries[prefix + EMBEDDING]
    num_ids = embedding.size[0] if isinstance(embedding, StoredTensor) and embedding.size else 0
    return ForeignCheckpoint(
        path=folder, kind=f"Megatron-LM, {kind}", architecture={}, views=views, num_ids=num_ids, run=run
    )


_WITHOUT = "load it with --no-load-optim, or --finetune to begin at iteration 0"


def _state_by_name(
    entries: Entries,
    run: ForeignRun,
    sizes: dict[str, torch.Size],
    architecture: Architecture,
    keys: Sequence[str],
) -> dict[str, View]:
    """Return the optimizer's state, and the main weights in place of the weights, as views.

    Raises:
        ValueError: it is not there, or not of this optimizer and model; says what.
    """
    names, where = state_names(entries), run.path
    if not names:
        raise ValueError(f"{where} must hold the optimizer's state, got none: {_WITHOUT}")
    others = sorted(names.keys() - {*keys, *MAIN_WEIGHT, "step"})
    if others:
        raise ValueError(
            f"{where} must hold optimizer state {', '.join(keys)}, got {', '.join(others)} too: {_WITHOUT}"
        )
    found: dict[str, View] = {}
    for key in keys:
        views = state_views(key, names, entries, sizes, architecture, where)
        found |= {f"optimizer.state.{name}.{key}": view for name, view in views.items()}
    return found | main_weight_views(names, entries, sizes, architecture, where)


def steps_and_groups(
    run: ForeignRun, sizes: dict[str, torch.Size], keys: Sequence[str]
) -> tuple[dict[str, View], dict[str, Any]]:
    """Return the steps of all weights as views, and the optimizer's plain values."""
    found = {}
    if "exp_avg_sq" in keys:
        if run.step is None:
            raise ValueError(f"{run.path} must say how many steps the optimizer made, got nothing: {_WITHOUT}")
        step = View(torch.Size(()), fill=float(run.step), dtype=torch.float32)
        found = {f"optimizer.state.{name}.step": step for name in sizes}
    own: torch.optim.Optimizer
    if "exp_avg_sq" in keys:
        own = torch.optim.AdamW([torch.zeros(())])
    else:
        own = torch.optim.SGD([torch.zeros(())])
    kind = {"class": type(own).__name__, "hyperparameters": hyperparameter_names(own), "scalar_state": ["step"]}
    return found, {"optimizer.param_groups": [{"params": list(sizes)}], "optimizer.kind": kind}


def in_our_names(stored: CheckpointReader, architecture: Architecture) -> TensorReader:
    """Return a reader of a checkpoint that this framework wrote in one of these formats, or in its own."""
    prefix = prefix_of(stored.entries)
    parameters, buffers = sizes_of(architecture) if prefix is not None else ({}, {})
    sizes = {**parameters, **buffers}
    if prefix is None or all(name in stored.entries for name in sizes):
        return stored
    views, names = views_in(stored.entries, sizes, architecture, prefix), state_names(stored.entries)
    for key in STATE_KEYS:
        # A checkpoint of before 2026-11-22 has it under our names.
        if names.get(key) and not any(f"optimizer.state.{name}.{key}" in stored.entries for name in parameters):
            found = state_views(key, names, stored.entries, parameters, architecture, stored.folder, of_all=False)
            views |= {f"optimizer.state.{name}.{key}": view for name, view in found.items()}
    theirs = {full for by_name in names.values() for full in by_name.values()}
    kept = [name for name in stored.entries if name.startswith(_OURS) and not (name in theirs or _is_group_meta(name))]
    return ViewReader(stored, views, keeps=kept)


def _is_group_meta(name: str) -> bool:
    return name.startswith("optimizer.param_to_group_meta.")


def _check_backend(path: Path) -> None:
    try:
        backend = parse_json(read_regular(path)).get("sharded_backend")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} must be a JSON object, got {str(error)[:200]}") from error
    if backend != "torch_dist":
        raise NotImplementedError(
            f"{path} must name the backend torch_dist, got {backend!r}: load the checkpoint with Megatron-LM and save it with "
            "--ckpt-format torch_dist"
        )


def _is_of_model(name: str, prefix: str) -> bool:
    if prefix:
        return name.startswith(prefix) and not name.endswith("._extra_state")
    return not name.startswith("optimizer.") and name.startswith(("embedding.", "decoder.", "output_layer."))


def _is_tied(name: str, prefix: str, architecture: Architecture) -> bool:
    return bool(architecture["share_embeddings_and_output_weights"]) and name == prefix + OUTPUT
