"""Document, sample and shuffle indices of GPT training, which turn a corpus into a shuffled list of samples.

The documents of all epochs are shuffled and concatenated. Samples are cut from the result every ``sequence_length`` tokens
and shuffled in turn. Where only a small part of the last epoch is needed, it is shuffled separately and comes last, so that
its few samples are not spread among those of full epochs.

Everything is vectorised numpy: there is no loop over documents or samples, but over large pieces of them, so that building takes
little more memory than the indices (``index_size.py``).

Source: Megatron-Core's GPT dataset; the order in which the random state is used decides which samples are drawn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy

SEPARATE_LAST_EPOCH_THRESHOLD = 0.80
"""The last epoch is separate if it has fewer samples than this share of a full epoch's (Megatron's value)."""


_PIECE = 2**18
"""Documents, or samples, that are looked at together: little memory beside the indices themselves."""


@dataclass(frozen=True, kw_only=True)
class SampleIndices:
    """The three indices of a dataset."""

    document_index: numpy.ndarray
    """Document ids of all epochs in shuffled order, [E * D] int32."""
    sample_index: numpy.ndarray
    """Start of each sample: position in ``document_index`` and token in that document, [N + 1, 2] int32 or int64."""
    shuffle_index: numpy.ndarray
    """Sample at each position of the dataset, [N] uint32 or int64."""


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The number of epochs over the documents, and how the last one is shuffled."""

    num_epochs: int
    separate_last_epoch: bool
    num_samples_before_last_epoch: int
    """Samples that end before the last epoch; only meaningful with ``separate_last_epoch``."""


