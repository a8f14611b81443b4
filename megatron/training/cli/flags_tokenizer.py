"""Flags of tokenizers, also of tools that read text; names, types and defaults are Megatron-LM's unless the help says otherwise."""

from __future__ import annotations

import argparse
import difflib

from megatron.core.tokenizers import TOKENIZER_TYPES, TokenizerConfig
from megatron.core.tokenizers.prompt_formats import PROMPT_FORMATS
from megatron.training.cli.flag_rows import F, FlagGroup

_REASONS = {
    "Llama3Tokenizer": "use HuggingFaceTokenizer with its tokenizer.json",
    "MistralTokenizer": "use HuggingFaceTokenizer with its tokenizer.json",
    **dict.fromkeys(
        ("PretrainedFromHF", "HFTokenizer", "TokenizerFromFile", "TokenizerFromFileWithFIM"),
        "it is no tokenizer of Megatron-LM; use HuggingFaceTokenizer with its tokenizer.json",
    ),
    "BertWordPieceLowerCase": "only decoder models are served",
    "BertWordPieceCase": "only decoder models are served",
    "MultimodalTokenizer": "models of images are not served",
    "NullMultimodalTokenizer": "models of images are not served; use NullTokenizer",
}
"""Why tokenizers of Megatron-LM are not served, or what to use."""


def _tokenizer_type(text: str) -> str:
    if text not in TOKENIZER_TYPES:
        nearest = difflib.get_close_matches(text, TOKENIZER_TYPES, n=1, cutoff=0.0)[0]
        remedy = _REASONS.get(text, f"the nearest is {nearest}")
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(TOKENIZER_TYPES)}, got {text}; {remedy}")
    return text


def _prompt_format(text: str) -> str:
    if text not in PROMPT_FORMATS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(PROMPT_FORMATS)}, got {text}")
    return text


TOKENIZER_FLAGS = FlagGroup(
    "tokenizer",
    F(
        "--tokenizer-type",
        f"one of {', '.join(TOKENIZER_TYPES)} (default: GPT2BPETokenizer where its files are given, else "
        "ByteLevelTokenizer)",
        type=_tokenizer_type,
        choices=None,
    ),
    F("--tokenizer-model", "file or folder of the tokenizer; of a hub's name, what was downloaded before"),
    F(
        "--vocab-size",
        "number of ids of NullTokenizer and TikTokenizer; ByteLevelTokenizer refuses another number than "
        "its own, and others have the number of their files, whatever is given",
    ),
    F("--vocab-file", "JSON of GPT2BPETokenizer's tokens and ids"),
    F("--merge-file", "merges of GPT2BPETokenizer"),
    F(
        "--tokenizer-special-tokens",
        "more special tokens of a HuggingFace or GPT-2 tokenizer; the first ones of TikTokenizer",
    ),
    F("--tokenizer-hf-no-include-special-tokens", "leave out what a HuggingFace tokenizer puts at the ends of a text"),
    F(
        "--sft-tokenizer-prompt-format",
        f"how SFTTokenizer makes text of conversations, one of {', '.join(PROMPT_FORMATS)}; default is the tokenizer's own chat "
        "template (default: nemotron-h-aligned)",
        type=_prompt_format,
    ),
    F("--tiktoken-pattern", "how TikTokenizer cuts words (default: v2)"),
    F("--tiktoken-num-special-tokens", "special tokens of TikTokenizer"),
    F("--null-tokenizer-eod-id", "id with which NullTokenizer ends a document (default: the last one)"),
    F("--null-tokenizer-pad-id", "padding of NullTokenizer (default: -1, none)"),
)


def tokenizer_config(args: argparse.Namespace) -> TokenizerConfig:
    """Map the flags of ``TOKENIZER_FLAGS``."""
    return TokenizerConfig(
        tokenizer_type=args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        vocab_size=args.vocab_size,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        special_tokens=None if args.special_tokens is None else tuple(args.special_tokens),
        tokenizer_hf_no_include_special_tokens=args.tokenizer_hf_no_include_special_tokens,
        sft_tokenizer_prompt_format=args.sft_tokenizer_prompt_format,
        tiktoken_pattern=args.tiktoken_pattern,
        tiktoken_num_special_tokens=args.tiktoken_num_special_tokens,
        null_tokenizer_eod_id=args.null_tokenizer_eod_id,
        null_tokenizer_pad_id=args.null_tokenizer_pad_id,
    )
