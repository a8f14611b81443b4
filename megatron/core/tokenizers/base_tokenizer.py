"""The interface of tokenizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any


class MegatronTokenizerBase(ABC):
    """A tokenizer: it converts text to token ids in [0, ``vocab_size``) and back."""

    NO_TOKEN = -1
    """The id of a special token that the tokenizer does not have; no corpus contains it."""

    @abstractmethod
    def tokenize(self, text: str) -> list[int]:
        """Return the ids of ``text``, with the special tokens that the tokenizer itself puts at its ends; most put none."""

    def tokenize_fragment(self, text: str) -> list[int]:
        """Return the ids of a piece of a text, with no special tokens at its ends."""
        return self.tokenize(text)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token by its name; None: there is none, or tokens have no names."""
        return None

    @abstractmethod
    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, with special tokens but without the padding that models add."""

    @property
    @abstractmethod
    def eod(self) -> int:
        """Id of the end of a document."""

    @property
    def pad(self) -> int:
        """Id of padding, or ``NO_TOKEN``."""
        return self.NO_TOKEN

    @property
    def bos(self) -> int:
        """Id of the begin of a sequence, or ``NO_TOKEN``."""
        return self.NO_TOKEN

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """Properties that distinguish this tokenizer from others, for the description of cached indices."""
        return OrderedDict({"class": type(self).__name__, "vocab_size": self.vocab_size})
