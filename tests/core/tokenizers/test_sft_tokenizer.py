"""Conversations become the text of a format, and what the assistant says is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest

from megatron.core.tokenizers import MegatronTokenizer, TokenizerConfig, build_tokenizer
from tests.support.conversations import SPECIAL, conversation, write_tokenizer

TALK = conversation(
    " What is two and two? /think\n", "It is four.\n\n", "Name a colour", " green", system=" Be brief. "
)

# The text of the conversation by format, cut where learning begins and ends: (text, is learned).
TEXTS = {
    "nemotron-h-aligned": [
        (
            "<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\nWhat is two and two? /think\n<SPECIAL_11>Assistant\n",
            False,
        ),
        ("It is four.\n", True),
        ("<SPECIAL_11>User\nName a colour\n<SPECIAL_11>Assistant\n", False),
        ("green\n", True),
    ],
    "nemotron-nano-v2": [
        ("<SPECIAL_10>System\nBe brief.\n<SPECIAL_11>User\nWhat is two and two?\n<SPECIAL_11>Assistant\n", False),
        ("It is four.\n<SPECIAL_12>\n", True),
        ("<SPECIAL_11>User\nName a colour\n<SPECIAL_11>Assistant\n", False),
        ("green\n<SPECIAL_12>\n", True),
    ],
    "identity": [
        (" Be brief.  What is two and two? /think\n", False),
        ("It is four.\n\n", True),
        ("Name a colour", False),
        (" green", True),
    ],
}
PADS = {"nemotron-h-aligned": "<SPECIAL_233>", "nemotron-nano-v2": "<unk>", "identity": "<unk>"}


def _tokenizer(folder: Path, prompt_format: str, special: list[str] = SPECIAL, **settings: Any) -> Any:
    model = write_tokenizer(folder, special, **settings)
    return build_tokenizer(
        TokenizerConfig(tokenizer_type="SFTTokenizer", tokenizer_model=model, sft_tokenizer_prompt_format=prompt_format)
    )


@pytest.mark.parametrize("prompt_format", TEXTS)
def test_a_conversation_has_the_tokens_of_its_text_and_what_the_assistant_says_is_learned(
    prompt_format: str, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    tokenizer = _tokenizer(tmp_path, prompt_format)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    expected = [(plain.encode(text).ids, learned) for text, learned in TEXTS[prompt_format]]
    tokens, targets = tokenizer.tokenize_conversation(TALK, return_target=True, add_generation_prompt=False)
    assert tokens.dtype == numpy.int64
    assert tokens.tolist() == plain.encode("".join(text for text, _ in TEXTS[prompt_format])).ids
    assert tokens.tolist() == [token for ids, _ in expected for token in ids]
    assert targets.tolist() == [token if learned else -100 for ids, learned in expected for token in ids]
    assert tokenizer.tokenize_conversation(TALK, False, False).tolist() == tokens.tolist()
    assert tokenizer.pad == plain.token_to_id(PADS[prompt_format])
    assert tokenizer.check_conversation(TALK) and not tokenizer.check_conversation(TALK[:2])


class _Template:
    """What stands for a tokenizer of ``transformers`` with a chat template."""

    chat_template = "a template"

    @classmethod
    def from_pretrained(cls, folder: str, local_files_only: bool) -> _Template:
        assert local_files_only and (Path(folder) / "tokenizer.json").is_file()
        return cls()

    def apply_chat_template(self, turns: list[Any], **options: Any) -> list[int]:
        assert (options["tokenize"], options["return_dict"]) == (True, False)
        if turns[0]["role"] == "nobody":
            raise RuntimeError("conversations begin with somebody")
        return [1, *(len(turn["content"]) for turn in turns), *([7] * options["add_generation_prompt"])]


def test_of_the_tokenizers_own_template_all_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``transformers`` applies it; padding is the end of a text where there is no other."""
    module = "megatron.core.distributed.fsdp.huggingface"
    monkeypatch.setattr(f"{module}.tokenizer_class", lambda: _Template)
    tokenizer = _tokenizer(tmp_path, "default")
    tokens, targets = tokenizer.tokenize_conversation(conversation("ab", "abc"), True, False)
    assert tokens.tolist() == targets.tolist() == [1, 2, 3]
    assert tokenizer.tokenize_conversation(conversation("ab"), False, True).tolist() == [1, 2, 7]
    assert tokenizer.pad == tokenizer.eod == SPECIAL.index("</s>")
    assert _tokenizer(tmp_path, "default", pad_token="<s>").pad == SPECIAL.index("<s>")
    assert tokenizer.check_conversation([{"role": "developer", "content": None}]), "a template may take more roles"
    with pytest.raises(
        ValueError, match=r"chat template of .* must take the conversation, got: conversations begin with some"
    ):
        tokenizer.tokenize_conversation([{"role": "nobody", "content": ""}], True, False)
    monkeypatch.setattr(_Template, "chat_template", None)
    with pytest.raises(
        ValueError, match=r"default needs a tokenizer with a chat template, got none; put .* one of nemotron-h-al"
    ):
        _tokenizer(tmp_path, "default")


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([{"role": "bot", "content": "a"}], "role of a turn must be one of system, user, .*, got 'bot' in turn 1"),
        ([{"role": "user", "content": ["a"]}], "content of a turn must be text, got a list in turn 1"),
        (conversation("a", ""), "must say something to a user or a tool, got nothing said in turn 2"),
        (
            conversation("a", "b", system="c")[::2],
            "must say something to a user or a tool, got one after system in turn 2",
        ),
        (conversation("a", "b")[1:], "got one after no turn in turn 1"),
    ],
    ids=["role", "content", "empty", "system", "first"],
)
def test_conversations_that_do_not_fit_are_refused(turns: list[Any], message: str, tmp_path: Path) -> None:
    tokenizer = _tokenizer(tmp_path, "identity")
    with pytest.raises(ValueError, match=message):
        tokenizer.check_conversation(turns)
    with pytest.raises(ValueError, match=message):
        tokenizer.tokenize_conversation(turns, True, False)


