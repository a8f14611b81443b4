"""An index that the host's memory cannot hold is refused before it is built, and building takes little more than the index."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from megatron.core.datasets import blending, index_size, sample_indices
from megatron.core.datasets.blending import build_blending_indices
from megatron.core.datasets.gpt_dataset import MockGPTDataset
from megatron.core.datasets.index_size import available_memory, check_index_fits, index_nbytes
from megatron.core.datasets.sample_indices import build_sample_indices
from tests.support.corpora import build, config, write_corpus

LENGTHS = numpy.random.default_rng(0).integers(1, 100, 1000, dtype=numpy.int32)


def _indices() -> sample_indices.SampleIndices:
    return build_sample_indices(
        documents=numpy.arange(LENGTHS.size, dtype=numpy.int32),
        lengths=LENGTHS,
        num_samples=200_000,
        sequence_length=8,
        extra_tokens=1,
        drop_last_partial=True,
        seed=1,
    )


def _blend() -> tuple[numpy.ndarray, ...]:
    return build_blending_indices([0.7, 0.2, 0.1], 200_000)


def test_the_size_is_that_of_the_arrays() -> None:
    built = _indices()
    arrays = (built.document_index, built.sample_index, built.shuffle_index)
    expected = index_nbytes(built.shuffle_index.size, built.document_index.size)
    assert sum(array.nbytes for array in arrays) == expected + 8, "one start more than samples"
    assert index_nbytes(2**32, 2**31) == 4 * 2**31 + (16 + 8) * 2**32


@pytest.mark.parametrize("make", [_indices, _blend])
def test_building_takes_little_more_than_the_index(make: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_indices, "_PIECE", 2**10)
    monkeypatch.setattr(blending, "_PIECE", 2**10)
    make()  # what is imported on first use does not count
    tracemalloc.start()
    kept = make()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept is not None and peak < 1.5 * held


def test_an_index_that_does_not_fit_is_refused_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_corpus(tmp_path / "a", [list(range(1, 50))])
    monkeypatch.setattr(index_size, "available_memory", lambda: 10_000)
    monkeypatch.setattr("megatron.core.datasets.gpt_dataset.build_sample_indices", None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    needed = r"takes memory: 0\.0 GiB, got 0\.0 GiB; ask for fewer samples \(--train-samples"
    with pytest.raises(ValueError, match=rf"the index of 1,\d\d\d samples .* of the train part of {prefix}, {needed}"):
        build([1000, 0, 0], config(blend=([prefix], None), split="1,0,0"))
    with pytest.raises(
        ValueError, match=r"of the mock data, takes memory: 0\.0 GiB for each of 4 ranks.*--data-cache-path"
    ):
        build([1000, 0, 0], config(), MockGPTDataset)


def test_a_blend_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_corpus(tmp_path / "a", [list(range(1, 5000))])
    monkeypatch.setattr(index_size, "available_memory", lambda: 4_000)
    with pytest.raises(ValueError, match="the index of a train blend of 290 samples, takes memory"):
        build([290, 0, 0], config(blend=([prefix], [1.0]), split="1,0,0", path_to_cache=str(tmp_path / "cache")))


def test_memory_of_a_control_group_counts_without_what_is_cached_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (
        ("memory.max", "1000"),
        ("memory.current", "700"),
        ("memory.stat", "anon 1\ninactive_file 600\n"),
    ):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(index_size, "_CGROUP", tmp_path)
    assert available_memory() == 900
    check_index_fits("it", 900, is_shared=True)
    with pytest.raises(ValueError, match="it, takes memory"):
        check_index_fits("it", 901, is_shared=True)
    (tmp_path / "memory.max").write_text("max")
    assert (available_memory() or 0) > 1000
