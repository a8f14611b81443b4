"""Megatron's rules as plain loops over tokens and samples: what the vectorised builders must equal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy


def epochs(tokens_per_epoch: int, num_samples: int | None, length: int, extra: int) -> tuple[int, bool, int]:
    """Return the number of epochs, whether the last is separate, and the samples before it."""
    num_epochs, tokens = 1, tokens_per_epoch
    while num_samples is not None and tokens < num_samples * length + extra:
        num_epochs += 1
        tokens += tokens_per_epoch
    if num_epochs == 1 or num_samples is None:
        return num_epochs, False, 0
    before = ((num_epochs - 1) * tokens_per_epoch - extra) // length
    per_epoch = (tokens_per_epoch - extra) // length
    return num_epochs, num_samples - before < int(0.80 * per_epoch), before


def document_order(
    documents: Sequence[int], num_epochs: int, separate: bool, random: numpy.random.RandomState
) -> list[int]:
    """Return the documents of all epochs, shuffled."""
    together = num_epochs - 1 if separate else num_epochs
    first = numpy.array(list(documents) * together, dtype=numpy.int32)
    random.shuffle(first)
    last = numpy.array(list(documents) * (num_epochs - together), dtype=numpy.int32)
    if separate:
        random.shuffle(last)
    return [*first.tolist(), *last.tolist()]


def sample_starts(
    lengths: Sequence[int], order: Sequence[int], num_samples: int, length: int, extra: int
) -> list[list[int]]:
    """Walk over the documents sample by sample."""
    starts, document, offset = [[0, 0]], 0, 0
    while len(starts) <= num_samples:
        remaining = length + extra
        while remaining != 0:
            available = lengths[order[document]] - offset
            remaining -= available
            if remaining <= 0:
                offset += remaining + available - extra
                remaining = 0
            elif document == len(order) - 1:
                offset = lengths[order[document]] - extra
                break
            else:
                document, offset = document + 1, 0
        starts.append([document, offset])
    return starts


def num_samples_of(tokens: int, length: int, drop_last_partial: bool) -> int:
    """Return how many samples the tokens (without the extra one) give."""
    return tokens // length if drop_last_partial else math.ceil(tokens / length)


def shuffled(num_first: int, total: int, random: numpy.random.RandomState) -> list[int]:
    """Return the order in which samples are drawn."""
    first = numpy.arange(num_first, dtype=numpy.uint32)
    random.shuffle(first)
    last = numpy.arange(num_first, total, dtype=numpy.uint32)
    if num_first < total:
        random.shuffle(last)
    return [*first.tolist(), *last.tolist()]


def draw(
    documents: Sequence[Sequence[int]], part: Sequence[int], *, num_samples: int | None, length: int, seed: int
) -> list[list[int]]:
    """Return all samples [N][length + 1] of the documents ``part``, in the order drawn."""
    lengths = [len(document) for document in documents]
    per_epoch = sum(lengths[number] for number in part)
    num_epochs, separate, before = epochs(per_epoch, num_samples, length, 1)
    random = numpy.random.RandomState(seed)
    order = document_order(part, num_epochs, separate, random)
    line = [token for number in order for token in documents[number]]
    total = (len(line) - 1) // length
    drawn = shuffled(before if separate else total, total, random)
    return [line[sample * length : (sample + 1) * length + 1] for sample in drawn]


def blend(weights: Sequence[float], size: int, limits: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Return the dataset and its sample for each step of the greedy rule."""
    given = [0] * len(weights)
    chosen = []
    for step in range(size):
        best, best_lag = -1, -math.inf
        for dataset, weight in enumerate(weights):
            if limits is not None and given[dataset] == limits[dataset]:
                continue
            lag = weight * max(float(step), 1.0) - float(given[dataset])
            if lag > best_lag:
                best, best_lag = dataset, lag
        chosen.append((best, given[best]))
        given[best] += 1
    return chosen
