"""Tokenizers in Hugging Face's ``tokenizer.json`` format, from local files."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside the tokenizer that name its special tokens; the first file that names a token decides."""
KNOWN_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|end▁of▁sentence|>", "<eos>")
"""Names of the end of a document, used where no file names it and exactly one of them is an added token."""


class HuggingFaceTokenizer(MegatronTokenizerBase):
    """A tokenizer of the ``tokenizers`` library.

    Args:
        path: a ``tokenizer.json``, or its folder.

    Raises:
        ImportError: the ``tokenizers`` library is not installed.
        FileNotFoundError: the file does not exist.
        ValueError: the file is no tokenizer, or its end of document is unknown.
    """

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError("HuggingFaceTokenizer needs the tokenizers library: pip install tokenizers") from error
        self.path = os.path.join(path, TOKENIZER_FILE) if os.path.isdir(path) else path
        if not os.path.isfile(self.path):
            raise FileNotFoundError(
                f"HuggingFaceTokenizer must be given a local {TOKENIZER_FILE} or its folder, got {path}; "
                "nothing is downloaded, so fetch the files first"
            )
        try:
            self._tokenizer = Tokenizer.from_file(self.path)
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{self.path} must be a tokenizer of the tokenizers library, got: {error}") from error
        if not self._tokenizer.get_vocab(with_added_tokens=True):
            raise ValueError(f"{self.path} must be a tokenizer with a vocabulary, got an empty one")
        settings = _read_settings(os.path.dirname(self.path))
        self._eod = self._find_end(settings)
        self._pad = self._special("pad_token", settings)
        self._bos = self._special("bos_token", settings)

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special tokens at its ends."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included."""
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, since ids of added tokens may leave gaps."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def eod(self) -> int:
        return self._eod

    @property
    def pad(self) -> int:
        return self._pad

    @property
    def bos(self) -> int:
        return self._bos

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict({**super().unique_identifiers, "path": self.path})

    def _special(self, name: str, settings: dict[str, str]) -> int:
        token = settings.get(name)
        if token is None:
            return self.NO_TOKEN
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise ValueError(f"{self.path}: the {name} must be in the vocabulary, got {token!r}")
        return int(number)

    def _find_end(self, settings: dict[str, str]) -> int:
        named = self._special("eos_token", settings)
        if named != self.NO_TOKEN:
            return named
        added = self._tokenizer.get_added_tokens_decoder()
        known = {token.content: number for number, token in added.items() if token.content in KNOWN_END_TOKENS}
        if len(known) != 1:
            raise ValueError(
                f"{self.path}: the token that ends a document must be known, got candidates {list(known)}; name it as "
                f'"eos_token" in {SETTINGS_FILES[0]} beside the tokenizer'
            )
        return next(iter(known.values()))


def _read_settings(folder: str) -> dict[str, str]:
    """Return the special tokens that the files in ``folder`` name."""
    settings: dict[str, str] = {}
    for name in SETTINGS_FILES:
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            continue
        try:
            with open(path, encoding="utf-8") as stream:
                content = json.load(stream)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} must be JSON, got: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} must hold a JSON object, got a {type(content).__name__}")
        for key in ("eos_token", "pad_token", "bos_token"):
            token = content.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None and not isinstance(token, str):
                raise ValueError(f"{path} must give the {key} as text, got {token!r}")
            if token is not None:
                settings.setdefault(key, token)
    return settings