def test_turns_whose_texts_grow_together_are_refused(tmp_path: Path) -> None:
    """Which part of a token is the assistant's cannot be said; Megatron-LM ends by an assertion."""
    tokenizer = _tokenizer(tmp_path, "identity")
    assert len(tokenizer.tokenize("Assistant")) == 1
    with pytest.raises(ValueError, match=r"tokens of a conversation must be those of its turns, .* than identity"):
        tokenizer.tokenize_conversation(conversation("Assis", "tant"), True, False)


def test_tokenizers_that_lack_what_a_format_needs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="must be one of nemotron-h-aligned, nemotron-nano-v2, identity, default, got 'chatml'"
    ):
        _tokenizer(tmp_path, "chatml")
    with pytest.raises(
        ValueError, match=r"nemotron-h-aligned pads with <SPECIAL_233> or the unknown token, got .* neither"
    ):
        _tokenizer(tmp_path, "nemotron-h-aligned", ["</s>", "<none>"])
    assert _tokenizer(tmp_path, "nemotron-h-aligned", ["</s>", "<none>"], unk_token="<none>").pad == 1


def test_texts_are_never_cut_off_or_padded(tmp_path: Path) -> None:
    """A ``tokenizer.json`` may say how long the texts of some model are."""
    path = Path(write_tokenizer(tmp_path)) / "tokenizer.json"
    content = json.loads(path.read_text())
    cut = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    path.write_text(json.dumps({**content, "truncation": cut}))
    tokenizer = MegatronTokenizer.from_pretrained(str(tmp_path), {"library": "sft"}, prompt_format="identity")
    assert tokenizer.detokenize(tokenizer.tokenize("some longer text")) == "some longer text"
