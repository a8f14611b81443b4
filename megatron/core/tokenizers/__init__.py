"""Tokenizers: text to token ids and back. ``build_tokenizer`` builds the one of a ``--tokenizer-type``."""

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.core.tokenizers.build_tokenizer import TOKENIZER_TYPES, build_tokenizer

__all__ = ["TOKENIZER_TYPES", "MegatronTokenizerBase", "build_tokenizer"]