def plan_epochs(
    *, tokens_per_epoch: int, num_samples: int | None, sequence_length: int, extra_tokens: int
) -> EpochPlan:
    """Plan the epochs that give ``num_samples`` samples (None: one epoch), and whether the last is separate.

    Args:
        tokens_per_epoch: tokens of all documents; positive.
        extra_tokens: 1 if a sample has one token more than ``sequence_length`` (the last label), else 0.
    """
    if num_samples is None:
        return EpochPlan(num_epochs=1, separate_last_epoch=False, num_samples_before_last_epoch=0)
    num_epochs = max(1, -(-(num_samples * sequence_length + extra_tokens) // tokens_per_epoch))
    if num_epochs == 1:
        return EpochPlan(num_epochs=1, separate_last_epoch=False, num_samples_before_last_epoch=0)
    before_last = ((num_epochs - 1) * tokens_per_epoch - extra_tokens) // sequence_length
    samples_per_epoch = (tokens_per_epoch - extra_tokens) // sequence_length
    separate = num_samples - before_last < int(SEPARATE_LAST_EPOCH_THRESHOLD * samples_per_epoch)
    return EpochPlan(num_epochs=num_epochs, separate_last_epoch=separate, num_samples_before_last_epoch=before_last)


def build_sample_indices(
    *,
    documents: numpy.ndarray,
    lengths: numpy.ndarray,
    num_samples: int | None,
    sequence_length: int,
    extra_tokens: int,
    drop_last_partial: bool,
    seed: int,
) -> SampleIndices:
    """Build the three indices.

    Args:
        documents: [D] int32 ids of the documents to draw from; at least one is not empty.
        lengths: [S] int32 tokens of every document of the corpus.
        num_samples: minimum number of samples, since whole epochs are cut; None: those of one epoch.
        drop_last_partial: drop the tokens at the end that do not fill a sample.

    Ranks: pure; every rank computes the same answer.
    """
    tokens_per_epoch = int(lengths[documents].sum(dtype=numpy.int64))
    plan = plan_epochs(
        tokens_per_epoch=tokens_per_epoch,
        num_samples=num_samples,
        sequence_length=sequence_length,
        extra_tokens=extra_tokens,
    )
    random_state = numpy.random.RandomState(seed)
    document_index = build_document_index(documents, plan, random_state)
    sample_index = build_sample_index(
        lengths,
        document_index,
        num_samples=_count_samples(
            plan.num_epochs * tokens_per_epoch - extra_tokens, sequence_length, drop_last_partial
        ),
        sequence_length=sequence_length,
        extra_tokens=extra_tokens,
    )
    total = sample_index.shape[0] - 1
    first = plan.num_samples_before_last_epoch if plan.separate_last_epoch else total
    return SampleIndices(
        document_index=document_index,
        sample_index=sample_index,
        shuffle_index=build_shuffle_index(first, total, random_state),
    )


def build_document_index(
    documents: numpy.ndarray, plan: EpochPlan, random_state: numpy.random.RandomState
) -> numpy.ndarray:
    """Shuffle the document ids of all epochs together, except a separate last epoch: [E * D] int32."""
    num_shuffled_together = plan.num_epochs - plan.separate_last_epoch
    document_index = numpy.tile(documents.astype(numpy.int32), plan.num_epochs)
    boundary = num_shuffled_together * documents.size
    random_state.shuffle(document_index[:boundary])
    if plan.separate_last_epoch:
        random_state.shuffle(document_index[boundary:])
    return document_index


def build_sample_index(
    lengths: numpy.ndarray,
    document_index: numpy.ndarray,
    *,
    num_samples: int,
    sequence_length: int,
    extra_tokens: int,
) -> numpy.ndarray:
    """Compute the start of each sample, [N + 1, 2]: position in ``document_index`` and token in that document.

    Sample n has the tokens from start n to start n + 1, and ``extra_tokens`` more. Row N is the end of the last one.

    With an extra token a start is in the document that contains the token there (never an empty one). Without, it is in
    the document where the previous sample ends, after its last token where the two ends coincide.
    """
    widest = max(document_index.size, int(lengths.max()))
    sample_index = numpy.empty(
        (num_samples + 1, 2), dtype=numpy.int32 if widest <= numpy.iinfo(numpy.int32).max else numpy.int64
    )
    sample_index[0] = 0
    filled, total = 1, 0
    for first in range(0, document_index.size, _PIECE):
        ends = total + numpy.cumsum(lengths[document_index[first : first + _PIECE]], dtype=numpy.int64)
        # The token at the end of a document is the next one's first, or with no extra token this one's end.
        covered = (int(ends[-1]) - 1 if extra_tokens else int(ends[-1])) // sequence_length
        last = min(num_samples, max(covered, filled - 1))
        for begin in range(filled, last + 1, _PIECE):
            starts = numpy.arange(begin, min(begin + _PIECE, last + 1), dtype=numpy.int64) * sequence_length
            in_piece = numpy.searchsorted(ends, starts, side="right" if extra_tokens else "left")
            before = numpy.concatenate(([total], ends))[in_piece]
            sample_index[begin : begin + starts.size, 0] = first + in_piece
            sample_index[begin : begin + starts.size, 1] = starts - before
        filled, total = last + 1, int(ends[-1])
    if num_samples and num_samples * sequence_length > total - extra_tokens:  # a last sample that is not full
        sample_index[-1] = (document_index.size - 1, lengths[document_index[-1]] - extra_tokens)
    return sample_index


def build_shuffle_index(num_first: int, num_samples: int, random_state: numpy.random.RandomState) -> numpy.ndarray:
    """Shuffle the [N] sample numbers: the first ``num_first`` among themselves, then the others."""
    dtype = numpy.int64 if num_samples >= numpy.iinfo(numpy.uint32).max - 1 else numpy.uint32
    shuffle_index = numpy.arange(num_samples, dtype=dtype)
    random_state.shuffle(shuffle_index[:num_first])
    if num_first < num_samples:
        random_state.shuffle(shuffle_index[num_first:])
    return shuffle_index


def _count_samples(num_tokens: int, sequence_length: int, drop_last_partial: bool) -> int:
    if drop_last_partial:
        return max(0, num_tokens // sequence_length)
    exact = max(0, -(-num_tokens // sequence_length))
    # Megatron divides in float32, which may lose samples beyond 2**24 tokens; the same number must be shuffled here to draw
    # the same samples. Where float32 gives more samples than the tokens can fill, Megatron fails; the exact count is used.
    return min(exact, math.ceil(numpy.float32(num_tokens) / numpy.float32(sequence_length)))
