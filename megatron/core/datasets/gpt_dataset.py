"""Samples for GPT training: concatenated documents, cut into sequences, shuffled."""

from __future__ import annotations

import logging
import os
import zlib
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.index_cache import Arrays, IndexCache
from megatron.core.datasets.index_size import check_index_fits, index_nbytes
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.mock_corpus import MockGPTLowLevelDataset
from megatron.core.datasets.rank_logging import warn_on_rank_0
from megatron.core.datasets.sample_indices import build_sample_indices, plan_epochs
from megatron.core.datasets.sample_masks import attention_mask_of, loss_mask_of, position_ids_of
from megatron.core.datasets.split import Split

logger = logging.getLogger(__name__)

NO_PAD_TOKEN = -1
"""Padding id where the tokenizer has none; no corpus contains it."""


@dataclass(frozen=True, kw_only=True)
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Settings of GPT datasets; fields and defaults are Megatron-Core's."""

    reset_position_ids: bool | None = None
    """Count positions from the start of each document. Must be given."""

    reset_attention_mask: bool | None = None
    """Hide earlier documents in the attention mask. Must be given; needs ``create_attention_mask``."""

    eod_mask_loss: bool | None = None
    """Leave the prediction after an end of document out of the loss. Must be given."""

    create_attention_mask: bool = True
    """Add an attention mask [1, S, S] to each sample; causal attention kernels need none."""

    drop_last_partial_validation_sequence: bool = True
    """Leave out the tokens at the end of the validation part that do not fill a sample; otherwise they are padded."""

    add_extra_token_to_sequence: bool = True
    """Read one token more than ``sequence_length``, so that the last input has a label too."""

    object_storage_cache_path: str | None = None
    """Not served."""

    sequences_per_dataset: dict[str, Any] | None = None
    """Not served."""

    token_dtype_code: int | None = None
    """Not served."""

    context_parallel_size: int = 1
    """Not served beyond 1."""

    hybrid_context_parallel: bool = False
    """Not served."""

    data_parallel_size: int = 1
    """Ignored, since samples do not depend on the number of ranks; ``hybrid_context_parallel`` would need it."""

    sequence_parallel_size: int = 0
    """Ignored, for the same reason."""

    inter_document_masking: bool = False
    """Not served."""

    def _refusals(self) -> list[tuple[bool, str]]:
        return [
            *super()._refusals(),
            (
                self.object_storage_cache_path is not None,
                "object_storage_cache_path is not served: corpora are read from file systems alone",
            ),
            (
                self.sequences_per_dataset is not None or self.token_dtype_code is not None,
                "sequences_per_dataset and token_dtype_code are not served: they are read from each index file",
            ),
            (
                self.context_parallel_size != 1 or self.hybrid_context_parallel,
                "context_parallel_size other than 1 and hybrid_context_parallel are not served: "
                f"samples are not packed for them, got {self.context_parallel_size}, {self.hybrid_context_parallel}",
            ),
            (
                self.inter_document_masking,
                "inter_document_masking is not served: use reset_attention_mask with create_attention_mask",
            ),
        ]

    def _faults(self) -> list[tuple[bool, str]]:
        return [
            *super()._faults(),
            (self.tokenizer is None, "tokenizer must be given for its eod, which separates documents, got None"),
            *(
                (getattr(self, name) is None, f"{name} must be True or False, got None")
                for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
            ),
            (
                bool(self.reset_attention_mask) and not self.create_attention_mask,
                "reset_attention_mask needs create_attention_mask=True, got False",
            ),
        ]


