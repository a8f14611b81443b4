"""How conversations become text: the formats of ``--sft-tokenizer-prompt-format``, turn by turn.

Source: the texts and the masks are Megatron-LM's, for Nemotron's models; the code is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Turn = Mapping[str, Any]
"""A message: who speaks ("role": system, user, assistant or tool) and what is said ("content")."""

OF_TOKENIZER = "default"
"""The format that is the tokenizer's own chat template."""

_ROLES = ("system", "user", "assistant", "tool")
_SPEAKER, _END = "<SPECIAL_11>", "<SPECIAL_12>"


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """A format in which a conversation is the text of one turn after the other, and what the assistant says is learned."""

    text: Callable[[str, str], str]
    """(role, content) -> the text of the turn."""

    num_prefix_tokens: int = 0
    """First tokens of an assistant's turn, which say that the assistant speaks and are not learned."""

    pad_token: str
    """The token behind conversations, by name."""

    def check(self, conversation: Sequence[Turn]) -> None:
        """Check roles, their order and contents.

        Raises:
            ValueError: with the turn, counted from 1.
        """
        before = None
        for number, turn in enumerate(conversation, 1):
            role, content = str(turn.get("role")).lower(), turn.get("content")
            if role not in _ROLES:
                raise ValueError(
                    f"the role of a turn must be one of {', '.join(_ROLES)}, got {turn.get('role')!r} in turn {number}"
                )
            if not isinstance(content, str):
                raise ValueError(f"the content of a turn must be text, got a {type(content).__name__} in turn {number}")
            if role == "assistant" and (not content or before not in ("user", "tool")):
                got = "nothing said" if not content else f"one after {before or 'no turn'}"
                raise ValueError(
                    f"an assistant's turn must say something to a user or a tool, got {got} in turn {number}"
                )
            before = role


def _nemotron_h_aligned(role: str, content: str) -> str:
    said = content.strip()
    if role == "system":
        return f"<SPECIAL_10>System\n{said}\n"
    if role == "user":
        return f"{_SPEAKER}User\n{said}\n{_SPEAKER}Assistant\n"
    return f"{said}\n" if role == "assistant" else ""


def _nemotron_nano_v2(role: str, content: str) -> str:
    if role == "assistant":
        return f"{_SPEAKER}Assistant\n{content.strip()}\n{_END}\n"
    said = content.replace("/think", "").replace("/no_think", "").strip()
    if role == "system":
        return f"<SPECIAL_10>System\n{said}\n"
    return f"{_SPEAKER}User\n{said}\n" if role == "user" else ""


PROMPT_FORMATS: Mapping[str, PromptFormat | None] = {
    "nemotron-h-aligned": PromptFormat(text=_nemotron_h_aligned, pad_token="<SPECIAL_233>"),
    "nemotron-nano-v2": PromptFormat(text=_nemotron_nano_v2, num_prefix_tokens=3, pad_token="<unk>"),
    "identity": PromptFormat(text=lambda role, content: content, pad_token="<unk>"),
    OF_TOKENIZER: None,
}
"""The formats by name; None: the tokenizer's own chat template, whose every token is learned."""
