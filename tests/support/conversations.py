"""Files of conversations, and the tokenizers that read them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SPECIAL = ["<unk>", "<s>", "</s>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>"]
_TEXT = "Assistant\n" * 9 + "User\nSystem\nWhat is two and two? It is four. /think Name a colour, please: green\n"


def write_tokenizer(folder: Path, special: list[str] = SPECIAL, **settings: Any) -> str:
    """Write a tokenizer of bytes and some of their pairs; return its folder.

    Args:
        special: tokens by name, "</s>" among them, which ends a text.
        settings: of ``tokenizer_config.json``.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return str(folder)


def conversation(*said: str, system: str | None = None) -> list[dict[str, str]]:
    """Return a conversation: what the user and the assistant say in turn."""
    turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def write_conversations(path: Path, lines: Iterable[Any]) -> str:
    """Write a line of JSON for each list of turns, and return the file; text is written as it is."""
    texts = (line if isinstance(line, str) else json.dumps({"messages": line}) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return str(path)


def some_conversations(number: int) -> list[list[dict[str, str]]]:
    """Return lines of one to three conversations of different lengths."""
    lines = []
    for line in range(number):
        parts = [
            conversation(
                f"What is {line} and {part}?",
                f"It is {line + part}.",
                *(["Why?", "So."] * (line % 2)),
                system="Be brief.",
            )
            for part in range(1 + line % 3)
        ]
        lines.append([turn for part in parts for turn in part])
    return lines


def write_sft(folder: Path) -> str:
    """Write a tokenizer and 40 lines of conversations; return the flags that train on them."""
    data, model = (
        write_conversations(folder / "talk.jsonl", some_conversations(40)),
        write_tokenizer(folder / "tokenizer"),
    )
    return f"--sft --tokenizer-type SFTTokenizer --tokenizer-model {model} --data-path {data} --split 80,10,10"
