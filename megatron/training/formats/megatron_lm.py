"""Megatron-LM's distributed checkpoints: ``torch_dist`` and ``fsdp_dtensor``, both folders that PyTorch's DCP wrote.

[Note: Megatron-LM's names] ``torch_dist`` stacks a tensor of all layers under one name without the layer's number, and one of all
experts of a layer under one name, unless the model's layers differ. ``fsdp_dtensor`` has a name for each layer and expert, under
``model.module``, and the two halves of a gated matrix under ``_w`` (the gate) and ``_v``. In both a norm may have the name of the
module of transformer-engine that computes it with the linear layer behind it. Which of these names a checkpoint has, it says
itself: the first that is there is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.distributed.fsdp.checkpoint import (
    OBJECT,
    CheckpointReader,
    Entries,
    ForeignLayout,
    Part,
    StoredTensor,
    TensorReader,
    View,
    ViewReader,
)
from megatron.training.formats.architecture import Architecture, layers_with_experts, tensor_sizes
from megatron.training.formats.foreign import ForeignCheckpoint
from megatron.training.formats.rules import check_stored

CONFIG = "metadata.json"
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_OURS = ("optimizer.", "extra_state.", "optional_state.")
_PREFIXES = ("", "model.module.", "model.module.module.", "model.")
_LAYER = re.compile(r"decoder\.layers\.(?P<layer>[0-9]+)\.(?P<rest>.+)")
_EXPERT = re.compile(
    r"mlp\.experts\.local_experts\.(?P<expert>[0-9]+)\.(?P<linear>linear_fc[12])\.(?P<kind>weight|bias)"
)
_FUSED_NORMS = {"input_layernorm": "self_attention.linear_qkv", "pre_mlp_layernorm": "mlp.linear_fc1"}


@dataclass(frozen=True)
class Place:
    """Where a checkpoint may hold a tensor of ours: a name, and indices in its first dims."""

    source: str
    index: tuple[int, ...] = ()


def places_of(name: str, prefix: str = "") -> Iterator[Place]:
    """Yield where a tensor of ours may be: see [Note: Megatron-LM's names]."""
    found = _LAYER.fullmatch(name)
    if found is None:
        yield Place(prefix + name)
        return
    layer, layers = int(found["layer"]), f"{prefix}decoder.layers."
    for rest, index in _rests(found["rest"]):
        yield Place(f"{layers}{layer}.{rest}", index)
        yield Place(f"{layers}{rest}", (layer, *index))


def _rests(rest: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names that a tensor may have within its layer, with the index of an expert in a stack."""
    expert = _EXPERT.fullmatch(rest)
    if expert is not None:
        number, linear, kind = int(expert["expert"]), expert["linear"], expert["kind"]
        yield f"mlp.experts.experts.{linear}.{kind}", (number,)
        yield f"mlp.experts.experts.{number}.{linear}.{kind}", ()
        yield f"mlp.experts.{linear}.{kind}{number}", ()
        yield rest, ()
        return
    norm, _, kind = rest.partition(".")
    yield rest, ()
    if norm in _FUSED_NORMS:
        yield f"{_FUSED_NORMS[norm]}.layer_norm_{kind}", ()


def is_gated(name: str, architecture: Architecture) -> bool:
    """Return whether the rows of a tensor of ours are a gate and what it gates."""
    return bool(architecture["gated_linear_unit"]) and ".linear_fc1." in name


def parts_at(
    place: Place, size: torch.Size, entries: Entries, *, gated: bool, is_vocabulary: bool
) -> list[Part] | None:
    """Return the parts of a tensor of ours at a place; None if the checkpoint has nothing there."""
    start = (0,) * len(size)
    if place.source in entries:
        if is_vocabulary:
            return _vocabulary(place.source, size, entries)
        return [Part(start, tuple(size), place.source, (*place.index, *start))]
    if gated and f"{place.source}_w" in entries:
        half = (size[0] // 2, *size[1:])
        return [
            Part((number * half[0], *start[1:]), half, place.source + suffix, (*place.index, *start))
            for number, suffix in enumerate(("_w", "_v"))
        ]
    return None


def _vocabulary(source: str, size: torch.Size, entries: Entries) -> list[Part]:
    """Rows that pad the vocabulary may be fewer there, where the last one is repeated, or more, where they are left out."""
    stored = entries[source]
    rows = min(size[0], stored.size[0]) if isinstance(stored, StoredTensor) and stored.size else size[0]
    width = tuple(size[1:])
    rest = (0,) * len(width)
    copies = [Part((row, *rest), (1, *width), source, (rows - 1, *rest), is_copy=True) for row in range(rows, size[0])]
    return [Part((0, *rest), (rows, *width), source, (0, *rest)), *copies]


def views_in(
    entries: Entries, sizes: Mapping[str, torch.Size], architecture: Architecture, prefix: str
) -> dict[str, View]:
    """Return tensors of ours as views of what a checkpoint has; under the most likely name where it has none of them."""
    views = {}
    for name, size in sizes.items():
        vocabulary = name in (EMBEDDING, OUTPUT)
        places = list(places_of(name, prefix))
        found = (
            parts_at(place, size, entries, gated=is_gated(name, architecture), is_vocabulary=vocabulary)
            for place in places
        )
        start = (0,) * len(size)
        missing = [Part(start, tuple(size), places[0].source, (*places[0].index, *start))]
        views[name] = View(size, next((parts for parts in found if parts is not None), missing))
    return views


def prefix_of(entries: Entries) -> str | None:
    """Return what stands before the model's names in a checkpoint of Megatron-LM; None if it is none."""
    return next((prefix for prefix in _PREFIXES if prefix + EMBEDDING in entries), None)


def open_distributed(folder: Path) -> ForeignCheckpoint | None:
    """Open a checkpoint in ``torch_dist`` or ``fsdp_dtensor``; None if the folder, which DCP wrote, is neither.

    Raises:
        ValueError: a file is not what it must be.
        NotImplementedError: it is in an older layout.
    """
    stored = CheckpointReader(folder)
    prefix = prefix_of(stored.entries)
    is_torch_dist = (folder / CONFIG).is_file()
    if prefix is None or (not is_torch_dist and prefix == ""):
        return None
    if is_torch_dist:
        _check_backend(folder / CONFIG)

    def views(architecture: Architecture) -> ViewReader:
        found = views_in(stored.entries, tensor_sizes(architecture), architecture, prefix)
        check_stored(
            found,
            stored.entries,
            folder,
            unused=lambda name: not _is_of_model(name, prefix) or _is_tied(name, prefix, architecture),
            may_be_longer=lambda name: name.removeprefix(prefix) in (EMBEDDING, OUTPUT),
        )
        return ViewReader(stored, found)

    kind = "torch_dist" if is_torch_dist else "fsdp_dtensor"
    embedding = stored.entries[prefix + EMBEDDING]
    num_ids = embedding.size[0] if isinstance(embedding, StoredTensor) and embedding.size else 0
    return ForeignCheckpoint(path=folder, kind=f"Megatron-LM, {kind}", architecture={}, views=views, num_ids=num_ids)


def layout_of(ckpt_format: str, architecture: Architecture, *, iteration: int) -> ForeignLayout:
    """Return how weights are written so that Megatron-LM reads them.

    Args:
        ckpt_format: ``torch_dist`` or ``fsdp_dtensor``.
        iteration: that of the checkpoint.

    Ranks: pure.
    """
    counters = {"iteration": iteration, "checkpoint_version": 3.0}
    sizes = tensor_sizes(architecture)
    if ckpt_format == "fsdp_dtensor":
        views = {name: View(size, _parts_of_fsdp_dtensor(name, size, architecture)) for name, size in sizes.items()}
        return ForeignLayout(views, {**counters, "args": None})
    has_experts = layers_with_experts(architecture) if architecture.get("num_moe_experts") else [0]
    is_mixed = len(set(has_experts)) > 1
    views = {name: View(size, _parts_of_torch_dist(name, size, architecture, is_mixed)) for name, size in sizes.items()}
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if is_mixed:
        content["non_homogeneous_layers"] = True
    values = {"common_state/shard_0_1": [{**counters, "content_metadata": content}]}
    backend = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    return ForeignLayout(views, values, {CONFIG: backend.encode()}, OBJECT)


def _parts_of_torch_dist(name: str, size: torch.Size, architecture: Architecture, is_mixed: bool) -> list[Part]:
    """Return where a tensor lies in ``torch_dist``: stacked, but by layer if some layers have experts and others not."""
    start, found = (0,) * len(size), _LAYER.fullmatch(name)
    if found is None:
        return [Part(start, tuple(size), name, start)]
    layer, rest = int(found["layer"]), _norm_in_linear(name, found["rest"], architecture)
    index: tuple[int, ...] = ()
    expert = _EXPERT.fullmatch(rest)
    if expert is not None:
        rest, index = f"mlp.experts.experts.{expert['linear']}.{expert['kind']}", (int(expert["expert"]),)
    if is_mixed:
        return [Part(start, tuple(size), f"decoder.layers.{layer}.{rest}", (*index, *start))]
    return [Part(start, tuple(size), f"decoder.layers.{rest}", (layer, *index, *start))]


def _parts_of_fsdp_dtensor(name: str, size: torch.Size, architecture: Architecture) -> list[Part]:
    start, found = (0,) * len(size), _LAYER.fullmatch(name)
    rest = name if found is None else _norm_in_linear(name, found["rest"], architecture)
    expert = _EXPERT.fullmatch(rest)
    if expert is not None:
        rest = f"mlp.experts.{expert['linear']}.{expert['kind']}{expert['expert']}"
    source = f"model.module.{rest}" if found is None else f"model.module.decoder.layers.{found['layer']}.{rest}"
    if not is_gated(name, architecture):
        return [Part(start, tuple(size), source, start)]
    half = (size[0] // 2, *size[1:])
    return [
        Part((number * half[0], *start[1:]), half, f"{source}{end}", start) for number, end in enumerate(("_w", "_v"))
    ]


def _norm_in_linear(name: str, rest: str, architecture: Architecture) -> str:
    """Return the name that a norm has with transformer-engine, where it is part of the linear layer behind it."""
    norm, _, kind = rest.partition(".")
    layer = int(name.split(".")[2])
    has_experts = bool(architecture.get("num_moe_experts")) and layers_with_experts(architecture)[layer]
    if norm not in _FUSED_NORMS or (norm == "pre_mlp_layernorm" and has_experts):
        return rest
    return f"{_FUSED_NORMS[norm]}.layer_norm_{kind}"


def in_our_names(stored: CheckpointReader, architecture: Architecture) -> TensorReader:
    """Return a reader of a checkpoint that this framework wrote in one of these formats, or in its own."""
    prefix = prefix_of(stored.entries)
    sizes = tensor_sizes(architecture) if prefix is not None else {}
    if prefix is None or all(name in stored.entries for name in sizes):
        return stored
    kept = [name for name in stored.entries if name.startswith(_OURS)]
    return ViewReader(stored, views_in(stored.entries, sizes, architecture, prefix), keeps=kept)


def _check_backend(path: Path) -> None:
    try:
        backend = json.loads(path.read_bytes()).get("sharded_backend")
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
