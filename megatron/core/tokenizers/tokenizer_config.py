"""Settings of tokenizers, and which of them each type reads."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.tokenizers.huggingface_tokenizer import local_path

_MODEL = ("tokenizer_model",)
_MERGES = ("vocab_file", "merge_file")
_HUGGINGFACE = ("special_tokens", "tokenizer_hf_no_include_special_tokens")

NEEDED: dict[str, tuple[str, ...]] = {
    "ByteLevelTokenizer": (),
    "GPT2BPETokenizer": _MERGES,
    "HuggingFaceTokenizer": _MODEL,
    "SFTTokenizer": _MODEL,
    "SentencePieceTokenizer": _MODEL,
    "GPTSentencePieceTokenizer": _MODEL,
    "Llama2Tokenizer": _MODEL,
    "TikTokenizer": _MODEL,
    "NullTokenizer": ("vocab_size",),
}
"""For each type the settings that it cannot do without."""

_ALSO_READ: dict[str, tuple[str, ...]] = {
    "GPT2BPETokenizer": _HUGGINGFACE,
    "HuggingFaceTokenizer": _HUGGINGFACE,
    "SFTTokenizer": ("sft_tokenizer_prompt_format",),
    "TikTokenizer": ("special_tokens", "tiktoken_pattern", "tiktoken_num_special_tokens"),
    "NullTokenizer": ("null_tokenizer_eod_id", "null_tokenizer_pad_id"),
}
"""For each type what else it reads, beside the number of ids, which is compared with the tokenizer's own."""

TOKENIZER_TYPES = tuple(NEEDED)
"""Values of ``--tokenizer-type``."""

FILES = ("tokenizer_model", "vocab_file", "merge_file")
"""Settings that name local files or folders."""


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Settings of a tokenizer, with the names of Megatron-LM."""

    tokenizer_type: str | None = None
    """One of ``TOKENIZER_TYPES``; None: ``GPT2BPETokenizer`` where its files are given, else ``ByteLevelTokenizer``."""

    tokenizer_model: str | None = None
    """File or folder of the tokenizer. Of a name on Hugging Face's hub, what was downloaded before is read."""

    vocab_size: int | None = None
    """Number of ids of ``NullTokenizer`` and ``TikTokenizer``; for others None or their own number."""

    vocab_file: str | None = None
    merge_file: str | None = None

    special_tokens: tuple[str, ...] | None = None
    """More tokens that text is not cut in; for ``TikTokenizer`` the first of all."""

    tokenizer_hf_no_include_special_tokens: bool = False
    """Leave out what a Hugging Face tokenizer puts at the ends of a text, such as Llama's begin of a sequence."""

    sft_tokenizer_prompt_format: str = "nemotron-h-aligned"
    """How ``SFTTokenizer`` makes text of conversations: one of ``PROMPT_FORMATS``."""

    tiktoken_pattern: str | None = None
    """``v1`` or ``v2``, which None means."""

    tiktoken_num_special_tokens: int = 1000
    null_tokenizer_eod_id: int | None = None
    """Id of the end of a document; None: the last one."""

    null_tokenizer_pad_id: int = -1

    @property
    def kind(self) -> str:
        """The type, which may follow from the files."""
        has_merges = self.vocab_file is not None or self.merge_file is not None
        return self.tokenizer_type or ("GPT2BPETokenizer" if has_merges else "ByteLevelTokenizer")

    def missing(self) -> list[str]:
        """Return the settings that the type needs and that are not given."""
        return [name for name in NEEDED.get(self.kind, ()) if getattr(self, name) is None]

    def files(self) -> dict[str, str]:
        """Return the files that the type reads, by setting."""
        named = {name: getattr(self, name) for name in FILES if name in self._read()}
        return {name: local_path(path) for name, path in named.items() if path is not None}

    def not_read(self) -> list[str]:
        """Return the settings that are given and that this type does not read: launch scripts are shared between types."""
        default = TokenizerConfig()
        own = ("tokenizer_type", "vocab_size", *self._read())
        return [name for name, value in vars(self).items() if name not in own and value != getattr(default, name)]

    def _read(self) -> tuple[str, ...]:
        return NEEDED.get(self.kind, ()) + _ALSO_READ.get(self.kind, ())


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--tokenizer-special-tokens" if name == "special_tokens" else f"--{name.replace('_', '-')}"
