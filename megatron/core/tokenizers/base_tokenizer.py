"""What training and data preparation need of a tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any


class MegatronTokenizerBase(ABC):
    """Turns text into token ids in [0, ``vocab_size``) and back."""

    NO_TOKEN = -1
    """Stands for a special token that the tokenizer does not have; no corpus holds it."""

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special tokens at its ends."""

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, special tokens included; without padding for the model's sake."""

    @property
    @abstractmethod
    def eod(self) -> int:
        """Id that ends a document."""

    @property
    def pad(self) -> int:
        """Id that fills up sequences, or ``NO_TOKEN``."""
        return self.NO_TOKEN

    @property
    def bos(self) -> int:
        """Id that begins a sequence, or ``NO_TOKEN``."""
        return self.NO_TOKEN

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """What tells this tokenizer from another; part of the description of cached indices."""
        return OrderedDict({"class": type(self).__name__, "vocab_size": self.vocab_size})
