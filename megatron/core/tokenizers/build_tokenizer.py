"""Builder of tokenizers from the values of flags."""

from __future__ import annotations

import difflib

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.core.tokenizers.byte_level_tokenizer import ByteLevelTokenizer
from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from megatron.core.tokenizers.null_tokenizer import NullTokenizer
from megatron.core.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

TOKENIZER_TYPES = ("ByteLevelTokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer", "NullTokenizer")
"""Values of ``--tokenizer-type``; the first is the default."""


def build_tokenizer(
    tokenizer_type: str = TOKENIZER_TYPES[0], tokenizer_model: str | None = None, vocab_size: int | None = None
) -> MegatronTokenizerBase:
    """Build the tokenizer of a type.

    Args:
        tokenizer_type: one of ``TOKENIZER_TYPES``.
        tokenizer_model: file or folder of a Hugging Face or SentencePiece tokenizer; None for the others.
        vocab_size: number of ids of a ``NullTokenizer``, without the end of document. For the others it must be None or
            their own number of ids.

    Raises:
        ValueError: there is no such type, an argument is missing, or the type does not use it.
        FileNotFoundError, ImportError: the tokenizer's file or library is missing.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        nearest = difflib.get_close_matches(tokenizer_type, TOKENIZER_TYPES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"--tokenizer-type must be one of {', '.join(TOKENIZER_TYPES)}, got {tokenizer_type!r}; "
            f"the nearest is {nearest}"
        )
    if tokenizer_type in ("HuggingFaceTokenizer", "SentencePieceTokenizer"):
        if tokenizer_model is None:
            raise ValueError(f"{tokenizer_type} needs --tokenizer-model, a local file or folder, got none")
        file_type = HuggingFaceTokenizer if tokenizer_type == "HuggingFaceTokenizer" else SentencePieceTokenizer
        return _with_vocab_size(file_type(tokenizer_model), vocab_size)
    if tokenizer_model is not None:
        raise ValueError(f"{tokenizer_type} reads no file; --tokenizer-model must be left out, got {tokenizer_model}")
    if tokenizer_type == "ByteLevelTokenizer":
        return _with_vocab_size(ByteLevelTokenizer(), vocab_size)
    if vocab_size is None:
        raise ValueError("NullTokenizer needs --vocab-size, the number of ids, got none")
    return NullTokenizer(vocab_size)


def _with_vocab_size(tokenizer: MegatronTokenizerBase, vocab_size: int | None) -> MegatronTokenizerBase:
    """Return ``tokenizer``; raise ValueError if ``vocab_size`` is given and is not its own."""
    if vocab_size not in (None, tokenizer.vocab_size):
        raise ValueError(
            f"--vocab-size must be left out or be the {tokenizer.vocab_size} ids of the {type(tokenizer).__name__}, "
            f"got {vocab_size}; to try out another size without text use NullTokenizer"
        )
    return tokenizer
