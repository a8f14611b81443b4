"""The rows of gated delta net: ours go key head by key head, Megatron-LM's checkpoints have sections of their own for each kind."""

from __future__ import annotations

import torch

from megatron.core.distributed.fsdp.checkpoint import Entries, Part
from megatron.training.formats.architecture import Architecture

_SECTIONS = ("query", "key", "value", "z", "beta", "alpha")
_NUM_SECTIONS = {
    f"self_attention.{name}": number
    for name, number in (("in_proj.weight", 6), ("in_proj.bias", 6), ("conv1d.weight", 3), ("conv1d.bias", 3))
}


def rows_of_key_head(architecture: Architecture) -> tuple[int, int, int, int, int, int]:
    """Return the rows of a key head: query, key, values, gates, strengths and decays."""
    ratio = architecture["linear_num_value_heads"] // architecture["linear_num_key_heads"]
    key, value = architecture["linear_key_head_dim"], ratio * architecture["linear_value_head_dim"]
    return key, key, value, value, ratio, ratio


def has_sections(name: str, architecture: Architecture) -> bool:
    """Return whether a tensor of ours is several there."""
    return architecture.get("experimental_attention_variant") is not None and name.endswith(tuple(_NUM_SECTIONS))


def parts_of_sections(
    name: str, source: str, size: torch.Size, architecture: Architecture, index: tuple[int, ...] = ()
) -> list[Part]:
    """Return the parts of a tensor of ours: those of a section are heads of ``source.query`` and so on.

    Args:
        index: in the first dims of the stored tensors.
    """
    number = next(number for end, number in _NUM_SECTIONS.items() if name.endswith(end))
    widths, parts, row, rest = rows_of_key_head(architecture)[:number], [], 0, tuple(size[1:])
    zeros = (0,) * len(rest)
    for head in range(architecture["linear_num_key_heads"]):
        for section, width in zip(_SECTIONS, widths, strict=False):
            begin = (*index, head * width, *zeros)
            parts.append(Part((row, *zeros), (width, *rest), f"{source}.{section}", begin))
            row += width
    return parts


def without_section(source: str) -> str:
    """Return the name of the tensor that a section is of."""
    stem, _, section = source.rpartition(".")
    return stem if section in _SECTIONS else source


def is_stored(source: str, entries: Entries) -> bool:
    """Return whether a checkpoint has the sections of a tensor."""
    return f"{source}.{_SECTIONS[0]}" in entries
