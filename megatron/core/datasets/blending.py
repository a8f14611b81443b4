"""The greedy algorithm that chooses the corpus of each sample of a blend.

At step i the sample comes from the corpus that is furthest behind its share, ``weight * i - given`` (the first one of
equals). Each step needs the counts of the step before, but soon its choice no longer depends on where the counts started. So
the steps are cut into lanes that are computed together, each from guessed counts. A lane whose guess differs from the end of
the lane before it is computed again from there, until all agree. The result is exactly that of the loop, in the time of a
few lanes.

Source: the rule is Megatron-Core's (float64, the comparison order included); the lanes are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy

MAX_DATASETS = 32767
"""Largest number of corpora in a blend; ``dataset_index`` is int16 as in Megatron."""


_PIECE = 2**18
"""Samples whose places are found together, with little memory beside the indices."""


def build_blending_indices(weights: Sequence[float], size: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Blend ``size`` samples by weight.

    Args:
        weights: [D] weights that sum to one.

    Returns:
        The corpus of each sample [size], int16, and its index in the corpus [size], int64.
    """
    shares = numpy.array(weights, dtype=numpy.float64)
    no_limit = numpy.full(shares.size, numpy.iinfo(numpy.int64).max)
    return _blend(shares, no_limit, size)


def build_exhaustive_blending_indices(sizes: Sequence[int]) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Blend corpora so that each gives exactly ``sizes`` [D] samples, spread evenly.

    Returns:
        The corpus of each sample [sum of sizes], int16, and its index in the corpus, int64.
    """
    limits = numpy.array(sizes, dtype=numpy.int64)
    total = int(limits.sum())
    return _blend(limits / float(total), limits, total)


def _blend(weights: numpy.ndarray, limits: numpy.ndarray, size: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    dataset_index = _run_lanes(weights, limits, size)
    sample_index = numpy.empty(size, dtype=numpy.int64)
    given = numpy.zeros(weights.size, dtype=numpy.int64)
    for first in range(0, size, _PIECE):
        piece = dataset_index[first : first + _PIECE]
        order = numpy.argsort(piece, kind="stable")
        counts = numpy.bincount(piece, minlength=weights.size)
        places = numpy.arange(piece.size, dtype=numpy.int64) + numpy.repeat(
            given - numpy.cumsum(counts) + counts, counts
        )
        sample_index[first : first + _PIECE][order] = places
        given += counts
    return dataset_index, sample_index


def _run_lanes(weights: numpy.ndarray, limits: numpy.ndarray, size: int) -> numpy.ndarray:
    lane_length = max(64, math.isqrt(size))
    starts = numpy.arange(0, size, lane_length, dtype=numpy.int64)
    counts = _guess_counts(weights, limits, starts)  # [L, D] counts before each lane
    ends = numpy.zeros_like(counts)
    choices = numpy.zeros((starts.size, lane_length), dtype=numpy.int16)
    stale = numpy.arange(starts.size)
    while stale.size:
        choices[stale], ends[stale] = _run(weights, limits, starts[stale], counts[stale], lane_length)
        # Lane k is right if it began where lane k - 1 ended, and lane 0 begins at zero: each round fixes at least one.
        stale = 1 + numpy.flatnonzero(numpy.any(counts[1:] != ends[:-1], axis=1))
        counts[stale] = ends[stale - 1]
    return choices.reshape(-1)[:size]


def _run(
    weights: numpy.ndarray, limits: numpy.ndarray, starts: numpy.ndarray, counts: numpy.ndarray, num_steps: int
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Take ``num_steps`` greedy steps in each lane: [L, num_steps] choices and [L, D] counts after them."""
    given = counts.astype(numpy.float64)
    choices = numpy.empty((num_steps, starts.size), dtype=numpy.int16)
    lanes = numpy.arange(starts.size)
    limited = bool(numpy.any(limits < numpy.iinfo(numpy.int64).max))
    ceilings = limits.astype(numpy.float64)
    lag = numpy.empty_like(given)
    for step in range(num_steps):
        positions = numpy.maximum(starts + step, 1).astype(numpy.float64)
        numpy.multiply(positions[:, None], weights, out=lag)
        lag -= given
        if limited:
            lag[given >= ceilings] = -numpy.inf
        chosen = lag.argmax(axis=1)
        choices[step] = chosen
        given[lanes, chosen] += 1.0
    return choices.T, given.astype(numpy.int64)


def _guess_counts(weights: numpy.ndarray, limits: numpy.ndarray, starts: numpy.ndarray) -> numpy.ndarray:
    """Return [L, D] counts that sum to each lane's start and lie within one of each corpus's share."""
    shares = weights * starts[:, None].astype(numpy.float64)
    counts: numpy.ndarray = numpy.minimum(numpy.floor(shares).astype(numpy.int64), limits)
    missing = starts - counts.sum(axis=1)
    rank = numpy.argsort(numpy.argsort(counts - shares, axis=1, kind="stable"), axis=1, kind="stable")
    counts += rank < missing[:, None]
    return counts
