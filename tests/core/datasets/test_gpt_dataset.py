"""The contents of samples, and refused settings."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.sample_masks import attention_mask_of, loss_mask_of, position_ids_of
from megatron.core.tokenizers import TokenizerConfig, build_tokenizer
from tests.support.corpora import FixtureTokenizer, build, config, texts, write_corpus


def _train(prefix: str, size: int | None, cache: Path, **settings: Any) -> Any:
    return build([size, 0, 0], config(blend=([prefix], None), split="1,0,0", path_to_cache=str(cache), **settings))[0]


def test_sample_holds_what_was_asked_for(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [[5, 6, 0], list(range(1, 40))])
    plain = _train(prefix, 2, tmp_path, sequence_length=8)[0]
    assert list(plain) == ["tokens", "labels", "loss_mask", "position_ids"]
    assert {name: (value.shape, value.dtype) for name, value in plain.items()} == {
        "tokens": ((8,), torch.int64),
        "labels": ((8,), torch.int64),
        "loss_mask": ((8,), torch.float32),
        "position_ids": ((8,), torch.int64),
    }
    assert torch.equal(plain["tokens"][1:], plain["labels"][:-1])
    masked = _train(prefix, 2, tmp_path, sequence_length=8, create_attention_mask=True)[0]
    assert torch.equal(masked["attention_mask"], ~torch.ones(8, 8, dtype=torch.bool).tril().unsqueeze(0))


def test_masks_and_positions_start_over_after_an_end_of_document() -> None:
    tokens = torch.tensor([4, 0, 5, 6, 0, 0, 7])
    assert loss_mask_of(tokens, eod=0, eod_mask_loss=True).tolist() == [1, 0, 1, 1, 0, 0, 1]
    assert loss_mask_of(tokens, eod=0, eod_mask_loss=False).tolist() == [1] * 7
    assert position_ids_of(tokens, eod=0, reset_position_ids=True).tolist() == [0, 1, 0, 1, 2, 0, 0]
    assert position_ids_of(tokens, eod=0, reset_position_ids=False).tolist() == [0, 1, 2, 3, 4, 5, 6]
    seen = ~attention_mask_of(tokens, eod=0, reset_attention_mask=True)[0]
    blocks = [torch.ones(size, size, dtype=torch.bool).tril() for size in (2, 3, 1, 1)]
    assert torch.equal(seen, torch.block_diag(*blocks).bool())


def test_masks_of_one_sample_do_not_leak_into_the_next(tmp_path: Path) -> None:
    """A padded sample must not take places out of the loss of the samples after it."""
    prefix = write_corpus(tmp_path / "a", [[3] * 20])
    settings = config(
        blend=([prefix], None), split="0,1,0", path_to_cache=str(tmp_path), drop_last_partial_validation_sequence=False
    )
    valid = build([0, None, 0], settings)[1]
    masks = {int(sample["loss_mask"].sum()) for sample in (valid[0], valid[1], valid[0], valid[1])}
    assert len(valid) == 2
    assert masks == {16, 3}
    padded = next(sample for sample in (valid[0], valid[1]) if sample["loss_mask"].sum() == 3)
    assert padded["tokens"].tolist() == [3] * 4 + [0] * 12
    assert padded["labels"].tolist() == [3] * 3 + [0] * 13


def test_batches_are_filled_up_with_samples_that_do_not_count(tmp_path: Path) -> None:
    train = _train(write_corpus(tmp_path / "a", [[3] * 50]), 2, tmp_path)
    assert train[None]["loss_mask"].sum() == 0
    assert torch.equal(train[None]["tokens"], train[0]["tokens"])


def test_without_an_extra_token_the_last_label_does_not_count(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [list(range(1, 65))])
    train = _train(prefix, 4, tmp_path, add_extra_token_to_sequence=False)
    assert len(train) == 4
    sample = train[0]
    assert sample["labels"][-1] == 0 and sample["loss_mask"].tolist() == [1.0] * 15 + [0.0]
    assert sorted(token for index in range(4) for token in train[index]["tokens"].tolist()) == list(range(1, 65))


def test_ambiguous_padding_is_ignored_unless_configured(tmp_path: Path) -> None:
    """A tokenizer that pads with its end of document would take real ends of documents out of the loss."""

    class Ambiguous(FixtureTokenizer):
        pad = 0

    prefix = write_corpus(tmp_path / "a", [[3, 0] * 40])
    for allowed, in_loss in ((False, 16), (True, 8)):
        train = _train(prefix, 1, tmp_path, tokenizer=Ambiguous(), allow_ambiguous_pad_tokens=allowed)
        assert train[0]["loss_mask"].sum() == in_loss


def test_tokens_of_another_vocabulary_are_named(tmp_path: Path) -> None:
    """On a GPU they would fail an assertion in a kernel that does not mention the corpus."""
    train = _train(write_corpus(tmp_path / "a", [[3] * 20, [512] * 20]), 2, tmp_path)
    with pytest.raises(ValueError, match=r"a: token ids must be below the tokenizer's 512, got 512 in documents"):
        texts(train)
    with pytest.raises(IndexError, match="holds 2 samples, got index 2"):
        train[2]


def test_negative_tokens_are_named(tmp_path: Path) -> None:
    """An embedding would take them for ids from its end, or a GPU fail in a kernel."""
    train = _train(write_corpus(tmp_path / "a", [[3] * 20, [-7] * 20], numpy.int32), 2, tmp_path)
    with pytest.raises(ValueError, match=r"a: token ids must not be negative, got -7 in documents"):
        _ = [train[index] for index in range(len(train))]


def test_samples_go_through_loader_processes(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [list(range(1, 200))])
    for mmap in (True, False):
        train = _train(prefix, 8, tmp_path, mmap_bin_files=mmap)
        loader = DataLoader(train, batch_size=4, num_workers=2)
        loaded = torch.cat([batch["tokens"] for batch in loader])
        assert loaded.tolist() == [train[index]["tokens"].tolist() for index in range(len(train))]


def test_a_part_shorter_than_a_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a number of samples it is repeated, as Megatron does; an epoch of it has none, which is logged."""
    prefix = write_corpus(tmp_path / "a", [[1] * 40, [2] * 10])
    with caplog.at_level(logging.WARNING):
        _, valid, _ = build([1, 3, 0], config(blend=([prefix], None), split="1,1,0", path_to_cache=str(tmp_path)))
    assert texts(valid) == [[2] * 17] * 3
    assert "repeats documents within a sample: a sample takes 17 tokens, it has 10" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        _, valid, _ = build([1, None, 0], config(blend=([prefix], None), split="1,1,0", path_to_cache=str(tmp_path)))
    assert len(valid) == 0
    assert "holds no sample" in caplog.text
    with pytest.raises(ValueError, match="a must hold one sample of 101 tokens, got 50 tokens in all; shorten"):
        _train(prefix, None, tmp_path, sequence_length=100)


