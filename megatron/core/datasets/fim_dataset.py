"""Samples for fill-in-the-middle training: parts of a text change places, so that a model learns to write what lies between.

A text is cut at two random characters into prefix, middle and suffix, which come as prefix, suffix, middle (PSM) or suffix,
prefix, middle (SPM), each after a token that names it.

Source: Bavarian et al., arXiv:2207.14255, sections 3 and 4.3 (SPM in its second variant); names and settings are Megatron-LM's.
Here a sample depends on the seed and its number alone, not on which samples were drawn before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.tokenizers import MegatronTokenizerBase

SPLIT_SAMPLE = "split-sample"
_TOKENS = ("prefix", "middle", "suffix", "pad", "eod")


@dataclass(frozen=True, kw_only=True)
class GPTFIMDatasetConfig(GPTDatasetConfig):
    """Settings of fill-in-the-middle datasets; fields are Megatron-LM's."""

    fim_rate: float | None = None
    """Probability that a text is cut and permuted. Must be given."""

    fim_spm_rate: float | None = None
    """Probability that a text that is permuted begins with its suffix. Must be given."""

    fim_extra_tokens: Mapping[str, str] | None = None
    """The tokenizer's tokens for "prefix", "middle", "suffix", "pad" and "eod". Must be given."""

    fim_split_sample: str | None = None
    """Token between fragments of a text, such as files of a repository, each of which is permuted by itself."""

    fim_fragment_rate: float | None = None
    """Probability that a fragment is permuted, in a text that is to be."""

    fim_no_prefix: str | None = None
    """Texts and fragments that begin so are not permuted."""

    def _faults(self) -> list[tuple[bool, str]]:
        rates = ("fim_rate", "fim_spm_rate", *(("fim_fragment_rate",) if self.fim_split_sample else ()))
        values = {name: getattr(self, name) for name in rates}
        return [
            *super()._faults(),
            *(
                (value is None or not 0 <= value <= 1, f"{name} must be from 0 to 1, got {value}")
                for name, value in values.items()
            ),
            (
                set(self.fim_extra_tokens or ()) != set(_TOKENS),
                f"fim_extra_tokens must name {', '.join(_TOKENS)}, got {self.fim_extra_tokens}",
            ),
            (self.blend is None and not any(self.blend_per_split or ()), "mock data are no text that could be cut"),
        ]


class GPTFIMDataset(GPTDataset):
    """Samples of tokens and labels of texts whose middle may come last; the arguments are those of ``GPTDataset``.

    Raises:
        ValueError: the tokenizer lacks one of the tokens.
    """

    config: GPTFIMDatasetConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.config.fim_extra_tokens is not None, "the configuration checks it"
        tokens, split = self.config.fim_extra_tokens, self.config.fim_split_sample
        self._ids = fim_ids(self.config.tokenizer, tokens if split is None else {**tokens, SPLIT_SAMPLE: split})
        self._split_id = self._ids.pop(SPLIT_SAMPLE, None)

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Return a sample as ``GPTDataset`` does; padding behind a text that became shorter is not in the loss."""
        sample = super().__getitem__(idx)
        if self._ids["pad"] != self._ids["eod"]:
            is_pad = (sample["labels"] == self._ids["pad"]).flip(0).cumprod(0).flip(0).bool()
            sample["loss_mask"][is_pad] = 0.0
        return sample

    def _text(self, idx: int) -> numpy.ndarray:
        """Return the tokens [S + extra], int64, of a sample, permuted, cut off or padded to the same length."""
        text = super()._text(idx)
        random = numpy.random.default_rng((self.config.random_seed, self.index_split.value, idx % len(self)))
        end = text.size
        while end and text[end - 1] == self._pad_token_id:  # a last sample that is not full
            end -= 1
        permuted = [self._permute_text(part, random) for part in _parts(text[:end], self._ids["eod"])]
        tokens = numpy.concatenate([*permuted, text[end:]])[: text.size]
        padding = numpy.full(text.size - tokens.size, self._ids["pad"])
        return numpy.concatenate((tokens, padding)).astype(numpy.int64)

    def _permute_text(self, text: numpy.ndarray, random: numpy.random.Generator) -> numpy.ndarray:
        """Permute a text, or each of its fragments; the token that ends it stays where it is."""
        config = self.config
        end = text[text.size - 1 :] if text.size and text[-1] == self._ids["eod"] else text[:0]
        body = text[: text.size - end.size]
        if self._split_id is None or not (body == self._split_id).any():
            return numpy.concatenate((self._permute(body, config.fim_rate, random), end))
        if random.random() >= (config.fim_rate or 0.0):
            return text
        fragments = []
        for fragment in _parts(body, self._split_id):
            border = fragment[fragment.size - 1 :] if fragment[-1] == self._split_id else fragment[:0]
            inner = fragment[: fragment.size - border.size]
            fragments += [self._permute(inner, config.fim_fragment_rate, random), border]
        return numpy.concatenate((*fragments, end))

    def _permute(self, tokens: numpy.ndarray, rate: float | None, random: numpy.random.Generator) -> numpy.ndarray:
        """Cut a text at two of its characters and change the order, with a probability."""
        config, tokenizer = self.config, self.config.tokenizer
        if not tokens.size or random.random() >= (rate or 0.0):
            return tokens
        text = tokenizer.detokenize(tokens.tolist())
        if config.fim_no_prefix is not None and text.startswith(config.fim_no_prefix):
            return tokens
        first, second = sorted(random.integers(0, len(text) + 1, size=2).tolist())
        prefix, middle, suffix = (
            tokenizer.tokenize_fragment(part) for part in (text[:first], text[first:second], text[second:])
        )
        names = self._ids
        if random.random() < (config.fim_spm_rate or 0.0):
            parts = [names["prefix"], names["suffix"], *suffix, names["middle"], *prefix, *middle]
        else:
            parts = [names["prefix"], *prefix, names["suffix"], *suffix, names["middle"], *middle]
        return numpy.array(parts, dtype=numpy.int64)


def fim_ids(tokenizer: MegatronTokenizerBase, tokens: Mapping[str, str]) -> dict[str, int]:
    """Return the ids of the tokens that name parts of a text, by their roles.

    Raises:
        ValueError: the tokenizer lacks one of them; names it and its flag.
    """
    found = {name: tokenizer.token_to_id(token) for name, token in tokens.items()}
    for name, number in found.items():
        if number is None:
            flag = f"--fim-{name}" if name == SPLIT_SAMPLE else f"--fim-{name}-token"
            raise ValueError(
                f"fill-in-the-middle samples need a token for {name}, got {tokens[name]!r}, which the tokenizer does not have; name one "
                f"with fim_extra_tokens ({flag}), or add it with --tokenizer-special-tokens, which "
                "GPT2BPETokenizer, HuggingFaceTokenizer and TikTokenizer read"
            )
    return {name: number for name, number in found.items() if number is not None}


def _parts(tokens: numpy.ndarray, border: int) -> Iterator[numpy.ndarray]:
    """Cut tokens behind each ``border``; no part is empty."""
    ends = numpy.flatnonzero(tokens == border) + 1
    return (part for part in numpy.split(tokens, ends) if part.size)
