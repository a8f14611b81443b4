"""``load_pretrained``: a Hugging Face folder into a sharded model, each rank reading its rows alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp.api.module import fsdp_modules
from megatron.core.distributed.fsdp.buffers.materialize import mark_unfilled
from megatron.core.distributed.fsdp.checkpoint import (
    Chunk,
    NamedTensor,
    StoredTensor,
    TensorReader,
    View,
    ViewReader,
    load_checkpoint,
    local_chunks,
)
from megatron.core.distributed.fsdp.checkpoint.agreement import check_initialized, together
from megatron.core.distributed.fsdp.checkpoint.reader import ReadPlan, copy_boxes
from megatron.core.distributed.fsdp.checkpoint.state import Problems, model_tensors
from megatron.core.distributed.fsdp.dtensor.placements import local_rows, write_part
from megatron.core.distributed.fsdp.huggingface.adapters import check_adapters, has_adapters, names_in_model
from megatron.core.distributed.fsdp.huggingface.conversion import is_ignored, model_of_files, own_classes, own_dtypes
from megatron.core.distributed.fsdp.huggingface.safetensors_files import open_folder
from megatron.core.distributed.fsdp.huggingface.traced_tensor import TracedTensor, computed, sources_of

logger = logging.getLogger(__name__)

_FILLED = "_is_hf_initialized"  # by this attribute transformers leaves tensors and modules alone


@dataclass(frozen=True)
class LoadReport:
    """What ``load_pretrained`` did on this rank.

    Attributes:
        read_nbytes: bytes that this rank read of the files.
        stored_nbytes: bytes of all tensors in the files.
        temporary_nbytes: most bytes of host memory at once, in addition to the model's own memory.
        initialized: names of tensors that the files lack, which got initial values.
        unused: names of tensors in the files that the model has no use for.
    """

    read_nbytes: int
    stored_nbytes: int
    temporary_nbytes: int
    initialized: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"read {self.read_nbytes} of {self.stored_nbytes} bytes", f"at most {self.temporary_nbytes} at once"]
        parts += [f"initialised {', '.join(self.initialized)}"] if self.initialized else []
        parts += [f"left {', '.join(self.unused)}"] if self.unused else []
        return ", ".join(parts)


def load_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    initialize_missing: bool = False,
    ignore_unexpected: bool = False,
) -> LoadReport:
    """Load the safetensors files of a Hugging Face folder into a sharded model of ``transformers``.

    Each rank reads the bytes of its own rows, straight into its main weights where the dtypes are equal. Names and layouts
    (experts in one tensor, tied heads, prefixes) are converted as the model itself says; where that is more than a move of
    rows and columns, whole tensors are read. Buffers that files do not have get the model's own values.

    Args:
        model: a sharded ``PreTrainedModel``, on any device; it may have been built on the meta device. Of a ``PeftModel`` with
            LoRA, the weights that are not the adapters' are loaded.
        folder: has ``model.safetensors``, or several files with their index.
        initialize_missing: give tensors that the files lack (a new head) initial values, by the model's ``_init_weights``.
        ignore_unexpected: leave tensors of the files unread that the model has no place for.

    Returns:
        What was read; rank 0 logs its own.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: missing, unexpected or mis-shaped tensors, by name; a file is damaged; the files give two names of one
            tied weight different values. Nothing has changed then.
        TypeError: the model is not of ``transformers``.
        ImportError: ``transformers`` is not installed.
        RuntimeError: torch.distributed is not initialised; reading failed midway.

    Ranks: all of the default process group, which must see the folder; blocks until all have read.
    Source: ours.
    """
    check_initialized("load_pretrained")
    check_model(model)
    path = Path(os.path.abspath(folder))
    reader = together(lambda: _open(model, path, initialize_missing, ignore_unexpected))
    load_checkpoint(model, None, path, reader=reader)
    initialize(model, [entry.tensor for entry in model_tensors(model) if entry.name not in reader.report.initialized])
    if dist.get_rank() == 0:
        logger.info("load_pretrained: %s", reader.report)
    return reader.report


def check_model(model: nn.Module) -> None:
    """Check that a model is one of ``transformers``.

    Raises:
        TypeError: the model is not a ``PreTrainedModel``.
    """
    if not callable(getattr(model, "initialize_weights", None)) or not hasattr(model, "config"):
        raise TypeError(
            f"the model must be a PreTrainedModel of transformers, got {type(model).__name__}; pass the model itself, not what "
            "is around it, and use load_checkpoint and save_checkpoint for other modules"
        )


def _open(model: nn.Module, path: Path, initialize_missing: bool, ignore_unexpected: bool) -> _Reader:
    """Match the files with the model.

    Raises:
        ValueError: tensors are missing, or there are unexpected ones.
    """
    files = open_folder(path)
    stored = {name: entry for name, entry in files.entries.items() if isinstance(entry, StoredTensor)}
    check_adapters(model)
    named = [(entry, names_in_model(model, entry.names)) for entry in model_tensors(model)]
    tensors = [(entry, names) for entry, names in named if names]
    own = {name: entry.tensor for entry, names in tensors for name in names}
    traced = model_of_files(model.get_base_model() if has_adapters(model) else model, stored, own)  # type: ignore[operator]
    lacking = [(entry, names) for entry, names in tensors if not any(name in traced for name in names)]
    extra = [name for name in traced if name not in own]
    problems = Problems("model")
    if not initialize_missing:
        problems.missing += [n[0] for _, n in lacking if not any(is_ignored(model, name, missing=True) for name in n)]
    if not ignore_unexpected:
        problems.extra += [name for name in extra if not is_ignored(model, name, missing=False)]
    if problems:
        raise ValueError(
            f"the files in {path} must match the model, got {problems}; pass initialize_missing=True or ignore_unexpected=True "
            "if that is meant. Nothing was changed"
        )
    real = {theirs: ours for entry, names in tensors for ours, theirs in zip(entry.names, names, strict=True)}
    found = {real[name]: tensor for name, tensor in traced.items() if name in own}
    kept = [entry for entry, names in named if not names]
    return _Reader(files, found, [entry for entry, _ in lacking], kept, extra)


class _Reader(ViewReader):
    """Reads a model's tensors from those of the files.

    Args:
        files: reads the files.
        traced: what the model's tensors are made of, by name.
        lacking: tensors that the files lack; they are filled with zeros.
        kept: the adapters, which keep their values.
        unused: names of tensors of the files that are not read.

    Attributes:
        report: what has been planned.
    """

    def __init__(
        self,
        files: TensorReader,
        traced: dict[str, TracedTensor],
        lacking: Sequence[NamedTensor],
        kept: Sequence[NamedTensor],
        unused: Sequence[str],
    ) -> None:
        self._calculated = {name: tensor for name, tensor in traced.items() if tensor.parts is None}
        views = {
            name: View(tensor.shape, tensor.parts or (), tensor.dtype, None if tensor.parts else 0.0)
            for name, tensor in traced.items()
        }
        for entry in lacking:
            views[entry.name] = View(entry.tensor.shape, (), entry.tensor.dtype, 0.0)
        for entry in kept:
            views[entry.name] = View(entry.tensor.shape, (), entry.tensor.dtype)
        super().__init__(files, views)
        stored = (entry for entry in files.entries.values() if isinstance(entry, StoredTensor))
        nbytes = sum(entry.numel * entry.dtype.itemsize for entry in stored)
        self.report = LoadReport(0, nbytes, 0, tuple(entry.name for entry in lacking), tuple(unused))

    def plan_parts(self, chunks: Sequence[Chunk]) -> ReadPlan:
        plan = super().plan_parts([chunk for chunk in chunks if chunk.name not in self._calculated])
        read, temporary = plan.nbytes
        read, temporary = self.report.read_nbytes + read, max(self.report.temporary_nbytes, temporary)
        calculated: dict[str, list[Chunk]] = {}
        for chunk in chunks:
            if chunk.name in self._calculated and chunk.local.numel():
                calculated.setdefault(chunk.name, []).append(chunk)
        for name, own in calculated.items():
            wholes = [
                chunk
                for source in sources_of(self._calculated[name])
                for chunk in local_chunks(source, self.source.empty(source, "meta"))
            ]
            nbytes = sum(chunk.local.nbytes for chunk in wholes)
            read, temporary = read + nbytes, max(temporary, 2 * nbytes)
            plan.sources += self.source.plan_parts(wholes).pieces
            plan.then.append(partial(self._calculate, name, own))
        self.report = replace(self.report, read_nbytes=read, temporary_nbytes=temporary)
        return plan

    def _calculate(self, name: str, chunks: Sequence[Chunk]) -> None:
        whole = computed(self._calculated[name], self.source.tensor)
        copy_boxes(whole, [(chunk.offsets, chunk.local) for chunk in chunks])


@torch.no_grad()
def initialize(model: nn.Module, loaded: Iterable[torch.Tensor] = ()) -> None:
    """Let the model fill its parameters and buffers by its ``_init_weights``, all but those that are loaded.

    A module's own parameters are whole, and in the dtype from before ``fully_shard``, while the model fills them; then each
    rank keeps its part. So with equal seeds on all ranks the values are those of ``initialize_weights()`` of the unsharded
    model. What it leaves out is named by the first forward.

    Args:
        loaded: tensors that stay as they are, now and in later calls; so do adapters.

    Ranks: all of the mesh.
    """
    adapters = [p for name, p in model.named_parameters() if has_adapters(model) and not names_in_model(model, (name,))]
    for tensor in (*loaded, *adapters):
        setattr(tensor, _FILLED, True)
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not all(getattr(tensor, _FILLED, False) for tensor in own):
            setattr(module, _FILLED, False)
    dtypes = own_dtypes(model)
    parts = [part for part in model.modules() if callable(getattr(part, "_init_weights", None))]
    with own_classes(model):
        for part in parts:
            own_fill: Any = part._init_weights
            part.__dict__["_init_weights"] = partial(_fill_whole, own_fill, dtypes)
        try:
            model.initialize_weights()  # type: ignore[operator]
        finally:
            for part in parts:
                del part.__dict__["_init_weights"]
    for unit in fsdp_modules(model):
        for group in unit._fsdp_groups:
            group.weights.note_load()
        if unit._fsdp_unit.context is not None:
            unit._fsdp_unit.context.weights_changed()


def _fill_whole(fill: Callable[[nn.Module], Any], dtypes: Mapping[int, torch.dtype], module: nn.Module) -> None:
    """Call ``fill`` on the module while its own sharded parameters, but for loaded ones, are whole; then keep this rank's part."""
    held = {key: p for key, p in module._parameters.items() if id(p) in dtypes and not getattr(p, _FILLED, False)}
    wholes: dict[str, nn.Parameter] = {}
    for key, sharded in held.items():
        assert isinstance(sharded, DTensor), "modules hold sharded parameters between passes"
        device = sharded._local_tensor.device
        whole = mark_unfilled(torch.empty(sharded.shape, dtype=dtypes[id(sharded)], device=device))
        wholes[key] = nn.Parameter(whole, requires_grad=False)
    module._parameters.update(wholes)
    try:
        fill(module)
    finally:
        module._parameters.update(held)
    for key, sharded in held.items():
        write_part(sharded, local_rows(sharded, wholes[key]))  # type: ignore[arg-type]
