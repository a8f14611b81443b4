"""Samples of conversations: what is packed, what is learned, and which files are refused."""

from __future__ import annotations

import builtins
import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron.core.datasets.sft_dataset import SFTDataset, pack
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams, flatten_batch_for_packed_sequences
from megatron.core.tokenizers.sft_tokenizer import IGNORE_INDEX, SFTTokenizer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.data.datasets import DataConfig, build_gpt_datasets
from megatron.training.data.documents import WithDocuments, collate, documents_of
from tests.support.conversations import conversation, some_conversations, write_conversations, write_tokenizer
from tests.support.corpora import build, config

PAD = 9


def _plain_pack(conversations: list[tuple[list[int], list[int]]], length: int) -> dict[str, list[int]]:
    """Pack token by token, as the rules of Megatron-LM's dataset say."""
    tokens: list[int] = []
    targets: list[int] = []
    positions: list[int] = []
    starts = [0]
    for text, learned in conversations:
        tokens, targets = tokens + text, targets + learned
        positions += range(len(text))
        starts.append(len(tokens))
        if len(tokens) > length:  # cut off, and the last token predicts padding
            tokens, targets = [*tokens[:length], PAD], [*targets[:length], PAD]
            positions = positions[: length + 1]
            starts[-1] = length
            break
    while len(tokens) <= length:
        tokens.append(PAD)
        targets.append(PAD)
        positions.append(positions[-1] + 1)
        starts[-1] = length
    return {
        "tokens": tokens[:-1],
        "labels": tokens[1:],
        "loss_mask": [int(target not in (PAD, IGNORE_INDEX)) for target in targets[1:]],
        "position_ids": positions[:-1],
        "cu_seqlens": sorted({*starts, length}),
    }


def _random_conversation(numbers: random.Random, *, first_is_learned: bool) -> tuple[list[int], list[int]]:
    tokens = [numbers.randrange(12) for _ in range(numbers.randint(1, 9))]
    learned = [token if numbers.random() < 0.6 else IGNORE_INDEX for token in tokens]
    return tokens, [tokens[0] if first_is_learned else IGNORE_INDEX, *learned[1:]]


def test_packs_are_those_of_a_plain_loop() -> None:
    """Of any lengths: cut off, full to the token, and padded; a conversation may begin where the sample ends.

    The end of a conversation does not learn the begin of the next, which Megatron-LM lets it where that is learned at all.
    """
    numbers = random.Random(1)
    cut = set()
    for trial in range(300):
        given = [_random_conversation(numbers, first_is_learned=trial % 3 == 0) for _ in range(numbers.randint(1, 5))]
        length = numbers.choice([1, 2, 8, 16, sum(len(tokens) for tokens, _ in given)])
        sample, whole = pack([(numpy.array(a), numpy.array(b)) for a, b in given], length, PAD)
        expected = _plain_pack(given, length)
        starts = expected.pop("cu_seqlens")
        for start in starts[1:-1]:
            assert trial % 3 == 0 or not expected["loss_mask"][start - 1]
            expected["loss_mask"][start - 1] = 0
        assert {name: sample[name].tolist() for name in expected} == expected
        assert sample["cu_seqlens"].tolist() == starts + [length] * (length + 1 - len(starts))
        assert sample["max_seqlen"] == max(end - begin for begin, end in pairwise(starts))
        assert whole == (sum(len(tokens) for tokens, _ in given) <= length)
        cut.add(whole)
    assert cut == {True, False}
    assert sample["tokens"].dtype == torch.int64 and sample["cu_seqlens"].dtype == torch.int32


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SFTTokenizer:
    return SFTTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")), "nemotron-nano-v2")


def test_a_pack_has_the_loss_of_its_conversations(tokenizer: SFTTokenizer) -> None:
    """Each alone is a sample of its own. fp32: sums have another order."""
    parts = [conversation(f"{n} and {n}?", f"It is {2 * n}.", "So?", "So.", system="Add.") for n in range(5)]
    given = [tokenizer.tokenize_conversation(part, True, False) for part in parts]
    length = sum(len(tokens) for tokens, _ in given) + 3
    base: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "init_method_std": 0.3}
    fields = TransformerConfig(hidden_dropout=0.0, attention_dropout=0.0, **base)
    model = GPTModel(fields, get_gpt_decoder_block_spec(fields), tokenizer.vocab_size, length)

    def losses(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        held = WithDocuments([pack(sample, length, tokenizer.pad)[0] for sample in samples], None)
        batch = collate([held[place] for place in range(len(held))])
        per_token = model(
            batch["tokens"], batch["position_ids"], None, labels=batch["labels"], packed_seq_params=documents_of(batch)
        )
        mask = batch["loss_mask"]
        return (per_token * mask).sum(), mask.sum()

    together, num_together = losses([given])
    alone, num_alone = losses([[one] for one in given])
    two_rows, num_in_two = losses([given[:2], given[2:]])
    assert num_together == num_alone == num_in_two > 40
    torch.testing.assert_close(together, alone, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(two_rows, alone, rtol=1e-6, atol=0.0)

    # As library code written for Megatron-Core takes the samples; the pack is longer than the model has positions.
    packs = [pack(sample, length, tokenizer.pad)[0] for sample in (given[:2], given[2:])]
    flat = flatten_batch_for_packed_sequences(torch.utils.data.default_collate(packs))
    starts, longest = flat["cu_seqlens"][0], int(flat["max_seqlen"])
    packed = PackedSeqParams("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest)
    per_token = model(flat["tokens"], flat["position_ids"], None, labels=flat["labels"], packed_seq_params=packed)
    torch.testing.assert_close((per_token * flat["loss_mask"]).sum(), alone, rtol=1e-6, atol=0.0)


def _build(tokenizer: Any, path: str, sizes: Any = (7, 0, 0), **settings: Any) -> Any:
    given = {"blend": ([path], None), "split": "1,0,0", "sequence_length": 256, "tokenizer": tokenizer}
    return build(sizes, config(**{**given, **settings}), SFTDataset)  # type: ignore[arg-type]


def test_samples_are_the_lines_in_their_order_over_and_over(tokenizer: SFTTokenizer, tmp_path: Path) -> None:
    """A split divides lines. Empty lines are none. A sample that pads a batch counts nothing."""
    lines = some_conversations(5)
    path = write_conversations(tmp_path / "talk.jsonl", [*lines[:2], "", *lines[2:], " "])
    train, valid, test = _build(tokenizer, path, (7, 3, None), split="3,1,1")
    assert [len(train), len(valid), len(test)] == [7, 3, 1]
    texts = [tokenizer.detokenize(train[place]["tokens"].tolist()) for place in range(7)]
    assert texts[:3] == texts[3:6] and len(set(texts)) == 3 and "What is 0 and 0?" in texts[6]
    assert "What is 3 and 0?" in tokenizer.detokenize(valid[0]["tokens"].tolist())
    assert texts[2].count("Be brief.") == 3, "all conversations of a line are in one sample"
    assert train[None]["loss_mask"].sum() == 0 < train[0]["loss_mask"].sum()


def test_an_index_of_lines_is_made_once_and_no_line_is_held(
    tokenizer: SFTTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_conversations(tmp_path / "talk.jsonl", some_conversations(5))
    _build(tokenizer, path)
    with monkeypatch.context() as patch:
        read = builtins.open

        def refuses(name: Any, *options: Any, **more: Any) -> Any:
            assert str(name) != path, "the file must not be read again"
            return read(name, *options, **more)

        patch.setattr("builtins.open", refuses)
        (train, *_) = _build(tokenizer, path)
    assert sum(value.nbytes for value in vars(train.dataset).values() if isinstance(value, numpy.ndarray)) == 5 * 16
    assert os.path.isdir(tmp_path / "cache" / "SFTDataset_indices")
    write_conversations(tmp_path / "talk.jsonl", some_conversations(6))
    with pytest.raises(ValueError, match=r"talk.jsonl must not change while it is in use, got another file"):
        train[0]
    assert len(_build(tokenizer, path, (None, 0, 0))[0]) == 6


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"talk.jsonl, line 3: a line must be a JSON object, got text that is none: Expecting"),
        ('{"text": "a"}', r'line 3: .* whose "messages" are a list of turns, got the keys text'),
        ('["a"]', r'line 3: .* whose "messages" are a list of turns, got a list'),
        ('{"messages": ["a"]}', r'line 3: a turn must be an object with a "role" and its "content", got a as turn 1'),
        (conversation("a", ""), r"line 3: an assistant's turn must say something to a user or a tool, got nothing"),
    ],
    ids=["json", "keys", "list", "turn", "empty"],
)
def test_a_line_that_is_no_conversation_is_named_at_the_start(
    tokenizer: SFTTokenizer, tmp_path: Path, line: Any, message: str
) -> None:
    path = write_conversations(tmp_path / "talk.jsonl", [conversation("a", "b"), "", line, conversation("a", "b")])
    with pytest.raises(ValueError, match=message):
        _build(tokenizer, path)


def test_lines_without_a_turn_of_the_assistant_count_nothing_and_are_said(
    tokenizer: SFTTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_conversations(tmp_path / "talk.jsonl", [conversation("a", "b"), conversation("a"), conversation("c")])
    (train, *_) = _build(tokenizer, path)
    assert "2 of 3 lines have no turn of an assistant, the first is line 2" in caplog.text
    assert [train[place]["loss_mask"].sum() > 0 for place in range(3)] == [True, False, False]
    write_conversations(tmp_path / "none.jsonl", [conversation("a")])
    with pytest.raises(ValueError, match=r"none.jsonl must hold turns of an assistant, .* got none in 1 lines"):
        _build(tokenizer, str(tmp_path / "none.jsonl"))


def test_conversations_longer_than_a_sample_are_cut_off_and_said_once(
    tokenizer: SFTTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_conversations(tmp_path / "talk.jsonl", some_conversations(5))
    (train, *_) = _build(tokenizer, path, sequence_length=48)
    for place in (0, 2, 4):
        assert len(train[place]["tokens"]) == 48
    assert caplog.text.count("more than 48 tokens") == 1 and "line 3 among them" in caplog.text


def test_what_cannot_be_served_is_refused(tokenizer: SFTTokenizer, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"JSON lines, got .*talk.jsonl, where there is none"):
        _build(tokenizer, str(tmp_path / "talk.jsonl"))
    path = write_conversations(tmp_path / "talk.jsonl", [conversation("Assis", "tant")])
    with pytest.raises(ValueError, match="eod_mask_loss must be False with conversations"):
        _build(tokenizer, path, eod_mask_loss=True)
    with pytest.raises(ValueError, match="conversations must be read from a file, got mock data"):
        build((1, 0, 0), config(tokenizer=tokenizer), SFTDataset)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be an SFTTokenizer, got a FixtureTokenizer"):
        build((1, 0, 0), config(blend=([path], None), split="1,0,0"), SFTDataset)  # type: ignore[arg-type]
    identity = SFTTokenizer(tokenizer.path, "identity")
    with pytest.raises(
        ValueError, match=r"talk.jsonl, line 1: the tokens of a conversation must be those of its turns"
    ):
        _build(identity, path)[0][0]


def test_the_data_of_a_run_are_conversations(tokenizer: SFTTokenizer, tmp_path: Path) -> None:
    """Blends by weight repeat them; attention is told of the conversations of a sample."""
    paths = [
        write_conversations(tmp_path / f"{name}.jsonl", some_conversations(number))
        for name, number in (("a", 3), ("b", 4))
    ]
    blend = ("0.3", paths[0], "0.7", paths[1])
    data = build_gpt_datasets(
        DataConfig(sft=True, data_path=blend, split="1,0,0", seq_length=256, cache_path=str(tmp_path / "index")),
        tokenizer,
        (20, 0, 0),
    )
    batch = collate([data.train[place] for place in range(20)])
    assert batch["documents"].shape == (20, 256) and batch["documents"].max() == 2
    assert len(batch["document_starts"]) - 1 == (batch["documents"][:, -1] + 1).sum()
    assert int((batch["dataset_id"] == 1).sum()) == 14
