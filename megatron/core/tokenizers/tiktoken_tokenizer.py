"""Tokenizers of the tiktoken library, with the vocabularies that Megatron-LM reads."""

from __future__ import annotations

import base64
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from megatron.core.regular_file import read_json
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

FIRST_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
"""Special tokens that every vocabulary has; the first ids are theirs unless other ones are given."""

DEFAULT_VOCAB_SIZE = 2**17

_WORD_END = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD_BEGIN = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"

PATTERNS = {
    "v1": "|".join((_BEFORE + r"+\p{L}+", r"\p{N}", r" ?[^\s\p{L}\p{N}]++[\r\n]*", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+")),
    "v2": "|".join(
        (
            f"{_BEFORE}{_WORD_BEGIN}*{_WORD_END}+",
            f"{_BEFORE}{_WORD_BEGIN}+{_WORD_END}*",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
}
"""What cuts text into words; Megatron-LM's, since other cuts give other ids. In v2 words are cut where upper case begins."""


class TikTokenizer(MegatronTokenizerBase):
    """A tokenizer whose first ids are special tokens and whose others are byte strings by rank.

    Args:
        path: JSON file, a list of {"rank", "token_bytes" in base64, "token_str"} by rank; what is beyond the size is cut off.
        pattern: a key of ``PATTERNS``.
        num_special_tokens: special tokens, of which those without a name are called ``<SPECIAL_n>``.
        special_tokens: names of the first ones, with all of ``FIRST_TOKENS``; None: these.
        vocab_size: ids, special ones included; None: ``DEFAULT_VOCAB_SIZE``.

    Raises:
        ImportError: the ``tiktoken`` library is not installed.
        FileNotFoundError: the file does not exist.
        ValueError: the file is no such list, or the numbers do not fit it.
    """

    def __init__(
        self,
        path: str,
        *,
        pattern: str = "v2",
        num_special_tokens: int = 1000,
        special_tokens: Sequence[str] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        try:
            from tiktoken import Encoding
        except ImportError as error:
            raise ImportError("TikTokenizer needs the tiktoken library: pip install tiktoken") from error
        if pattern not in PATTERNS:
            raise ValueError(f"--tiktoken-pattern must be {' or '.join(PATTERNS)}, got {pattern}")
        self.path, self._size = path, DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
        self._special = _special_tokens(special_tokens, num_special_tokens, self._size)
        ranks = _read_ranks(path, self._size - num_special_tokens)
        self._encoding = Encoding(
            os.path.basename(path),
            pat_str=PATTERNS[pattern],
            mergeable_ranks={token: rank + num_special_tokens for token, rank in ranks.items()},
            special_tokens=self._special,
        )
        self._settings = {"pattern": pattern, "num_special_tokens": num_special_tokens}

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of ``text``; names of special tokens in it become these."""
        return self._encoding.encode(text, allowed_special="all")

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a special token by its name; None: there is none."""
        return self._special.get(token)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included; invalid UTF-8 becomes U+FFFD."""
        return self._encoding.decode([int(token) for token in ids])

    @property
    def vocab_size(self) -> int:
        return self._size

    @property
    def eod(self) -> int:
        return self._special["</s>"]

    @property
    def pad(self) -> int:
        return self._special["<pad>"]

    @property
    def bos(self) -> int:
        return self._special["<s>"]

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict({**super().unique_identifiers, "path": self.path, **self._settings})


def _special_tokens(names: Sequence[str] | None, number: int, vocab_size: int) -> dict[str, int]:
    """Return the ids of all special tokens by name."""
    first = list(FIRST_TOKENS if names is None else names)
    if missing := set(FIRST_TOKENS) - set(first):
        raise ValueError(f"--tokenizer-special-tokens must have all of {' '.join(FIRST_TOKENS)}, got none of {missing}")
    if len(set(first)) < len(first):
        raise ValueError(f"--tokenizer-special-tokens must differ from each other, got {' '.join(first)}")
    if not len(first) <= number < vocab_size:
        raise ValueError(
            f"--tiktoken-num-special-tokens must be at least the {len(first)} special tokens with names and below the "
            f"{vocab_size} ids of --vocab-size, got {number}"
        )
    names_of_all = first + [f"<SPECIAL_{index}>" for index in range(len(first), number)]
    return {name: index for index, name in enumerate(names_of_all)}


def _read_ranks(path: str, number: int) -> dict[bytes, int]:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"TikTokenizer must be given a local JSON file of ranks, got {path}")
    try:
        entries = read_json(path)[:number]
        ranks = {base64.b64decode(entry["token_bytes"]): int(entry["rank"]) for entry in entries}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} must be a JSON list of objects with rank and token_bytes, got {type(error).__name__}: {error}"
        ) from error
    if sorted(ranks.values()) != list(range(number)):
        raise ValueError(
            f"{path} must have the ranks 0 to {number - 1}, one for each id that is not special, got {len(ranks)}; give its "
            "number of ids and of special tokens as --vocab-size and --tiktoken-num-special-tokens"
        )
    return ranks
