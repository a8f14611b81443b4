"""Patterns of hybrid models: a letter for each layer, read as Megatron-Core writes them.

``<layers>/<layers>/...``: the layers of the model, with | between pipeline stages, and behind each / those of a layer of multi-token
prediction. A model of this framework takes the letters of ``hybrid_layers.LAYER_KINDS``; functions here read all of them.
"""

from __future__ import annotations

from dataclasses import dataclass


class Symbols:
    """The letters of a pattern."""

    MAMBA = "M"
    GDN = "G"
    ATTENTION = "*"
    DS_ATTENTION = "D"
    MLA = "+"
    MLP = "-"
    MOE = "E"
    PIPE = "|"
    MTP_SEPARATOR = "/"
    VALID_LAYERS = frozenset({MAMBA, GDN, ATTENTION, DS_ATTENTION, MLA, MLP, MOE})


@dataclass(frozen=True)
class ParsedHybridPattern:
    """The parts of a pattern."""

    main_pattern: str | None
    """The layers of the model, with |; None: there are none."""
    mtp_pattern: str | None
    """The layers of each layer of multi-token prediction; None: there is none."""
    mtp_num_depths: int
    """Layers of multi-token prediction."""


def parse_hybrid_pattern(pattern: str | None) -> ParsedHybridPattern:
    """Take a pattern apart.

    Raises:
        ValueError: a letter is not known, or layers of multi-token prediction differ.
    """
    main, *further = (pattern or "").split(Symbols.MTP_SEPARATOR)
    _check_letters(main.replace(Symbols.PIPE, ""), pattern)
    further = further if any(further) else []
    if len({*further}) > 1:
        raise ValueError(f"all parts of a hybrid pattern behind / must be equal, got {pattern!r}")
    for part in further[:1]:
        _check_letters(part, pattern)
    return ParsedHybridPattern(main or None, further[0] if further else None, len(further))


def get_hybrid_total_layer_count(pattern: str) -> int:
    """Count the layers of the model, without those of multi-token prediction.

    Raises:
        ValueError: as ``parse_hybrid_pattern``.
    """
    return len((parse_hybrid_pattern(pattern).main_pattern or "").replace(Symbols.PIPE, ""))


def get_hybrid_layer_counts(pattern: str) -> dict[str, int]:
    """Count the layers of each kind, those of multi-token prediction among them, by their letters.

    Raises:
        ValueError: as ``parse_hybrid_pattern``.
    """
    parsed = parse_hybrid_pattern(pattern)
    layers = (parsed.main_pattern or "") + (parsed.mtp_pattern or "") * parsed.mtp_num_depths
    return {letter: layers.count(letter) for letter in sorted(Symbols.VALID_LAYERS)}


def _check_letters(layers: str, pattern: str | None) -> None:
    if not {*layers} <= Symbols.VALID_LAYERS:
        raise ValueError(f"layers of a hybrid pattern must be of {sorted(Symbols.VALID_LAYERS)}, got {pattern!r}")
    if Symbols.ATTENTION in layers and {*layers} & {Symbols.MLA, Symbols.DS_ATTENTION}:
        raise ValueError(f"a hybrid pattern must have one kind of attention, got {pattern!r}")
