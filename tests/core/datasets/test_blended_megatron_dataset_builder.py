"""The datasets that a configuration builds."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron.core.datasets.blend import get_blend_from_list
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from tests.support.corpora import build, config, texts, write_corpus
from tests.support.launch import run_ranks


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Write three corpora whose tokens identify the corpus."""
    return [
        write_corpus(tmp_path / name, [[number] * 19 for _ in range(size)])
        for name, number, size in (("a", 1, 20), ("b", 2, 30), ("c", 3, 50))
    ]


def _shares(dataset: Any) -> list[int]:
    drawn = [text[0] for text in texts(dataset)]
    return [drawn.count(number) for number in (1, 2, 3)]


def test_weights_decide_the_shares(prefixes: list[str], tmp_path: Path) -> None:
    settings = config(blend=(prefixes, [5.0, 3.0, 2.0]), split="80,10,10", path_to_cache=str(tmp_path))
    train, valid, test = build([1000, 10, 0], settings)
    assert _shares(train) == [500, 300, 200]
    assert (len(train), len(valid), len(test)) == (1000, 10, 0)
    assert {type(dataset) for dataset in (train, valid, test)} == {BlendedDataset}
    assert train[0]["dataset_id"] == train.dataset_index[0]


def test_without_weights_the_sizes_decide(prefixes: list[str], tmp_path: Path) -> None:
    """Without a size all samples once; with a size in proportion, at most all of them."""
    settings = config(blend=(prefixes, None), split="100,0,0", path_to_cache=str(tmp_path))
    everything = build([None, 0, 0], settings)[0]
    shares = _shares(everything)
    assert len(everything) == sum(shares) == sum(len(dataset) for dataset in everything.datasets)
    assert _shares(build([10**6, 0, 0], settings)[0]) == shares
    assert len(build([20, 0, 0], settings)[0]) == 20


def test_one_weighted_corpus_is_a_blend_with_surplus(prefixes: list[str], tmp_path: Path) -> None:
    """As in Megatron: the surplus may take another epoch, so the samples differ from those without weights."""
    settings = config(blend=(prefixes[:1], [1.0]), split="100,0,0", path_to_cache=str(tmp_path))
    train = build([23, 0, 0], settings)[0]
    assert isinstance(train, BlendedDataset) and len(train) == 23
    assert train.datasets[0].num_samples == 24


def test_parts_with_their_own_blends(prefixes: list[str], tmp_path: Path) -> None:
    per_split = [(prefixes[:2], [1.0, 3.0]), (prefixes[2:], [7.0]), None]
    settings = config(blend_per_split=per_split, path_to_cache=str(tmp_path))
    train, valid, test = build([40, 8, None], settings)
    assert _shares(train) == [10, 30, 0]
    assert isinstance(valid, GPTDataset) and _shares(valid)[2] == len(valid) >= 8
    assert test is None
    unweighted = config(blend_per_split=[None, (prefixes, None), None], path_to_cache=str(tmp_path))
    assert [dataset is None for dataset in build([5, None, 5], unweighted)] == [True, False, True]


def test_part_without_documents_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefix = write_corpus(tmp_path / "a", [[1] * 40] * 10)
    with caplog.at_level(logging.WARNING):
        train, valid, test = build(
            [5, 5, 5], config(blend=([prefix], None), split="969,30,1", path_to_cache=str(tmp_path))
        )
    assert train is not None and valid is None and test is None
    assert "the valid part of" in caplog.text and "the test part of" in caplog.text
    assert build([5, None, 5], config(blend=([prefix], None), split="99,1,0", path_to_cache=str(tmp_path)))[2] is None


def test_weighted_corpus_without_documents_in_a_part_is_named(prefixes: list[str], tmp_path: Path) -> None:
    tiny = write_corpus(tmp_path / "tiny", [[9] * 40] * 2)
    settings = config(blend=([prefixes[0], tiny], [0.5, 0.5]), split="80,10,10", path_to_cache=str(tmp_path))
    with pytest.raises(
        ValueError, match=f"must have documents in the valid part, got none in {re.escape(tiny)}; change"
    ):
        build([5, 5, 0], settings)
    assert build([5, 0, 0], settings)[1] is None
    unweighted = config(blend=([prefixes[0], tiny], None), split="80,10,10", path_to_cache=str(tmp_path))
    assert len(build([5, 2, 0], unweighted)[1].datasets) == 1