def test_empty_documents_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train part of .* must hold tokens, got 2 empty documents"):
        _train(write_corpus(tmp_path / "a", [[], []]), 1, tmp_path)


def test_mock_data_needs_no_files_and_fits_the_vocabulary() -> None:
    """The same samples on every rank and run; each part is there."""
    tokenizer = build_tokenizer(TokenizerConfig())
    settings = config(tokenizer=tokenizer, sequence_length=64)
    assert settings.mock
    first, second = (build([50, 5, 5], settings, MockGPTDataset) for _ in range(2))
    for part, again, size in zip(first, second, (50, 5, 5), strict=True):
        assert len(part) >= size
        assert texts(part, 5) == texts(again, 5)
        assert max(max(text) for text in texts(part, 50)) < tokenizer.vocab_size
    other = build([50, 5, 5], config(tokenizer=tokenizer, sequence_length=64, random_seed=1), MockGPTDataset)
    assert texts(other[0], 5) != texts(first[0], 5)


def test_mock_documents_are_megatrons() -> None:
    """Lengths from numpy's generator with seed 0, tokens that count from 1, end of document."""
    corpus = MockGPTDataset.build_low_level_dataset(
        None, config(tokenizer=build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=8192)))
    )
    lengths = numpy.random.default_rng(seed=0).integers(low=1, high=4096, size=100000, dtype=numpy.int32)
    assert numpy.array_equal(corpus.sequence_lengths, lengths)
    length = int(lengths[7])
    assert corpus[7].tolist() == [*range(1, length), 8191]
    assert corpus.get(7, offset=3, length=2).tolist() == [4, 5]
    assert corpus.get(7, offset=length - 1).tolist() == [8191]


