"""The three parts of a corpus and their bounds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

import numpy


class Split(Enum):
    """The parts of a corpus; the value is the position in ``split`` strings and lists of sizes."""

    train = 0
    valid = 1
    test = 2


Bookends = tuple[float, float]


def normalize(weights: Sequence[float]) -> list[float]:
    """Scale ``weights`` [D] to sum to one, in numpy's float64 summation order (bitwise as Megatron does).

    Raises:
        ValueError: a weight is negative or not finite, or all are zero.
    """
    array = numpy.array(weights, dtype=numpy.float64)
    total = numpy.sum(array)
    if not numpy.all(numpy.isfinite(array)) or numpy.any(array < 0) or not total > 0:
        raise ValueError(f"weights must be finite, not negative and not all zero, got {list(weights)}")
    normalized: list[float] = (array / total).tolist()
    return normalized


def parse_and_normalize_split(split: str) -> list[float]:
    """Parse a split string ("969,30,1") to [3] shares of train, valid and test that sum to one; missing ones are zero.

    Raises:
        ValueError: there are none or more than three, one is no plain number, or all are zero.
    """
    numbers = re.split(r"[,:;/\s]+", split.strip("[]() "))
    if len(numbers) > len(Split) or not all(re.fullmatch(r"\d+\.?\d*|\.\d+", number) for number in numbers):
        raise ValueError(
            f"split must be one to {len(Split)} numbers, none of them negative, divided by commas (e.g. '969,30,1'), got {split!r}"
        )
    shares = [float(number) for number in numbers]
    return normalize(shares + [0.0] * (len(Split) - len(shares)))


def convert_split_vector_to_split_matrix(
    vector_a: Sequence[float], vector_b: Sequence[float] | None = None
) -> list[Bookends | None]:
    """Turn shares [3] into the start and end of each part, as fractions of the corpus; an empty part is None.

    With ``vector_b`` a part is the intersection of both divisions.

    Source: Megatron-Core's rule. The ends are running sums in float64, whose rounding decides on which document a part ends.
    """
    bookends = []
    for (start_a, end_a), (start_b, end_b) in zip(_bookends(vector_a), _bookends(vector_b or vector_a), strict=True):
        start, end = max(start_a, start_b), min(end_a, end_b)
        bookends.append((start, end) if start < end else None)
    return bookends


def _bookends(shares: Sequence[float]) -> list[Bookends]:
    ends = [0.0]
    for share in shares:
        ends.append(ends[-1] + share)
    return list(pairwise(ends))


def documents_of(bookends: Bookends, num_documents: int) -> numpy.ndarray:
    """Return the document ids [n], int32 and ascending, of a part of a corpus.

    Source: Megatron-Core's rounding (Python's ``round``, halves to even).
    """
    start, end = (round(fraction * float(num_documents)) for fraction in bookends)
    return numpy.arange(start, end, dtype=numpy.int32)
