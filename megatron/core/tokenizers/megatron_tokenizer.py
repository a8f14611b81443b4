"""Megatron-Core's entry point to tokenizers: a dict, or a file beside the tokenizer's, names the library that reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.core.regular_file import read_json
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig

_METADATA = "tokenizer_metadata.json"
_TYPES = {
    "null-text": "NullTokenizer",
    "byte-level": "ByteLevelTokenizer",
    "huggingface": "HuggingFaceTokenizer",
    "sft": "SFTTokenizer",
    "sentencepiece": "SentencePieceTokenizer",
    "tiktoken": "TikTokenizer",
    "megatron": "",  # the path is the type
}
_FIELDS = {
    "vocab_size": "vocab_size",
    "eod_id": "null_tokenizer_eod_id",
    "pad_id": "null_tokenizer_pad_id",
    "vocab_file": "vocab_file",
    "merges_file": "merge_file",
    "special_tokens": "special_tokens",
    "additional_special_tokens": "special_tokens",
    "prompt_format": "sft_tokenizer_prompt_format",
    "pattern": "tiktoken_pattern",
    "num_special_tokens": "tiktoken_num_special_tokens",
}
"""Arguments of Megatron-Core's libraries, by the fields of ``TokenizerConfig``."""

_HINTS = ("use_fast", "legacy", "use_gigatoken", "ignore_extra_whitespaces")
"""Arguments that change no id here: how a file is read."""


class MegatronTokenizer:
    """Makes tokenizers; it has no instances."""

    def __init__(self) -> None:
        raise TypeError("MegatronTokenizer has no instances; call MegatronTokenizer.from_pretrained()")

    @staticmethod
    def from_pretrained(
        tokenizer_path: str | None = None, metadata_path: str | dict[str, Any] | None = None, **kwargs: Any
    ) -> MegatronTokenizerBase:
        """Make a tokenizer.

        Args:
            tokenizer_path: file or folder of the tokenizer; None for "null-text" and "byte-level".
            metadata_path: a dict, or the path of a JSON file, whose ``library`` names the library; None: the file
                ``tokenizer_metadata.json`` beside the tokenizer.
            kwargs: settings of ``TokenizerConfig`` under Megatron-Core's names.

        Raises:
            ValueError: the library is unknown, or needs a path.
            NotImplementedError: an argument is not served by the library.
            FileNotFoundError, ImportError: the tokenizer's file or library is missing.
        """
        if metadata_path is None:
            if tokenizer_path is None:
                raise ValueError("tokenizer_path or metadata_path must be given, got None for both")
            path = Path(tokenizer_path)
            metadata_path = str((path.parent if path.is_file() else path) / _METADATA)
        metadata = read_json(metadata_path) if isinstance(metadata_path, str) else metadata_path
        if not isinstance(metadata, dict):
            raise ValueError(
                f"the metadata of a tokenizer must be an object, got {type(metadata).__name__} ({metadata_path})"
            )
        library = metadata.get("library")
        if library not in _TYPES:
            raise ValueError(f"a tokenizer's library must be one of {', '.join(_TYPES)}, got {library!r}")
        fields: dict[str, Any] = {"tokenizer_type": _TYPES[library] or tokenizer_path}
        if library not in ("null-text", "byte-level", "megatron"):
            if tokenizer_path is None:
                raise ValueError(f"tokenizer_path must be given for the library {library}, got None")
            fields["tokenizer_model"] = tokenizer_path
        for name, value in kwargs.items():
            if name in _FIELDS and value not in (None, []):
                fields[_FIELDS[name]] = tuple(value) if isinstance(value, list) else value
            elif name == "include_special_tokens":
                fields["tokenizer_hf_no_include_special_tokens"] = not value
            elif name not in (*_FIELDS, *_HINTS) and value not in (None, False, [], {}):
                raise NotImplementedError(
                    f"MegatronTokenizer: {name} must be left out, got {value!r}: it is not served"
                )
        return build_tokenizer(TokenizerConfig(**fields))

    @staticmethod
    def write_metadata(
        tokenizer_path: str,
        tokenizer_library: str,
        tokenizer_class: type | None = None,
        chat_template: str | None = None,
        overwrite: bool = False,
        metadata_path: str | None = None,
    ) -> None:
        """Write the file that ``from_pretrained`` reads.

        Raises:
            FileNotFoundError: there is no tokenizer.
            FileExistsError: the file is there, without ``overwrite``.
            NotImplementedError: a class or a chat template is given.
        """
        path = Path(tokenizer_path)
        if not path.exists():
            raise FileNotFoundError(f"a tokenizer must be at {path}, got nothing there; check the path")
        if tokenizer_class is not None or chat_template is not None:
            raise NotImplementedError("tokenizer_class and chat_template must be None, got another: files say both")
        target = Path(metadata_path or (path.parent if path.is_file() else path) / _METADATA)
        if target.exists() and not overwrite:
            raise FileExistsError(f"{target} must not be there, got a file; pass overwrite=True")
        target.write_text(json.dumps({"library": tokenizer_library}))