BLEND = (["a"], None)
FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"sequence_length": 0}, "sequence_length must be positive, got 0"),
    ({"num_dataset_builder_threads": 0}, "num_dataset_builder_threads must be positive, got 0"),
    ({"mid_level_dataset_surplus": -0.1}, "mid_level_dataset_surplus must not be negative, got -0.1"),
    ({"blend": BLEND, "blend_per_split": [BLEND, None, None]}, "blend and blend_per_split exclude each other"),
    ({"blend_per_split": [BLEND, None, None], "split": "1,1,1"}, "must be None with blend_per_split, got '1,1,1'"),
    ({"blend_per_split": [BLEND, None]}, r"must have 3 entries .*, got 2"),
    ({"blend": BLEND}, "split must be given with blend"),
    ({"blend": ([], None), "split": "1,1,1"}, "got an empty list of prefixes"),
    ({"blend": (["a"], [0.5, 0.5]), "split": "1,1,1"}, "one weight for each prefix"),
    ({"blend_per_split": [(["a"], [1.0, 2.0]), None, None]}, "one weight for each prefix"),
    ({"blend": BLEND, "split": "x"}, "split must be one to 3 numbers"),
    ({"tokenizer": None}, "tokenizer must be given"),
    ({"reset_position_ids": None}, "reset_position_ids must be True or False"),
    ({"reset_attention_mask": None}, "reset_attention_mask must be True or False"),
    ({"eod_mask_loss": None}, "eod_mask_loss must be True or False"),
    ({"reset_attention_mask": True}, "reset_attention_mask needs create_attention_mask=True"),
]


@pytest.mark.parametrize(("settings", "message"), FAULTS, ids=[message[:40] for _, message in FAULTS])
def test_settings_that_contradict_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**settings)


NOT_SERVED: list[dict[str, Any]] = [
    {"fast_cache_load": True},
    {"defer_npy_index_mmap": True},
    {"object_storage_cache_path": "s3"},
    {"sequences_per_dataset": {"a": (1, 2)}},
    {"token_dtype_code": 4},
    {"context_parallel_size": 2},
    {"hybrid_context_parallel": True},
    {"inter_document_masking": True},
]


@pytest.mark.parametrize("settings", NOT_SERVED, ids=lambda settings: next(iter(settings)))
def test_fields_that_are_not_served_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"{next(iter(settings))}.* (is|are) not served"):
        config(**settings)


def test_number_of_ranks_does_not_change_the_samples(tmp_path: Path) -> None:
    """Megatron's launch code passes these fields on; a global batch holds the same samples whatever they are."""
    prefix = write_corpus(tmp_path / "a", [list(range(1, 200))])
    alone = _train(prefix, 8, tmp_path / "1")
    among_many = _train(prefix, 8, tmp_path / "2", data_parallel_size=64, sequence_parallel_size=8)
    assert texts(alone) == texts(among_many)


def test_unknown_fields_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="renormalize_blend_weights"):
        GPTDatasetConfig(random_seed=1, sequence_length=2, renormalize_blend_weights=True)  # type: ignore[call-arg]


def test_dataset_can_be_built_by_itself(tmp_path: Path) -> None:
    """The constructor is Megatron-Core's: corpus, prefix, documents, samples, part, settings."""
    from megatron.core.datasets.split import Split

    prefix = write_corpus(tmp_path / "a", [[1] * 30, [2] * 30])
    settings = config(blend=([prefix], None), split="1,0,0", path_to_cache=str(tmp_path / "cache"))
    corpus = GPTDataset.build_low_level_dataset(prefix, settings)
    dataset = GPTDataset(corpus, prefix, numpy.array([1], dtype=numpy.int32), 1, Split.train, settings)
    assert texts(dataset) == [[2] * 17]
    assert GPTDataset.numel_low_level_dataset(corpus) == 2
