"""Tokenizers: text to token ids and back. ``build_tokenizer`` builds the one of a ``--tokenizer-type``."""

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.megatron_tokenizer import MegatronTokenizer
from megatron.core.tokenizers.tokenizer_config import TOKENIZER_TYPES, TokenizerConfig

__all__ = ["TOKENIZER_TYPES", "MegatronTokenizer", "MegatronTokenizerBase", "TokenizerConfig", "build_tokenizer"]
