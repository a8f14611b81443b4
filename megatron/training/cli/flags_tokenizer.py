"""Flags of tokenizers, also of tools that read text; names, types and defaults are Megatron-LM's unless the help says otherwise."""

from __future__ import annotations

import argparse
import difflib

from megatron.core.tokenizers import TOKENIZER_TYPES, TokenizerConfig
from megatron.core.tokenizers.prompt_formats import PROMPT_FORMATS

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


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``TokenizerConfig``."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument(
        "--tokenizer-type",
        type=_tokenizer_type,
        help=f"one of {', '.join(TOKENIZER_TYPES)} (default: GPT2BPETokenizer where its files are given, else "
        "ByteLevelTokenizer)",
    )
    group.add_argument(
        "--tokenizer-model", help="file or folder of the tokenizer; of a hub's name, what was downloaded before"
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        help="number of ids of NullTokenizer and TikTokenizer; ByteLevelTokenizer refuses another number than its own, and others "
        "have the number of their files, whatever is given",
    )
    group.add_argument("--vocab-file", help="JSON of GPT2BPETokenizer's tokens and ids")
    group.add_argument("--merge-file", help="merges of GPT2BPETokenizer")
    group.add_argument(
        "--tokenizer-special-tokens",
        dest="special_tokens",
        nargs="+",
        help="more special tokens of a HuggingFace or GPT-2 tokenizer; the first ones of TikTokenizer",
    )
    group.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="leave out what a HuggingFace tokenizer puts at the ends of a text",
    )
    group.add_argument(
        "--sft-tokenizer-prompt-format",
        type=_prompt_format,
        default="nemotron-h-aligned",
        help=f"how SFTTokenizer makes text of conversations, one of {', '.join(PROMPT_FORMATS)}; default is the tokenizer's own chat "
        "template (default: nemotron-h-aligned)",
    )
    group.add_argument("--tiktoken-pattern", choices=["v1", "v2"], help="how TikTokenizer cuts words (default: v2)")
    group.add_argument(
        "--tiktoken-num-special-tokens", type=int, default=1000, help="special tokens of TikTokenizer (default: 1000)"
    )
    group.add_argument(
        "--null-tokenizer-eod-id", type=int, help="id with which NullTokenizer ends a document (default: the last one)"
    )
    group.add_argument(
        "--null-tokenizer-pad-id", type=int, default=-1, help="padding of NullTokenizer (default: -1, none)"
    )


def tokenizer_config(args: argparse.Namespace) -> TokenizerConfig:
    """Map the flags of ``add_tokenizer_flags``."""
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
