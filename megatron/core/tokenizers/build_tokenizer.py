"""Builder of tokenizers from their settings."""

from __future__ import annotations

import difflib

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.core.tokenizers.byte_level_tokenizer import ByteLevelTokenizer
from megatron.core.tokenizers.huggingface_tokenizer import GPT2BPETokenizer, HuggingFaceTokenizer
from megatron.core.tokenizers.null_tokenizer import NullTokenizer
from megatron.core.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from megatron.core.tokenizers.sft_tokenizer import SFTTokenizer
from megatron.core.tokenizers.tiktoken_tokenizer import TikTokenizer
from megatron.core.tokenizers.tokenizer_config import TOKENIZER_TYPES, TokenizerConfig, flag_of

# Megatron-LM gives the number of ids to no other tokenizer: they have their own, and the flag has no effect.
_TAKE_VOCAB_SIZE = ("NullTokenizer", "TikTokenizer", "ByteLevelTokenizer")


def build_tokenizer(config: TokenizerConfig) -> MegatronTokenizerBase:
    """Build the tokenizer of these settings.

    Raises:
        ValueError: there is no such type, a setting is missing, or the number of ids is not the tokenizer's, of those types
            that take one.
        FileNotFoundError, ImportError: the tokenizer's file or library is missing.
    """
    kind = config.kind
    if kind not in TOKENIZER_TYPES:
        nearest = difflib.get_close_matches(kind, TOKENIZER_TYPES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"--tokenizer-type must be one of {', '.join(TOKENIZER_TYPES)}, got {kind!r}; the nearest is {nearest}"
        )
    if missing := config.missing():
        raise ValueError(f"{kind} needs {' and '.join(map(flag_of, missing))}, got none")
    tokenizer = _build(kind, config)
    if kind in _TAKE_VOCAB_SIZE and config.vocab_size not in (None, tokenizer.vocab_size):
        raise ValueError(
            f"--vocab-size must be left out or be the {tokenizer.vocab_size} ids of the {kind}, got {config.vocab_size}; "
            "to try out another size without text use NullTokenizer"
        )
    return tokenizer


def _build(kind: str, config: TokenizerConfig) -> MegatronTokenizerBase:
    model = config.tokenizer_model or ""
    special_tokens = config.special_tokens or ()
    with_ends = not config.tokenizer_hf_no_include_special_tokens
    if kind == "NullTokenizer":
        assert config.vocab_size is not None
        return NullTokenizer(
            config.vocab_size, eod_id=config.null_tokenizer_eod_id, pad_id=config.null_tokenizer_pad_id
        )
    if kind == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    if kind == "GPT2BPETokenizer":
        assert config.vocab_file is not None and config.merge_file is not None
        return GPT2BPETokenizer(config.vocab_file, config.merge_file, special_tokens=special_tokens)
    if kind == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(model, special_tokens=special_tokens, with_ends=with_ends)
    if kind == "SFTTokenizer":
        return SFTTokenizer(model, config.sft_tokenizer_prompt_format)
    if kind == "TikTokenizer":
        return TikTokenizer(
            model,
            pattern=config.tiktoken_pattern or "v2",
            num_special_tokens=config.tiktoken_num_special_tokens,
            special_tokens=config.special_tokens,
            vocab_size=config.vocab_size,
        )
    return SentencePieceTokenizer(model)
