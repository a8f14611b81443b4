"""Blends: lists of corpora and their weights."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

Blend = tuple[list[str], list[float] | None]
"""Prefixes [D] of corpora, and their weights [D]; None: in proportion to their sizes."""


_RULE = "a blend is prefixes, or weights and prefixes in turn (0.3 a 0.7 b)"


def get_blend_from_list(blend: Sequence[str] | None) -> Blend | None:
    """Parse the values of ``--data-path``: prefixes ("a b c"), or weights and prefixes in turn ("0.3 a 0.7 b").

    Raises:
        ValueError: the list is empty, only some of the words at the places of weights are numbers, a weight is not positive
            and finite, or a number is at the place of a prefix and no corpus has this name.

    Source: Megatron-Core's rule: the list holds weights where it has an even length and every other word is a number.
    """
    if blend is None:
        return None
    words = [word.strip() for word in blend]
    if not words:
        raise ValueError("a blend must name one corpus or more, got an empty list")
    weights = [_number(word) for word in words[0::2]] if len(words) % 2 == 0 else [None]
    if all(weight is None for weight in weights):
        return _prefixes(words, words), None
    known = [weight for weight in weights if weight is not None]
    if len(known) != len(weights):
        raise ValueError(f"{_RULE}, got {' '.join(words)!r}")
    check_weights(known)
    return _prefixes(words[1::2], words), known


def check_weights(weights: Sequence[float]) -> None:
    """Check the weights of a blend.

    Raises:
        ValueError: one is not positive, or not finite.
    """
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError(
            f"the weights of a blend must be positive and finite, got {list(weights)}; leave out unwanted corpora"
        )


def _prefixes(prefixes: list[str], words: list[str]) -> list[str]:
    """Check that no weight is among the prefixes of a list of words."""
    for prefix in prefixes:
        if _number(prefix) is not None and not os.path.exists(f"{prefix}.idx"):
            raise ValueError(
                f"{_RULE}, got {' '.join(words)!r}, in which the number {prefix} is at the place of a prefix (and there is no "
                f"file {prefix}.idx)"
            )
    return prefixes


def sizes_per_dataset(weights: Sequence[float], sizes: Sequence[int], *, surplus: float = 0.0) -> list[list[int]]:
    """Compute how many samples [D, 3] of each corpus each part needs.

    Args:
        weights: [D] weights that sum to one.
        sizes: [3] samples asked of the blend.
        surplus: fraction by which each corpus has more samples than its share, since a blend may draw a few more.

    Source: Megatron-Core's rule; it rounds up twice, and other samples would be drawn without both.
    """
    return [[math.ceil(math.ceil(size * weight) * (1 + surplus)) for size in sizes] for weight in weights]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
