"""Blending in lanes equals the greedy loop, step by step."""

from __future__ import annotations

import time
from unittest import mock

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets import blending
from megatron.core.datasets.blending import build_blending_indices, build_exhaustive_blending_indices
from megatron.core.datasets.split import normalize
from tests.support import naive_samples as naive

WEIGHTS = st.lists(st.floats(1e-4, 1.0) | st.integers(1, 9).map(float), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, size=st.integers(0, 2000), piece=st.sampled_from((100, 2**18)))
def test_weighted_blend_equals_the_loop(weights: list[float], size: int, piece: int) -> None:
    """Sizes of many lanes; of corpora with equal weights the first one wins ties."""
    shares = normalize(weights)
    with mock.patch.object(blending, "_PIECE", piece):
        datasets, samples = build_blending_indices(shares, size)
    assert list(zip(datasets.tolist(), samples.tolist(), strict=True)) == naive.blend(shares, size)
    assert datasets.dtype == numpy.int16 and samples.dtype == numpy.int64


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=10))
def test_exhaustive_blend_equals_the_loop(sizes: list[int]) -> None:
    """Every corpus gives exactly its samples."""
    total = sum(sizes)
    datasets, samples = build_exhaustive_blending_indices(sizes)
    expected = naive.blend([size / float(total) for size in sizes], total, sizes)
    assert list(zip(datasets.tolist(), samples.tolist(), strict=True)) == expected
    assert numpy.bincount(datasets).tolist() == sizes


def test_corpora_of_tiny_weight_are_drawn_when_their_time_comes() -> None:
    """Their count at the start of a lane is the hardest to guess; lanes must be computed again until they agree."""
    shares = normalize([1.0, 1e-3, 3e-4, 7e-5, 0.9, 1e-5])
    size = 30_000
    datasets, samples = build_blending_indices(shares, size)
    assert list(zip(datasets.tolist(), samples.tolist(), strict=True)) == naive.blend(shares, size)


def test_a_million_samples_take_less_than_a_loop_would() -> None:
    """A loop in Python takes seconds; lanes take about a tenth of one."""
    started = time.process_time()
    build_blending_indices(normalize([0.5, 0.2, 0.17, 0.08, 0.05]), 1_000_000)
    assert time.process_time() - started < 2.0, "of a core: others may compute beside"
