"""Bytes as tokens."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

NUM_BYTES = 256


class ByteLevelTokenizer(MegatronTokenizerBase):
    """A tokenizer whose ids are the UTF-8 bytes of the text, 0 to 255, and 256 for the end of a document; needs no files."""

    def tokenize(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of ``text``; unpaired surrogates become question marks."""
        return list(text.encode("utf-8", errors="replace"))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` without ends of documents; invalid UTF-8 becomes U+FFFD.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        if any(not 0 <= token <= NUM_BYTES for token in ids):
            raise ValueError(f"byte-level ids must be in [0, {NUM_BYTES}], got {min(ids)} to {max(ids)}")
        return bytes(token for token in ids if token < NUM_BYTES).decode("utf-8", errors="replace")

    @property
    def vocab_size(self) -> int:
        return NUM_BYTES + 1

    @property
    def eod(self) -> int:
        return NUM_BYTES
