"""Names and layouts of tensors in Megatron-LM's distributed checkpoints.

[Note: Megatron-LM's names] ``torch_dist`` stacks a tensor of all layers under one name without the layer's number, and one of all
experts of a layer under one name, unless the model's layers differ. ``fsdp_dtensor`` has a name for each layer and expert, under
``model.module``, and the two halves of a gated matrix under ``_w`` (the gate) and ``_v``. In both a norm may have the name of the
module of transformer-engine that computes it with the linear layer behind it. Which of these names a checkpoint has, it says
itself: the first that is there is read. Layers of multi-token prediction are never stacked, and ``torch_dist`` calls what is in them
``transformer_layer``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from megatron.core.distributed.fsdp.checkpoint import Entries, Part, StoredTensor, View
from megatron.training.formats.architecture import Architecture
from megatron.training.formats.linear_attention import has_sections, is_stored, parts_of_sections

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
LAYER = re.compile(r"decoder\.layers\.(?P<layer>[0-9]+)\.(?P<rest>.+)")
MTP_LAYER = re.compile(r"mtp\.layers\.(?P<layer>[0-9]+)\.mtp_model_layer\.(?P<rest>.+)")
EXPERT = re.compile(
    r"mlp\.experts\.local_experts\.(?P<expert>[0-9]+)\.(?P<linear>linear_fc[12])\.(?P<kind>weight|bias)"
)
FUSED_NORMS = {
    "input_layernorm": ("self_attention.linear_qkv", "self_attention.in_proj"),  # of linear attention the second
    "pre_mlp_layernorm": ("mlp.linear_fc1",),
    "self_attention.q_layernorm": ("self_attention.linear_q_up_proj",),  # latent vectors
    "self_attention.kv_layernorm": ("self_attention.linear_kv_up_proj",),
}


@dataclass(frozen=True)
class Place:
    """Where a checkpoint may hold a tensor of ours: a name, and indices in its first dims."""

    source: str
    index: tuple[int, ...] = ()


def places_of(name: str, prefix: str = "") -> Iterator[Place]:
    """Yield where a tensor of ours may be: see [Note: Megatron-LM's names]."""
    found, of_mtp = LAYER.fullmatch(name), MTP_LAYER.fullmatch(name)
    if of_mtp is not None:
        for own in ("transformer_layer", "mtp_model_layer"):
            for rest, index in _rests(of_mtp["rest"]):
                yield Place(f"{prefix}mtp.layers.{of_mtp['layer']}.{own}.{rest}", index)
        return
    if found is None:
        yield Place(prefix + name)
        return
    layer, layers = int(found["layer"]), f"{prefix}decoder.layers."
    for rest, index in _rests(found["rest"]):
        yield Place(f"{layers}{layer}.{rest}", index)
        yield Place(f"{layers}{rest}", (layer, *index))


def _rests(rest: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names that a tensor may have within its layer, with the index of an expert in a stack."""
    expert = EXPERT.fullmatch(rest)
    if expert is not None:
        number, linear, kind = int(expert["expert"]), expert["linear"], expert["kind"]
        yield f"mlp.experts.experts.{linear}.{kind}", (number,)
        yield f"mlp.experts.experts.{number}.{linear}.{kind}", ()
        yield f"mlp.experts.{linear}.{kind}{number}", ()
        yield rest, ()
        return
    norm, _, kind = rest.rpartition(".")
    yield rest, ()
    for linear in FUSED_NORMS.get(norm, ()):
        yield f"{linear}.layer_norm_{kind}", ()


def refuse_hybrid(architecture: Architecture) -> None:
    """Raise NotImplementedError for a hybrid model: rows of Mamba's layers are in another order there."""
    if architecture.get("hybrid_layer_pattern") is not None:
        raise NotImplementedError(
            "checkpoints of hybrid models must be ours, got one of Megatron-LM, or to be written for it: rows of Mamba's layers are"
            " in another order there; leave out --ckpt-format, and train from a checkpoint of ours"
        )


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
    """Return tensors of ours as views of what a checkpoint has; under the most likely name where it has none of them.

    Raises:
        NotImplementedError: the model is a hybrid one.
    """
    refuse_hybrid(architecture)
    views = {}
    for name, size in sizes.items():
        vocabulary = name in (EMBEDDING, OUTPUT)
        places = list(places_of(name, prefix))
        start = (0,) * len(size)
        if has_sections(name, architecture):
            sections = [
                parts_of_sections(name, place.source, size, architecture, place.index)
                for place in sorted(places, key=lambda place: not is_stored(place.source, entries))
            ]
            views[name] = View(size, sections[0])
            continue
        found = (
            parts_at(place, size, entries, gated=is_gated(name, architecture), is_vocabulary=vocabulary)
            for place in places
        )
        missing = [Part(start, tuple(size), places[0].source, (*places[0].index, *start))]
        views[name] = View(size, next((parts for parts in found if parts is not None), missing))
    return views
