"""Cached indices are used only when complete and undamaged, and built once per node."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest

from megatron.core.datasets.build_once import build_once_per_node
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.sample_indices import build_sample_indices
from tests.support.corpora import build, config, texts, write_corpus
from tests.support.launch import run_ranks

ARRAYS: dict[str, numpy.ndarray] = {
    "first": numpy.arange(1000, dtype=numpy.int32),
    "second": numpy.arange(6).reshape(2, 3),
}


def _cache(folder: Path) -> IndexCache:
    return IndexCache(str(folder), "stem", "what it was built from")


def _never_called() -> Any:
    raise AssertionError("the cache was not believed")


def _same(arrays: Any) -> bool:
    return all(numpy.array_equal(arrays[name], array) for name, array in ARRAYS.items())


def test_second_caller_reads_what_the_first_built(tmp_path: Path) -> None:
    assert _same(_cache(tmp_path / "new").load_or_build(lambda: ARRAYS))
    assert _same(_cache(tmp_path / "new").load_or_build(_never_called))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "stem-description.txt",
        "stem-first.npy",
        "stem-second.npy",
    ]


@pytest.mark.parametrize(
    "files", ["[]", "3", "null", '{"first": 3}', '{"first": [1, 2, 3]}', "[" * 100_000, '{"../first": [1, 2]}']
)
def test_descriptions_that_nobody_wrote_are_not_believed(files: str, tmp_path: Path) -> None:
    _cache(tmp_path).load_or_build(lambda: ARRAYS)
    text = f'{{"description": "what it was built from", "files": {files}}}'
    (tmp_path / "stem-description.txt").write_text(text)
    assert _same(_cache(tmp_path).load_or_build(lambda: ARRAYS))


def _flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["stem-first.npy", "stem-second.npy", "stem-description.txt"])
@pytest.mark.parametrize("damage", ["cut", "emptied", "flipped", "removed"])
def test_damaged_cache_is_built_again(name: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flipped bit is detected. A missing description is no damage: a killed builder leaves that."""
    _cache(tmp_path).load_or_build(lambda: ARRAYS)
    path = tmp_path / name
    {
        "cut": lambda: path.write_bytes(path.read_bytes()[:-3]),
        "emptied": lambda: path.write_bytes(b""),
        "flipped": lambda: _flip_last_byte(path),
        "removed": path.unlink,
    }[damage]()
    calls = []

    def build_again() -> Any:
        calls.append(1)
        return ARRAYS

    with caplog.at_level(logging.WARNING):
        assert _same(_cache(tmp_path).load_or_build(build_again))
    assert calls == [1]
    if (name, damage) != ("stem-description.txt", "removed"):
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "damaged" in caplog.text and str(tmp_path) in caplog.text
    assert _same(_cache(tmp_path).load_or_build(_never_called))


def test_another_description_is_not_used(tmp_path: Path) -> None:
    """Two descriptions with one hash must not be mistaken for each other."""
    _cache(tmp_path).load_or_build(lambda: {"first": numpy.zeros(1)})
    other = IndexCache(str(tmp_path), "stem", "something else")
    assert _same(other.load_or_build(lambda: ARRAYS))


KILLED_WRITER = """
import os, signal, sys
import numpy
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.sample_indices import build_sample_indices

folder, writes_before_kill = sys.argv[1], int(sys.argv[2])
replace, writes = os.replace, []

def dying_replace(source, target):
    if len(writes) == writes_before_kill:
        os.kill(os.getpid(), signal.SIGKILL)
    writes.append(target)
    replace(source, target)

os.replace = dying_replace
arrays = {"first": numpy.full(1000, 7, dtype=numpy.int32), "second": numpy.full((2, 3), 7)}
IndexCache(folder, "stem", "what it was built from").load_or_build(lambda: arrays)
"""


@pytest.mark.parametrize("writes_before_kill", [0, 1, 2])
def test_killed_builder_leaves_nothing_that_is_used(writes_before_kill: int, tmp_path: Path) -> None:
    """It is killed before each rename in turn, with other arrays, so that their use would be noticed."""
    command = [sys.executable, "-c", KILLED_WRITER, str(tmp_path), str(writes_before_kill)]
    died = subprocess.run(command, cwd=Path(__file__).parents[3], check=False)
    assert died.returncode == -signal.SIGKILL
    assert _same(_cache(tmp_path).load_or_build(lambda: ARRAYS))
    assert _same(_cache(tmp_path).load_or_build(_never_called))


