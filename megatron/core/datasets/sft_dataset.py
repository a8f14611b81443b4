"""Samples for supervised fine-tuning: the conversations of a line, packed, of which what the assistant says is learned.

Shapes: s tokens of a sample, n conversations in it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy
import torch

from megatron.core.datasets.conversation_file import SFTLowLevelDataset, split_conversations
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.rank_logging import warn_on_rank_0
from megatron.core.datasets.split import Split
from megatron.core.tokenizers.sft_tokenizer import IGNORE_INDEX

logger = logging.getLogger(__name__)

Pack = dict[str, torch.Tensor]


class SFTDataset(MegatronDataset):
    """Samples of one part of a file of conversations: a line each, in the order of the file, over and over.

    Args:
        dataset: the lines.
        dataset_path: their file.
        indices: [n] int32 lines of this part.
        num_samples: number of samples; None: each line once.
        index_split: the part (train, valid or test).
        config: the settings. Its tokenizer must be an ``SFTTokenizer``.

    Raises:
        TypeError: the tokenizer takes no conversations.
        ValueError: settings of corpora of documents are on.

    Source: the class, its arguments and its samples are Megatron-LM's; see ``pack``.
    """

    config: GPTDatasetConfig

    def __init__(
        self,
        dataset: SFTLowLevelDataset,
        dataset_path: str | None,
        indices: numpy.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        for name in ("reset_position_ids", "reset_attention_mask", "create_attention_mask", "eod_mask_loss"):
            if getattr(config, name):
                raise ValueError(
                    f"{name} must be False with conversations, got True: positions, attention and loss are those of each conversation"
                )
        self._says_cut = True

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Return the number of lines; a split divides the file between lines."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> SFTLowLevelDataset:
        """Open the file, and check all its lines unless that was done before."""
        tokenizer = config.tokenizer
        if dataset_path is None:
            raise ValueError("conversations must be read from a file, got mock data; give the blend of files")
        if not hasattr(tokenizer, "tokenize_conversation"):
            raise TypeError(f"the tokenizer of conversations must be an SFTTokenizer, got a {type(tokenizer).__name__}")
        return SFTLowLevelDataset(
            dataset_path,
            getattr(tokenizer, "check_conversation", None),
            checked_for=getattr(tokenizer, "prompt_format", ""),
            cache_folder=config.path_to_cache,
        )

    def __len__(self) -> int:
        return len(self.indices) if self.num_samples is None else self.num_samples

    def __getitem__(self, idx: int | None) -> Pack:
        """Return a sample; see ``pack``. With ``idx`` None it returns one that pads a batch: its loss mask is zero.

        Raises:
            ValueError: a conversation does not fit the prompt format, with its line.
        """
        line = int(self.indices[(idx or 0) % len(self.indices)])
        sample, whole = pack(self._tokenized(line), self.config.sequence_length, self.config.tokenizer.pad)
        if not whole and self._says_cut:
            self._says_cut = False
            message = "%s has conversations of more than %d tokens, line %d among them: what is beyond is left out"
            number = self.dataset.line_number(line)
            warn_on_rank_0(logger, message, self.dataset_path, self.config.sequence_length, number)
        if idx is None:
            sample["loss_mask"].zero_()
        return sample

    def _tokenized(self, line: int) -> Iterable[tuple[numpy.ndarray, numpy.ndarray]]:
        for conversation in split_conversations(self.dataset[line]):
            try:
                yield self.config.tokenizer.tokenize_conversation(
                    conversation, return_target=True, add_generation_prompt=False
                )
            except ValueError as error:
                raise ValueError(f"{self.dataset_path}, line {self.dataset.line_number(line)}: {error}") from error


def pack(conversations: Iterable[tuple[numpy.ndarray, numpy.ndarray]], length: int, pad: int) -> tuple[Pack, bool]:
    """Put conversations one after the other into a sample, which is cut off or padded behind the last.

    Args:
        conversations: (tokens [t], targets [t]) of each; those beyond ``length`` are not asked for.
        length: s.
        pad: id behind the last conversation.

    Returns:
        ``tokens``, ``labels`` (the tokens that follow) and ``position_ids`` (from 0 on in each conversation; padding goes on from
        the last) [s] int64, ``loss_mask`` [s] float32: 1 where the target of the label is neither ``IGNORE_INDEX`` nor ``pad``,
        and no other conversation begins; ``cu_seqlens`` [s + 1] int32: where conversations begin, padding being the last one's,
        filled up with s; ``max_seqlen`` [] int32: the longest. And whether all tokens are there.

    Source: Megatron-LM's samples, whose labels are ``IGNORE_INDEX`` where they are masked. There the last token of a conversation
        is trained to begin the next one where the first token of that is learned; here it is not, so that a pack has the loss of
        its conversations.
    """
    text, targets = numpy.full((2, length + 1), pad, dtype=numpy.int64)
    positions, starts, filled, whole = numpy.arange(length + 1), [0], 0, True
    for tokens, learned in conversations:
        kept = min(len(tokens), length - filled)
        if kept:
            text[filled : filled + kept], targets[filled : filled + kept] = tokens[:kept], learned[:kept]
            positions[filled:] = numpy.arange(length + 1 - filled)
            starts += [filled] if filled else []
            filled += kept
        if kept < len(tokens):
            whole = False
            break
    mask = (targets[1:] != pad) & (targets[1:] != IGNORE_INDEX)
    mask[[start - 1 for start in starts[1:]]] = False
    cu_seqlens = numpy.full(length + 1, length, dtype=numpy.int32)
    cu_seqlens[: len(starts)] = starts
    sample = {
        "tokens": text[:-1],
        "labels": text[1:],
        "loss_mask": mask.astype(numpy.float32),
        "position_ids": positions[:-1],
        "cu_seqlens": cu_seqlens,
        "max_seqlen": numpy.diff([*starts, length]).max(),
    }
    made = {name: torch.tensor(values) for name, values in sample.items()}
    return {**made, "max_seqlen": made["max_seqlen"].int()}, whole