def test_empty_corpus_is_named(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [])
    with pytest.raises(ValueError, match=re.escape(prefix) + " must hold documents, got an empty corpus"):
        build([1, 0, 0], config(blend=([prefix], None), split="1,0,0"))


def test_missing_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.idx must exist"):
        build([1, 0, 0], config(blend=([str(tmp_path / "nowhere")], None), split="1,0,0"))


@pytest.mark.parametrize("threads", [1, 4])
def test_threads_do_not_change_the_samples(threads: int, prefixes: list[str], tmp_path: Path) -> None:
    def drawn(num_threads: int) -> list[list[int]]:
        settings = config(
            blend=(prefixes, [1.0, 1.0, 1.0]),
            split="100,0,0",
            path_to_cache=str(tmp_path / str(num_threads)),
            num_dataset_builder_threads=num_threads,
        )
        return texts(build([30, 0, 0], settings)[0])

    assert drawn(threads) == drawn(1)


def test_weights_need_sizes(prefixes: list[str]) -> None:
    with pytest.raises(ValueError, match="the train blend has weights and must have a size, got None"):
        build([None, 1, 1], config(blend=(prefixes, [1.0, 1.0, 1.0]), split="1,1,1"))
    with pytest.raises(ValueError, match="sizes must be 3 numbers"):
        build([1, 1], config(blend=(prefixes, None), split="1,1,1"))


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_weights_must_be_positive(prefixes: list[str], tmp_path: Path, weight: float) -> None:
    """On the command line too, before anything is read; with one message for all."""
    rule = (
        rf"the weights of a blend must be positive and finite, got \[1.0, {weight}, 1.0\]; leave out unwanted corpora"
    )
    settings = config(blend=(prefixes, [1.0, weight, 1.0]), split="1,0,0", path_to_cache=str(tmp_path))
    with pytest.raises(ValueError, match=rule):
        build([5, 0, 0], settings)
    with pytest.raises(ValueError, match=rule):
        get_blend_from_list(["1", "a", str(weight), "b", "1", "c"])
    assert list(tmp_path.glob("*.npy")) == []


def test_blend_that_draws_too_much_is_told_what_to_raise(prefixes: list[str], tmp_path: Path) -> None:
    """A corpus that is smaller than its share would fail in the middle of training."""
    settings = config(blend=(prefixes, None), split="100,0,0", path_to_cache=str(tmp_path))
    part = build([None, 0, 0], settings)[0].datasets
    with pytest.raises(ValueError, match="increase mid_level_dataset_surplus"):
        BlendedDataset(part, [1.0, 1.0, 1.0], 90, settings)
    with pytest.raises(ValueError, match="one weight for each dataset, got 2 for 3"):
        BlendedDataset(part, [1.0, 1.0], 9, settings)
    with pytest.raises(ValueError, match="must be integers, got"):
        BlendedDataset(part, [1.5, 1.0, 1.0], None, settings)


def _build_on_rank_0_only(prefix: str, cache: str) -> list[bool]:
    settings = config(blend=([prefix], None), split="1,1,1", path_to_cache=cache)
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [3, 3, 3], lambda: dist.get_rank() == 0, settings)
    return [dataset is not None for dataset in builder.build()]


def test_ranks_that_want_no_datasets_get_none(prefixes: list[str], tmp_path: Path) -> None:
    assert run_ranks(2, _build_on_rank_0_only, prefixes[0], str(tmp_path / "cache")) == [[True] * 3, [False] * 3]


def test_validation_sets_are_kept_apart_and_whole(tmp_path: Path) -> None:
    """As in Megatron-Core: a list for validation, of one epoch each; the other parts are blended."""
    prefixes = [write_corpus(tmp_path / name, [list(range(1, length))]) for name, length in (("a", 70), ("b", 50))]
    apart = config(
        blend_per_split=[(prefixes, None), (prefixes, None), None],
        multiple_validation_sets=True,
        full_validation=True,
    )
    train, valid, test = build([4, None, 0], apart)
    assert [len(dataset) for dataset in valid] == [4, 3] and len(train) == 4 and test is None
    with pytest.raises(ValueError, match="size of the validation data must be None with full_validation, got 8"):
        build([4, 8, 0], apart)
    (alone,) = [
        part for part in build([0, None, 0], config(blend_per_split=[None, ([prefixes[0]], [0.3]), None])) if part
    ]
    assert len(alone) == 4, "one corpus needs no weight"
