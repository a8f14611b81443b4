"""Tokenizers from the namespace of a command line."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields
from typing import Any

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.core.tokenizers.build_tokenizer import build_tokenizer as build_from_config
from megatron.core.tokenizers.tokenizer_config import TokenizerConfig


def build_tokenizer(args: Namespace, **kwargs: Any) -> MegatronTokenizerBase:
    """Build the tokenizer of flags under Megatron-LM's names; set ``args.padded_vocab_size`` where it is None.

    Args:
        args: flags that it lacks are at their defaults.
        kwargs: must be empty.

    Raises:
        NotImplementedError: ``kwargs`` are given.
        ValueError: there is no such type, or a setting is missing.
    """
    if kwargs:
        raise NotImplementedError(f"build_tokenizer takes the flags alone, got {', '.join(kwargs)} besides")
    given = {field.name: getattr(args, field.name) for field in fields(TokenizerConfig) if hasattr(args, field.name)}
    if isinstance(given.get("special_tokens"), list):
        given["special_tokens"] = tuple(given["special_tokens"])
    tokenizer = build_from_config(TokenizerConfig(**given))
    if getattr(args, "padded_vocab_size", None) is None and getattr(args, "make_vocab_size_divisible_by", None):
        args.padded_vocab_size = vocab_size_with_padding(tokenizer.vocab_size, args)
    return tokenizer


def vocab_size_with_padding(orig_vocab_size: int, args: Namespace, logging_enabled: bool = True) -> int:
    """Return the next multiple of ``make_vocab_size_divisible_by`` times the tensor-parallel ranks."""
    return calculate_padded_vocab_size(
        orig_vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
    )


def calculate_padded_vocab_size(
    vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int, logging_enabled: bool = True
) -> int:
    """Return the next multiple of ``make_vocab_size_divisible_by`` times the tensor-parallel ranks."""
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple
