"""Fill-in-the-middle samples: what is permuted can be put together again, and nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.tokenizers import MegatronTokenizerBase
from tests.support.corpora import build, write_corpus

TOKENS = {"prefix": "<pre>", "middle": "<mid>", "suffix": "<suf>", "pad": "<pad>", "eod": "<end>"}
NAMES = [*TOKENS.values(), "<file>", "ab"]
PRE, MID, SUF, PAD, END, FILE, PAIR = range(128, 128 + len(NAMES))
TEXTS = [f"text {number} of some words that differ: {'xyz'[number % 3] * (5 + number)}" for number in range(12)]
LENGTH = 512
"""Tokens of a sample: several texts."""


class Letters(MegatronTokenizerBase):
    """A token is a letter of ASCII, a special token, or the pair "ab", which text is cut into and corpora need not have."""

    def tokenize(self, text: str) -> list[int]:
        return [0, *self.tokenize_fragment(text)]  # with a begin, which fragments must not have

    def tokenize_fragment(self, text: str) -> list[int]:
        return [PAIR if letter == "\0" else ord(letter) for letter in text.replace("ab", "\0")]

    def token_to_id(self, token: str) -> int | None:
        return 128 + NAMES.index(token) if token in NAMES else None

    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) if token < 128 else NAMES[token - 128] for token in ids)

    @property
    def vocab_size(self) -> int:
        return 128 + len(NAMES)

    @property
    def eod(self) -> int:
        return END


def _dataset(
    folder: Path,
    documents: Sequence[Sequence[int]] | None = None,
    kind: type[GPTDataset] = GPTFIMDataset,
    **settings: Any,
) -> Any:
    """The training data of one corpus, of texts that end with a token."""
    given = documents or [[*map(ord, text), END] for text in TEXTS]
    prefix = write_corpus(folder / "texts", given)
    defaults: dict[str, Any] = {
        "random_seed": 1234,
        "sequence_length": LENGTH,
        "tokenizer": Letters(),
        "blend": ([prefix], None),
        "split": "1,0,0",
        "fim_rate": 1.0,
        "fim_spm_rate": 0.0,
        "fim_extra_tokens": TOKENS,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
    }
    return build([40, 0, 0], GPTFIMDatasetConfig(**{**defaults, **settings}), kind)[0]


def _whole_texts(sample: dict[str, torch.Tensor], border: int = END) -> list[list[int]]:
    """The texts of a sample whose begin and end are in it."""
    tokens = sample["tokens"].tolist()
    ends = [place for place, token in enumerate(tokens) if token == border]
    return [tokens[first + 1 : last] for first, last in pairwise(ends)]


def _put_together(text: list[int]) -> str:
    """The text before it was cut."""
    letters = "".join(chr(token) if token < 128 else NAMES[token - 128] for token in text)
    if letters.startswith("<pre><suf>"):
        suffix, rest = letters.removeprefix("<pre><suf>").split("<mid>")
        return rest + suffix
    prefix, rest = letters.removeprefix("<pre>").split("<suf>")
    suffix, middle = rest.split("<mid>")
    return prefix + middle + suffix


@pytest.mark.parametrize("spm_rate", [0.0, 1.0])
def test_texts_are_cut_in_three_and_put_together_again(tmp_path: Path, spm_rate: float) -> None:
    dataset = _dataset(tmp_path, fim_spm_rate=spm_rate)
    found = [text for index in range(8) for text in _whole_texts(dataset[index])]
    assert len(found) > 30 and {_put_together(text) for text in found} <= set(TEXTS)
    suffix_first = sum(text[1] == SUF for text in found) / len(found)  # or there is no prefix
    assert suffix_first == 1 if spm_rate else suffix_first < 0.3
    assert len({tuple(text) for text in found}) > len(found) / 2, "in places of their own"


def test_rates_say_how_many_are_cut(tmp_path: Path) -> None:
    plain = _dataset(tmp_path, kind=GPTDataset)
    never = _dataset(tmp_path, fim_rate=0.0)
    assert all(torch.equal(plain[index][key], never[index][key]) for index in range(8) for key in plain[index])
    some = [text for index in range(40) for text in _whole_texts(_dataset(tmp_path, fim_rate=0.3)[index])]
    assert 0.15 < sum(PRE in text for text in some) / len(some) < 0.45


def test_a_sample_depends_on_its_number_alone(tmp_path: Path) -> None:
    """So it is the same on any rank, in any loading process and after a resume."""
    first, second = _dataset(tmp_path), _dataset(tmp_path)
    backwards = {index: second[index]["tokens"] for index in reversed(range(8))}
    assert all(torch.equal(first[index]["tokens"], backwards[index]) for index in range(8))
    other = _dataset(tmp_path, random_seed=7)
    assert not torch.equal(first[0]["tokens"], other[0]["tokens"])


def test_fragments_are_cut_each_by_itself(tmp_path: Path) -> None:
    files = [[*map(ord, f"{text} one"), FILE, *map(ord, f"# {text} two"), END] for text in TEXTS]
    settings: dict[str, Any] = {"fim_split_sample": "<file>", "fim_fragment_rate": 1.0, "fim_no_prefix": "#"}
    dataset = _dataset(tmp_path, files, **settings)
    texts = [text for index in range(8) for text in _whole_texts(dataset[index])]
    assert len(texts) > 10
    for text in texts:
        assert text.count(FILE) == 1
        one, two = text[: text.index(FILE)], text[text.index(FILE) + 1 :]
        assert _put_together(one).removesuffix(" one") in TEXTS, "cut by itself"
        assert "".join(map(chr, two)).startswith("# text"), "which begins so that it is not cut"


def test_a_text_that_becomes_shorter_is_padded_and_padding_is_not_in_the_loss(tmp_path: Path) -> None:
    """What is cut is read as text, which the tokenizer may say in fewer tokens."""
    sample = _dataset(tmp_path, [[*map(ord, "ab" * 700), END] for _ in range(4)])[0]
    padding = int((sample["labels"] == PAD).sum())
    assert padding > 100 and (sample["labels"][-padding:] == PAD).all()
    assert (sample["loss_mask"][-padding:] == 0).all() and (sample["loss_mask"][:-padding] == 1).all()
    assert sample["tokens"].numel() == LENGTH


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"need a token for suffix, got '<none>'.*--fim-suffix-token"):
        _dataset(tmp_path, fim_extra_tokens={**TOKENS, "suffix": "<none>"})
    with pytest.raises(ValueError, match="fim_extra_tokens must name prefix, middle, suffix, pad, eod, got None"):
        _dataset(tmp_path, fim_extra_tokens=None)
    with pytest.raises(ValueError, match=r"fim_rate must be from 0 to 1, got 2"):
        _dataset(tmp_path, fim_rate=2)
    with pytest.raises(ValueError, match="fim_fragment_rate must be from 0 to 1, got None"):
        _dataset(tmp_path, fim_split_sample="<file>")