class GPTDataset(MegatronDataset):
    """Samples of tokens and labels of one part of one corpus; the arguments are those of ``MegatronDataset``.

    Raises:
        ValueError: the documents hold no token, or one epoch is requested of a corpus that is shorter than a sample.
    """

    config: GPTDatasetConfig

    def __init__(
        self,
        indexed_dataset: Any,
        dataset_path: str | None,
        indexed_indices: numpy.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        self._pad_token_id = _pad_token_id(config)
        self._num_ids = getattr(config.tokenizer, "vocab_size", None)
        self._attention_mask: torch.Tensor | None = None
        self._check_tokens()
        indices = self._load_or_build_indices()
        self.document_index = indices["document_index"]
        self.sample_index = indices["sample_index"]
        self.shuffle_index = indices["shuffle_index"]

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Return the number of sequences of the corpus; a split divides it between sequences."""
        return int(low_level_dataset.sequence_lengths.shape[0])

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> Any:
        """Open the corpus at a prefix."""
        assert dataset_path is not None
        return IndexedDataset(
            dataset_path, multimodal=False, mmap=config.mmap_bin_files, allow_gaps=config.allow_gaps_in_corpora
        )

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [
            *MegatronDataset._key_config_attributes(),
            "add_extra_token_to_sequence",
            "drop_last_partial_validation_sequence",
        ]

    def _key_contents(self) -> dict[str, Any]:
        lengths = self.dataset.sequence_lengths
        return {"num_sequences": int(lengths.size), "lengths_crc32": zlib.crc32(lengths.tobytes())}

    def __len__(self) -> int:
        return int(self.sample_index.shape[0]) - 1

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Return a sample: tokens, labels, position_ids [S] int64, loss_mask [S] float32, attention_mask if configured.

        With ``idx`` None it returns a sample that pads a batch: its loss mask is zero.

        Raises:
            ValueError: the corpus holds a token id that is negative or that the tokenizer does not have.
        """
        config, eod, pad = self.config, self.config.tokenizer.eod, self._pad_token_id
        text = torch.from_numpy(self._text(0 if idx is None else idx))
        if config.add_extra_token_to_sequence:
            tokens, labels = text[:-1].contiguous(), text[1:].contiguous()
        else:
            tokens, labels = text, torch.roll(text, shifts=-1)
            labels[-1] = pad
        loss_mask = loss_mask_of(tokens, eod=eod, eod_mask_loss=bool(config.eod_mask_loss))
        position_ids = position_ids_of(tokens, eod=eod, reset_position_ids=bool(config.reset_position_ids))
        sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
        if config.create_attention_mask:
            sample["attention_mask"] = self._attention_mask_of(tokens)
        loss_mask[labels == pad] = 0.0
        if idx is None:
            loss_mask.zero_()
        tokens[tokens == pad] = 0  # any valid id; the loss mask excludes it
        labels[labels == pad] = 0
        return sample

    def _attention_mask_of(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.config.reset_attention_mask:
            return attention_mask_of(tokens, eod=self.config.tokenizer.eod, reset_attention_mask=True)
        if self._attention_mask is None:
            self._attention_mask = attention_mask_of(tokens, eod=0, reset_attention_mask=False)
        return self._attention_mask

    def _text(self, idx: int) -> numpy.ndarray:
        """Return the tokens [S + extra], int64, of a sample, padded where the corpus ends within it."""
        if not -len(self) <= idx < len(self):
            raise IndexError(f"{self._part()} holds {len(self)} samples, got index {idx}")
        extra = int(self.config.add_extra_token_to_sequence)
        sample = int(self.shuffle_index[idx])
        (first, start), (last, end) = self.sample_index[sample].tolist(), self.sample_index[sample + 1].tolist()
        text = numpy.full(self.config.sequence_length + extra, self._pad_token_id, dtype=numpy.int64)
        filled = 0
        for position in range(first, last + 1):
            begin = start if position == first else 0
            length = end + extra - begin if position == last else None
            part = self.dataset.get(int(self.document_index[position]), offset=begin, length=length)
            text[filled : filled + part.size] = part
            filled += part.size
        if text[:filled].min(initial=0) < 0:
            raise ValueError(
                f"{self.dataset_path}: token ids must not be negative, got {text[:filled].min()} in documents "
                f"{self.document_index[first : last + 1].tolist()}; prepare the corpus again"
            )
        if self._num_ids is not None and text.max() >= self._num_ids:
            raise ValueError(
                f"{self.dataset_path}: token ids must be below the tokenizer's {self._num_ids}, got {text.max()} in "
                f"documents {self.document_index[first : last + 1].tolist()}; use the tokenizer of the corpus"
            )
        return text

    def _check_tokens(self) -> None:
        lengths, extra = self.dataset.sequence_lengths, int(self.config.add_extra_token_to_sequence)
        num_tokens = int(lengths[self.indices].sum(dtype=numpy.int64))
        part = self._part()
        if num_tokens == 0:
            raise ValueError(f"{part} must hold tokens, got {len(self.indices)} empty documents; change the split")
        needed = self.config.sequence_length + extra
        if num_tokens >= needed or (self.num_samples is None and self._keeps_partial_sample()):
            return
        if self.num_samples is None and int(lengths.sum(dtype=numpy.int64)) < needed:
            raise ValueError(
                f"{self.dataset_path} must hold one sample of {needed} tokens, got {num_tokens} tokens in all; "
                "shorten sequence_length"
            )
        effect = "holds no sample" if not self.num_samples else "repeats documents within a sample"
        warn_on_rank_0(logger, "%s %s: a sample takes %d tokens, it has %d", part, effect, needed, num_tokens)

    def _part(self) -> str:
        return f"the {self.index_split.name} part of {self.dataset_path or 'the mock data'}"

    def _keeps_partial_sample(self) -> bool:
        return self.index_split is Split.valid and not self.config.drop_last_partial_validation_sequence

    def _load_or_build_indices(self) -> Arrays:
        folder = self.config.path_to_cache
        if folder is None and not self.config.mock:
            folder = os.path.join(self.dataset.path_prefix, "cache", f"{type(self).__name__}_indices")
        if folder is None:
            return self._build_indices(is_shared=False)
        stem = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
        must_write = self.config.path_to_cache is not None
        cache = IndexCache(folder, stem, self.unique_description, must_write=must_write)
        return cache.load_or_build(self._build_indices)

    def _check_memory(self, *, is_shared: bool) -> None:
        """Check that the host can hold the indices while they are built."""
        length, extra = self.config.sequence_length, int(self.config.add_extra_token_to_sequence)
        tokens = int(self.dataset.sequence_lengths[self.indices].sum(dtype=numpy.int64))
        plan = plan_epochs(
            tokens_per_epoch=tokens, num_samples=self.num_samples, sequence_length=length, extra_tokens=extra
        )
        num_samples = plan.num_epochs * tokens // length
        check_index_fits(
            f"the index of {num_samples:,} samples of {length} tokens, {plan.num_epochs:,} epochs of {self._part()}",
            index_nbytes(num_samples, plan.num_epochs * len(self.indices)),
            is_shared=is_shared,
        )

    def _build_indices(self, *, is_shared: bool = True) -> Arrays:
        self._check_memory(is_shared=is_shared)
        indices = build_sample_indices(
            documents=self.indices,
            lengths=self.dataset.sequence_lengths,
            num_samples=self.num_samples,
            sequence_length=self.config.sequence_length,
            extra_tokens=int(self.config.add_extra_token_to_sequence),
            drop_last_partial=not self._keeps_partial_sample(),
            seed=self.config.random_seed,
        )
        return {
            "document_index": indices.document_index,
            "sample_index": indices.sample_index,
            "shuffle_index": indices.shuffle_index,
        }


class MockGPTDataset(GPTDataset):
    """Samples of generated documents, the same on every machine; needs no files."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> MockGPTLowLevelDataset:
        """Generate the documents; ``dataset_path`` is ignored."""
        return MockGPTLowLevelDataset(config.tokenizer)


def _pad_token_id(config: GPTDatasetConfig) -> int:
    """Return the tokenizer's padding id, or -1 where there is none or it is also another special id."""
    try:
        pad = config.tokenizer.pad
    except (AttributeError, NotImplementedError):
        return NO_PAD_TOKEN
    if pad is None or pad < 0:
        return NO_PAD_TOKEN
    others = [getattr(config.tokenizer, name, None) for name in ("eod", "bos", "eos", "cls", "sep", "mask")]
    if pad in others and not config.allow_ambiguous_pad_tokens:
        return NO_PAD_TOKEN
    return int(pad)
