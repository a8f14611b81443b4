"""The vectorised index builders equal plain loops."""

from __future__ import annotations

import time
from unittest import mock

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.datasets import sample_indices
from megatron.core.datasets.sample_indices import build_sample_index, build_sample_indices, plan_epochs
from tests.support import naive_samples as naive

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda lengths: sum(lengths) > 1)


@settings(max_examples=300, deadline=None)
@given(
    lengths=LENGTHS,
    num_samples=st.none() | st.integers(0, 60),
    length=st.integers(1, 50),
    extra=st.integers(0, 1),
    drop=st.booleans(),
    seed=st.integers(0, 1000),
    piece=st.sampled_from((1, 3, 2**18)),
)
def test_indices_equal_the_loops(
    lengths: list[int], num_samples: int | None, length: int, extra: int, drop: bool, seed: int, piece: int
) -> None:
    """Empty documents, samples longer than documents, many epochs, separate last epochs, partial last samples, any pieces."""
    documents = numpy.arange(len(lengths), dtype=numpy.int32)
    with mock.patch.object(sample_indices, "_PIECE", piece):
        built = build_sample_indices(
            documents=documents,
            lengths=numpy.array(lengths, dtype=numpy.int32),
            num_samples=num_samples,
            sequence_length=length,
            extra_tokens=extra,
            drop_last_partial=drop,
            seed=seed,
        )
    num_epochs, separate, before = naive.epochs(sum(lengths), num_samples, length, extra)
    random = numpy.random.RandomState(seed)
    order = naive.document_order(documents.tolist(), num_epochs, separate, random)
    total = naive.num_samples_of(num_epochs * sum(lengths) - extra, length, drop)
    assert built.document_index.tolist() == order
    assert built.sample_index.tolist() == naive.sample_starts(lengths, order, total, length, extra)
    assert built.shuffle_index.tolist() == naive.shuffled(before if separate else total, total, random)
    assert built.document_index.dtype == numpy.int32
    assert built.sample_index.dtype == numpy.int32
    assert built.shuffle_index.dtype == numpy.uint32


def test_last_epoch_is_separate_below_the_threshold_only() -> None:
    """100 samples an epoch: 79 of the last one are separate, 80 are not."""

    def separate(num_samples: int) -> bool:
        return plan_epochs(
            tokens_per_epoch=1001, num_samples=num_samples, sequence_length=10, extra_tokens=1
        ).separate_last_epoch

    assert [separate(count) for count in (100, 101, 179, 180, 200)] == [False, True, True, False, False]


def test_partial_samples_are_counted_in_float32_beyond_its_precision() -> None:
    """Megatron divides in float32, which loses the last of these samples; another count is another shuffle."""
    tokens = 2**24 * 8 + 2
    built = build_sample_indices(
        documents=numpy.array([0], dtype=numpy.int32),
        lengths=numpy.array([tokens], dtype=numpy.int32),
        num_samples=None,
        sequence_length=2**24,
        extra_tokens=1,
        drop_last_partial=False,
        seed=1,
    )
    assert built.sample_index.shape == (9, 2)


def test_wide_positions_get_int64() -> None:
    """A document of the longest length that int32 can say still fits; the offsets are exact."""
    longest = numpy.iinfo(numpy.int32).max
    index = build_sample_index(
        numpy.array([longest, longest], dtype=numpy.int32),
        numpy.array([0, 1], dtype=numpy.int32),
        num_samples=3,
        sequence_length=2**30,
        extra_tokens=1,
    )
    assert index.tolist() == [[0, 0], [0, 2**30], [1, 1], [1, 2**30 + 1]]


@pytest.mark.parametrize("num_samples", [None, 400_000])
def test_a_million_documents_take_no_loop(num_samples: int | None) -> None:
    """A loop over documents or samples in Python would take far longer than this generous bound."""
    lengths = numpy.random.default_rng(0).integers(1, 2000, 1_000_000, dtype=numpy.int32)
    started = time.process_time()
    build_sample_indices(
        documents=numpy.arange(lengths.size, dtype=numpy.int32),
        lengths=lengths,
        num_samples=num_samples,
        sequence_length=4096,
        extra_tokens=1,
        drop_last_partial=True,
        seed=1,
    )
    assert time.process_time() - started < 5.0, "of a core: others may compute beside"
