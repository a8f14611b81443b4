"""Tokens of conversations, and which of them are learned."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy

from megatron.core.tokenizers.huggingface_tokenizer import HuggingFaceTokenizer
from megatron.core.tokenizers.prompt_formats import OF_TOKENIZER, PROMPT_FORMATS, Turn

IGNORE_INDEX = -100
"""Target of a token that is not learned, as in Megatron-LM."""


class SFTTokenizer(HuggingFaceTokenizer):
    """A tokenizer in a ``tokenizer.json`` that also takes conversations.

    Args:
        tokenizer_path: as for ``HuggingFaceTokenizer``.
        prompt_format: one of ``PROMPT_FORMATS``. "default" is the chat template beside the tokenizer, which ``transformers``
            applies; the others need nothing beside the tokenizer.

    Raises:
        ImportError, FileNotFoundError: the ``tokenizers`` library (or ``transformers``), or the file is not there.
        ValueError: there is no such format; or the tokenizer lacks the format's padding or, for "default", a chat template.

    Source: the class, its arguments and results are Megatron-LM's.
    """

    def __init__(self, tokenizer_path: str, prompt_format: str) -> None:
        if prompt_format not in PROMPT_FORMATS:
            raise ValueError(f"the prompt format must be one of {', '.join(PROMPT_FORMATS)}, got {prompt_format!r}")
        super().__init__(tokenizer_path)
        self._prompt_format, self._format = prompt_format, PROMPT_FORMATS[prompt_format]
        self._padding = self._find_padding()
        if self._format is None and not self._chat_tokenizer.chat_template:
            others = ", ".join(name for name in PROMPT_FORMATS if name != OF_TOKENIZER)
            raise ValueError(
                f"{self.path}: the prompt format {OF_TOKENIZER} needs a tokenizer with a chat template, got none; put "
                f'"chat_template" into tokenizer_config.json beside it, or use one of {others}'
            )

    @property
    def prompt_format(self) -> str:
        """The name of the format."""
        return self._prompt_format

    def check_conversation(self, conversation: Sequence[Turn]) -> bool:
        """Check what can be known of a conversation before it is tokenized; return whether anything of it is learned.

        Raises:
            ValueError: a role or a content is none, or an assistant's turn is empty or answers nobody.
        """
        if self._format is None:
            return True
        self._format.check(conversation)
        return any(str(turn["role"]).lower() == "assistant" for turn in conversation)

    def tokenize_conversation(
        self, conversation: Sequence[Turn], return_target: bool, add_generation_prompt: bool
    ) -> Any:
        """Return the tokens [t], int64, of a conversation, or with ``return_target`` a pair: tokens and targets [t].

        Targets are tokens that are learned, and ``IGNORE_INDEX`` elsewhere: what others than the assistant say, and what says
        that the assistant speaks. With the tokenizer's own chat template all tokens are learned.

        Args:
            conversation: turns, each with ``role`` and ``content``.
            add_generation_prompt: end with what says that the assistant speaks, where the tokenizer's own template can.

        Raises:
            ValueError: the conversation does not fit the format.
        """
        if self._format is None:
            tokens = self._apply_chat_template(conversation, add_generation_prompt)
            return (tokens, tokens.copy()) if return_target else tokens
        self._format.check(conversation)
        texts = [self._format.text(str(turn["role"]).lower(), turn["content"]) for turn in conversation]
        tokens = self._ids_of("".join(texts))
        if not return_target:
            return tokens
        of_turns = [self._ids_of(text) for text in texts]
        if not numpy.array_equal(tokens, numpy.concatenate((tokens[:0], *of_turns))):
            raise ValueError(
                "the tokens of a conversation must be those of its turns, got others, since the tokenizer joins the end of a turn with "
                f"the begin of the next; use another prompt format than {self._prompt_format}, whose turns end with a token of their own"
            )
        targets = numpy.full_like(tokens, IGNORE_INDEX)
        begin = 0
        for turn, ids in zip(conversation, of_turns, strict=True):
            if str(turn["role"]).lower() == "assistant":
                first = min(begin + self._format.num_prefix_tokens, begin + len(ids))
                targets[first : begin + len(ids)] = tokens[first : begin + len(ids)]
            begin += len(ids)
        return tokens, targets

    @property
    def pad(self) -> int:
        return self._padding

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict({**super().unique_identifiers, "prompt_format": self._prompt_format})

    def _ids_of(self, text: str) -> numpy.ndarray:
        return numpy.array(self.tokenize_fragment(text), dtype=numpy.int64)

    def _find_padding(self) -> int:
        """Return the id of the format's padding: its token, else the tokenizer's unknown token; of "default" padding or end."""
        if self._format is None:
            return self._pad if self._pad != self.NO_TOKEN else self._eod
        for token in (self._format.pad_token, self._settings.get("unk_token")):
            number = None if token is None else self._tokenizer.token_to_id(token)
            if number is not None:
                return int(number)
        raise ValueError(
            f"{self.path}: the prompt format {self._prompt_format} pads with {self._format.pad_token} or the unknown token, got a "
            "tokenizer with neither; use another --sft-tokenizer-prompt-format, or add the token to the tokenizer"
        )

    @cached_property
    def _chat_tokenizer(self) -> Any:
        """The same tokenizer as an object of ``transformers``."""
        from megatron.core.distributed.fsdp.huggingface import tokenizer_class

        folder = os.path.dirname(self.path)
        try:
            return tokenizer_class().from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} must be a tokenizer that transformers can read, got: {error}") from error

    def _apply_chat_template(self, conversation: Sequence[Turn], add_generation_prompt: bool) -> numpy.ndarray:
        try:
            ids = self._chat_tokenizer.apply_chat_template(
                list(conversation), tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=False
            )
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the chat template of {self.path} must take the conversation, got: {error}") from error
        return numpy.array(ids, dtype=numpy.int64)
