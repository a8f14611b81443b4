"""Samples equal those that Megatron-LM drew from corpora that it wrote."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.split import documents_of, normalize, parse_and_normalize_split
from tests.support import naive_samples as naive
from tests.support.corpora import EXPECTED, FIXTURES, PARTS, build, config, texts, write_corpus


@pytest.mark.parametrize("name", EXPECTED["corpora"])
@pytest.mark.parametrize("mmap", [True, False])
def test_corpora_of_megatron_are_read_as_they_are(name: str, mmap: bool) -> None:
    corpus = IndexedDataset(str(FIXTURES / name), mmap=mmap)
    expected = EXPECTED["corpora"][name]
    assert [corpus[number].tolist() for number in range(len(corpus))] == expected["documents"]
    assert corpus.index.dtype.__name__ == expected["dtype"]
    assert corpus.document_indices.tolist() == list(range(len(expected["documents"]) + 1))


@pytest.mark.parametrize("name", EXPECTED["corpora"])
def test_corpora_of_megatron_are_written_byte_for_byte(name: str, tmp_path: Path) -> None:
    expected = EXPECTED["corpora"][name]
    prefix = write_corpus(tmp_path / name, expected["documents"], getattr(numpy, expected["dtype"]))
    for ending in (".bin", ".idx"):
        assert Path(prefix + ending).read_bytes() == (FIXTURES / (name + ending)).read_bytes()


@pytest.mark.parametrize("case", EXPECTED["cases"], ids=lambda case: case["label"])
@pytest.mark.parametrize("mmap", [True, False])
def test_samples_of_megatron_are_drawn(case: dict[str, Any], mmap: bool, tmp_path: Path) -> None:
    """Twice: from newly built indices, and from cached ones."""
    prefixes, weights = case["blend"]
    case_config = config(
        random_seed=case["seed"],
        sequence_length=case["sequence_length"],
        blend=([str(FIXTURES / prefix) for prefix in prefixes], weights),
        split=case["split"],
        path_to_cache=str(tmp_path),
        mmap_bin_files=mmap,
    )
    for _ in range(2):
        for part, dataset in zip(PARTS, build(case["sizes"], case_config), strict=True):
            expected = case["samples"][part]
            assert len(dataset) == expected["length"]
            assert texts(dataset, len(expected["first"])) == expected["first"]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    length=st.integers(2, 90),
    sizes=st.lists(st.none() | st.integers(0, 150), min_size=3, max_size=3),
    split=st.sampled_from(["969,30,1", "99,1,0", "1,1,1", "80,15,5", "100", "0,0,1", "33.3,33.3,33.4"]),
    name=st.sampled_from(["small_u16", "small_i32"]),
)
def test_other_settings_draw_what_the_loops_draw(
    seed: int, length: int, sizes: list[int | None], split: str, name: str
) -> None:
    """One corpus: any seed, length, sizes and split, sequences longer than documents and many epochs included."""
    documents = EXPECTED["corpora"][name]["documents"]
    bookends = [0.0]
    for share in parse_and_normalize_split(split):
        bookends.append(bookends[-1] + share)
    case_config = config(
        random_seed=seed, sequence_length=length, blend=([str(FIXTURES / name)], None), split=split, path_to_cache=None
    )
    datasets = _build_in_memory(sizes, case_config)
    for start, end, size, dataset in zip(bookends[:-1], bookends[1:], sizes, datasets, strict=True):
        part = list(range(round(start * len(documents)), round(end * len(documents))))
        if start >= end or not part:
            assert dataset is None
        else:
            assert texts(dataset) == naive.draw(documents, part, num_samples=size, length=length, seed=seed)


def _build_in_memory(sizes: list[int | None], case_config: Any) -> list[Any]:
    """Build without touching the default cache beside the fixtures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "megatron.core.datasets.index_cache.IndexCache.load_or_build", lambda self, build_indices: build_indices()
        )
        return build(sizes, case_config)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    weights=st.none() | st.lists(st.floats(0.05, 50.0), min_size=3, max_size=3),
    sizes=st.lists(st.integers(1, 200), min_size=3, max_size=3) | st.just([None, None, None]),
    length=st.integers(2, 40),
)
def test_other_blends_draw_what_the_loops_draw(
    seed: int, weights: list[float] | None, sizes: list[int | None], length: int
) -> None:
    """Weights and no weights, sizes and no sizes (a weighted blend must have sizes)."""
    names = ["small_u16", "small_i32", "small_u16"]
    assume(weights is None or None not in sizes)
    documents = [EXPECTED["corpora"][name]["documents"] for name in names]
    case_config = config(
        random_seed=seed,
        sequence_length=length,
        blend=([str(FIXTURES / name) for name in names], weights),
        split="60,20,20",
    )
    bookends = [(0.0, 0.6), (0.6, 0.8), (0.8, 1.0)]
    for (start, end), size, dataset in zip(bookends, sizes, _build_in_memory(sizes, case_config), strict=True):
        drawn = []
        for corpus, number in zip(documents, range(3), strict=True):
            part = documents_of((start, end), len(corpus)).tolist()
            wanted = None if weights is None else _surplus(normalize(weights)[number], size)
            drawn.append(naive.draw(corpus, part, num_samples=wanted, length=length, seed=seed))
        assert isinstance(dataset, BlendedDataset)
        expected = [drawn[which][sample] for which, sample in _blend(drawn, weights, size)]
        assert texts(dataset) == expected


def _surplus(share: float, size: int | None) -> int:
    assert size is not None
    return math.ceil(math.ceil(size * share) * 1.005)


def _blend(drawn: list[Any], weights: list[float] | None, size: int | None) -> list[tuple[int, int]]:
    lengths = [len(samples) for samples in drawn]
    if weights is None and size is None:
        return naive.blend([length / float(sum(lengths)) for length in lengths], sum(lengths), lengths)
    assert size is not None
    if weights is None:
        return naive.blend(normalize(lengths), min(size, sum(lengths)))
    total = sum(math.ceil(size * share) for share in normalize(weights))
    return naive.blend(normalize(normalize(weights)), total)


def test_no_cache_is_left_beside_the_fixtures() -> None:
    """The tests above must not fill the repository."""
    assert sorted(path.name for path in FIXTURES.iterdir() if path.is_dir()) == []
