"""A tokenizer of numbers, for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase


class NullTokenizer(MegatronTokenizerBase):
    """A tokenizer of text that consists of the ids themselves, separated by spaces.

    Args:
        vocab_size: number of ids without the end of document, whose id is ``vocab_size``.

    Raises:
        ValueError: ``vocab_size`` is not positive.
    """

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be positive, got {vocab_size}")
        self._num_ids = vocab_size

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
        return self._num_ids + 1

    @property
    def eod(self) -> int:
        return self._num_ids
