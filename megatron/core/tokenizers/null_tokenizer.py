"""A tokenizer of numbers, for benchmarks and tests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase


class NullTokenizer(MegatronTokenizerBase):
    """A tokenizer of text that consists of the ids themselves, separated by spaces.

    Args:
        vocab_size: number of ids, as in Megatron-LM since 2026-04; before, one more was added to it.
        eod_id: id of the end of a document; None: the last one.
        pad_id: id of padding; -1: there is none.

    Raises:
        ValueError: ``vocab_size`` is not positive, or an id is outside of it.
    """

    def __init__(self, vocab_size: int, *, eod_id: int | None = None, pad_id: int = -1) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be positive, got {vocab_size}")
        self._num_ids, self._eod, self._pad = vocab_size, vocab_size - 1 if eod_id is None else eod_id, pad_id
        if not (0 <= self._eod < vocab_size and -1 <= pad_id < vocab_size):
            raise ValueError(
                f"--null-tokenizer-eod-id and --null-tokenizer-pad-id must be below --vocab-size {vocab_size}, got "
                f"{self._eod} and {pad_id}"
            )

    def tokenize(self, text: str) -> list[int]:
        """Return the numbers in ``text``.

        Raises:
            ValueError: a word is no whole number below the vocabulary size.
        """
        words = text.split()
        wrong = [word for word in words if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size)]
        if wrong:
            raise ValueError(
                f"text must be whole numbers below {self.vocab_size} with spaces between, got {wrong[0]!r}"
            )
        return [int(word) for word in words]

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the numbers with spaces between."""
        return " ".join(str(token) for token in ids)

    @property
    def vocab_size(self) -> int:
        return self._num_ids

    @property
    def eod(self) -> int:
        return self._eod

    @property
    def pad(self) -> int:
        return self._pad

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict({**super().unique_identifiers, "eod": self._eod, "pad": self._pad})
