"""Tokenizers of SentencePiece models."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase


class SentencePieceTokenizer(MegatronTokenizerBase):
    """A tokenizer of the ``sentencepiece`` library; the model's end of sentence is the end of a document.

    Args:
        path: a ``.model`` file.

    Raises:
        ImportError: the ``sentencepiece`` library is not installed.
        FileNotFoundError: the file does not exist.
        ValueError: the file is no model, or the model has no end of sentence.
    """

    def __init__(self, path: str) -> None:
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise ImportError("SentencePieceTokenizer needs its library: pip install sentencepiece") from error
        if not os.path.isfile(path):
            raise FileNotFoundError(f"SentencePieceTokenizer must be given a local .model file, got {path}")
        self.path = path
        self._model = SentencePieceProcessor()
        try:
            self._model.Load(path)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"{path} must be a SentencePiece model, got: {error}") from error
        if self._model.eos_id() < 0:
            raise ValueError(f"{path} must have an end of sentence (eos_id), which ends documents, got none")

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special tokens at its ends."""
        return list(self._model.EncodeAsIds(text))

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a piece by its name; None: there is none."""
        number = int(self._model.PieceToId(token))  # that of unknown pieces where there is none
        return number if self._model.IdToPiece(number) == token else None

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; control tokens are left out."""
        return str(self._model.DecodeIds([int(token) for token in ids]))

    @property
    def vocab_size(self) -> int:
        return int(self._model.GetPieceSize())

    @property
    def eod(self) -> int:
        return int(self._model.eos_id())

    @property
    def pad(self) -> int:
        return int(self._model.pad_id())

    @property
    def bos(self) -> int:
        return int(self._model.bos_id())

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict({**super().unique_identifiers, "path": self.path})