def test_failed_write_leaves_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is an error that says what to do; where the folder is only a default, a warning."""

    def full_disk(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("numpy.save", full_disk)
    with pytest.raises(OSError, match=r"must be writable, got: no space left; give another folder as path_to_cache"):
        _cache(tmp_path).load_or_build(lambda: ARRAYS)
    optional = IndexCache(str(tmp_path), "stem", "", must_write=False)
    assert _same(optional.load_or_build(lambda: ARRAYS))
    assert list(tmp_path.iterdir()) == []


def _build_and_count(prefix: str, cache: str) -> tuple[int, list[list[int]]]:
    from megatron.core.datasets import gpt_dataset

    with patch.object(gpt_dataset, "build_sample_indices", wraps=build_sample_indices) as counted:
        train, _, _ = build([40, 0, 0], config(blend=([prefix], None), split="1,0,0", path_to_cache=cache))
    return counted.call_count, texts(train)


def test_local_rank_0_builds_and_the_others_read(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [[number] * 7 for number in range(1, 50)])
    (calls_0, texts_0), (calls_1, texts_1) = run_ranks(2, _build_and_count, prefix, str(tmp_path / "cache"))
    assert (calls_0, calls_1) == (1, 0)
    assert texts_0 == texts_1


def _build_as_two_nodes(prefix: str, cache: str) -> list[list[int]]:
    os.environ["LOCAL_RANK"] = "0"
    train, _, _ = build([40, 0, 0], config(blend=([prefix], None), split="1,0,0", path_to_cache=cache))
    return texts(train)


def test_nodes_that_share_a_folder_build_at_once(tmp_path: Path) -> None:
    """Each node's first rank builds; they write the same bytes over each other."""
    prefix = write_corpus(tmp_path / "a", [[number] * 7 for number in range(1, 50)])
    drawn = run_ranks(2, _build_as_two_nodes, prefix, str(tmp_path / "cache"))
    assert drawn[0] == drawn[1]
    assert not [path.name for path in (tmp_path / "cache").iterdir() if "partial" in path.name]


def _warnings_of_a_missing_part(prefix: str, cache: str) -> int:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign,assignment]
    logging.getLogger("megatron.core.datasets").addHandler(handler)
    build([1, 1, 1], config(blend=([prefix], None), split="99,1,0", path_to_cache=cache))
    return len(records)


def test_warnings_that_all_ranks_share_are_logged_once(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [[1] * 40] * 3)
    assert run_ranks(2, _warnings_of_a_missing_part, prefix, str(tmp_path / "cache")) == [1, 0]


def _fail_on_rank_0() -> str:
    def build_or_fail() -> None:
        if os.environ["LOCAL_RANK"] == "0":
            raise ValueError("the corpus is damaged")

    try:
        build_once_per_node(build_or_fail)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return "built"


def test_failure_of_the_builder_reaches_all_ranks() -> None:
    """The others would otherwise wait for it until the time-out."""
    assert run_ranks(2, _fail_on_rank_0) == ["ValueError: the corpus is damaged [rank 0]"] * 2


def test_rewritten_corpus_gets_new_indices(tmp_path: Path) -> None:
    """Same prefix, other documents: the cached indices of the old ones would point outside or draw nonsense."""
    cached = {"split": "1,0,0", "path_to_cache": str(tmp_path / "cache")}
    prefix = write_corpus(tmp_path / "a", [[1] * 20, [2] * 28])
    build([3, 0, 0], config(blend=([prefix], None), **cached))
    write_corpus(tmp_path / "a", [[3] * 28, [4] * 20])
    train, _, _ = build([3, 0, 0], config(blend=([prefix], None), **cached))
    fresh, _, _ = build([3, 0, 0], config(blend=([prefix], None), split="1,0,0", path_to_cache=str(tmp_path / "other")))
    assert texts(train) == texts(fresh)
    changed, _, _ = build([3, 0, 0], config(blend=([prefix], None), add_extra_token_to_sequence=False, **cached))
    assert changed.sample_index.tolist() != train.sample_index.tolist()


def test_cache_lies_beside_the_corpus_unless_told_otherwise(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [[1] * 50])
    build([3, 0, 0], config(blend=([prefix], None), split="1,0,0"))
    names = sorted(path.name for path in (tmp_path / "a" / "cache" / "GPTDataset_indices").iterdir())
    assert [name.split("-", 1)[1] for name in names] == [
        "GPTDataset-train-description.txt",
        "GPTDataset-train-document_index.npy",
        "GPTDataset-train-sample_index.npy",
        "GPTDataset-train-shuffle_index.npy",
    ]
