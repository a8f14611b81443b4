"""Bytes as tokens."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

NUM_BYTES = 256


class ByteLevelTokenizer(MegatronTokenizerBase):
    """The bytes 0-255 of the text in UTF-8, and 256 for the end of a document; needs no files and loses nothing."""

    def tokenize(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of ``text``; half of a surrogate pair, which UTF-8 lacks, becomes a question mark."""
        return list(text.encode("utf-8", errors="replace"))

    def detokenize(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``; ends of documents are left out, bytes that are no UTF-8 become U+FFFD.

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
