"""Tokenizers of the ``tokenizers`` library, from local files: ``tokenizer.json``, or GPT-2's vocabulary and merges."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from megatron.core.regular_file import read_json, read_regular
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside the tokenizer that name its special tokens; the first file that names a token decides."""
KNOWN_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<|end▁of▁sentence|>", "<eos>")
"""Names of the end of a document, used where no file names it and exactly one of them is an added token."""


class FastTokenizer(MegatronTokenizerBase):
    """A tokenizer of the ``tokenizers`` library.

    Args:
        tokenizer: the library's object.
        path: where it was read.
        with_ends: put at the ends of a text what the tokenizer puts there.
    """

    def __init__(self, tokenizer: Any, path: str, *, with_ends: bool) -> None:
        self._tokenizer, self.path, self._with_ends = tokenizer, path, with_ends
        self._eod = self._pad = self._bos = self.NO_TOKEN

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        return list(self._tokenizer.encode(text, add_special_tokens=self._with_ends).ids)

    def tokenize_fragment(self, text: str) -> list[int]:
        """Return the ids of a piece of a text, with no special tokens at its ends."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token by its name; None: there is none."""
        number = self._tokenizer.token_to_id(token)
        return None if number is None else int(number)

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, special tokens included."""
        return str(self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, since ids of added tokens may leave gaps."""
        return 1 + int(max(self._tokenizer.get_vocab(with_added_tokens=True).values()))

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
        return OrderedDict({**super().unique_identifiers, "path": self.path, "with_ends": self._with_ends})


class HuggingFaceTokenizer(FastTokenizer):
    """A tokenizer in a ``tokenizer.json``.

    Args:
        path: the file, or its folder, or the name of a repository on Hugging Face's hub that was downloaded before.
        special_tokens: more tokens that text is not cut in; the vocabulary grows by those that it does not have.
        with_ends: put at the ends of a text what the tokenizer puts there, as Megatron-LM does.

    Raises:
        ImportError: the ``tokenizers`` library is not installed.
        FileNotFoundError: the file does not exist.
        ValueError: the file is no tokenizer, or its end of document is unknown.
    """

    def __init__(self, path: str, *, special_tokens: Sequence[str] = (), with_ends: bool = True) -> None:
        library = _library("HuggingFaceTokenizer")
        folder = local_path(path)
        file = os.path.join(folder, TOKENIZER_FILE) if os.path.isdir(folder) else folder
        if not os.path.isfile(file):
            raise FileNotFoundError(
                f"HuggingFaceTokenizer must be given a local {TOKENIZER_FILE} or its folder, got {path}; "
                "nothing is downloaded, so fetch the files first"
            )
        try:
            tokenizer = library.Tokenizer.from_file(file)
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{file} must be a tokenizer of the tokenizers library, got: {error}") from error
        if not tokenizer.get_vocab(with_added_tokens=True):
            raise ValueError(f"{file} must be a tokenizer with a vocabulary, got an empty one")
        tokenizer.no_truncation()  # files may say how long the texts of some model are
        tokenizer.no_padding()
        tokenizer.add_special_tokens(list(special_tokens))
        super().__init__(tokenizer, file, with_ends=with_ends)
        self._settings = settings = _read_settings(os.path.dirname(file))
        self._eod = self._find_end(settings)
        self._pad = self._special("pad_token", settings)
        self._bos = self._special("bos_token", settings)

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
        return int(next(iter(known.values())))


class GPT2BPETokenizer(FastTokenizer):
    """The byte-level BPE of GPT-2, from its two files; ``<|endoftext|>`` ends documents and begins sequences.

    Args:
        vocab_file: JSON object of token to id.
        merge_file: a pair of tokens on each line, the first to be merged first.
        special_tokens: more tokens that text is not cut in; the vocabulary grows by those that it does not have.

    Raises:
        ImportError: the ``tokenizers`` library is not installed.
        FileNotFoundError: a file does not exist.
        ValueError: the files are no vocabulary and its merges.
    """

    END = "<|endoftext|>"

    def __init__(self, vocab_file: str, merge_file: str, *, special_tokens: Sequence[str] = ()) -> None:
        library = _library("GPT2BPETokenizer")
        for flag, path in (("--vocab-file", vocab_file), ("--merge-file", merge_file)):
            if not os.path.isfile(path):
                raise FileNotFoundError(f"GPT2BPETokenizer: {flag} must be a local file, got {path}")
        try:
            model = library.models.BPE.from_file(vocab_file, merge_file)
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{vocab_file} and {merge_file} must be a BPE vocabulary, got: {error}") from error
        tokenizer = library.Tokenizer(model)
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        tokenizer.add_special_tokens([self.END, *special_tokens])
        super().__init__(tokenizer, vocab_file, with_ends=False)
        self._eod = self._bos = int(tokenizer.token_to_id(self.END))


def _library(name: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(f"{name} needs the tokenizers library: pip install tokenizers") from error
    return tokenizers


def local_path(name: str) -> str:
    """Return the folder of a repository on Hugging Face's hub that was downloaded before; other names as they are."""
    if os.path.exists(name) or name.count("/") != 1:
        return name
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    repository = os.path.join(hub, f"models--{name.replace('/', '--')}")
    try:
        revision = read_regular(os.path.join(repository, "refs", "main"), 1 << 10).decode().strip()
        return os.path.join(repository, "snapshots", revision)
    except (OSError, ValueError):
        return name


def _read_settings(folder: str) -> dict[str, str]:
    """Return the special tokens that the files in ``folder`` name."""
    settings: dict[str, str] = {}
    for name in SETTINGS_FILES:
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            continue
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError(f"{path} must hold a JSON object, got a {type(content).__name__}")
        for key in ("eos_token", "pad_token", "bos_token", "unk_token"):
            token = content.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            if token is not None and not isinstance(token, str):
                raise ValueError(f"{path} must give the {key} as text, got {token!r}")
            if token is not None:
                settings.setdefault(key, token)
    return settings
