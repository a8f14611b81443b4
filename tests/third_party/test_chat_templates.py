"""Tokens of conversations are those that ``transformers`` makes of the same files."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.tokenizers.prompt_formats import PROMPT_FORMATS
from megatron.core.tokenizers.sft_tokenizer import SFTTokenizer
from tests.support.conversations import SPECIAL, conversation, write_tokenizer

transformers = pytest.importorskip("transformers")

TALKS = [
    conversation("What is two and two?", "It is four.", "Name a colour", "green", system="Be brief."),
    conversation("Ein Wort, bitte: größer 🙂", "  größer\n\n"),
]
CHATML = (
    "{% for message in messages %}{{ '<s>' + message['role'] + '\n' + message['content'] | trim + '</s>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("prompt_format", PROMPT_FORMATS)
@pytest.mark.parametrize("talk", TALKS, ids=["system", "letters"])
def test_tokens_are_those_of_transformers(prompt_format: str, talk: list[dict[str, str]], tmp_path: Path) -> None:
    """The text of a format is made by a template here: the tokens are what is compared; of "default" the template too."""
    folder = write_tokenizer(tmp_path, chat_template=CHATML, unk_token="<unk>", bos_token="<s>")
    ours, theirs = SFTTokenizer(folder, prompt_format), transformers.AutoTokenizer.from_pretrained(folder)
    known = PROMPT_FORMATS[prompt_format]
    text = None if known is None else "".join(known.text(turn["role"], turn["content"]) for turn in talk)
    template = None if text is None else "{{ text }}"
    expected = theirs.apply_chat_template(talk, chat_template=template, text=text, return_dict=False)
    tokens, targets = ours.tokenize_conversation(talk, return_target=True, add_generation_prompt=False)
    assert tokens.tolist() == expected and len(tokens) > 10
    if known is None:
        assert (targets == tokens).all() and tokens[0] == SPECIAL.index("<s>")
        prompted = ours.tokenize_conversation(talk, False, True).tolist()
        assert prompted == theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False) != expected


def test_a_tokenizer_without_a_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="default needs a tokenizer with a chat template, got none; put"):
        SFTTokenizer(write_tokenizer(tmp_path), "default")
