"""What differs between ranks is named at the start: settings, values and ranks."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from megatron.core.datasets.fingerprint import corpus_fingerprint, path_fingerprint
from megatron.training.arguments import Settings, parse_settings
from megatron.training.launch.same_settings import MAY_DIFFER, values_to_compare
from tests.support.tiny_run import SHARDED, TINY
from tests.training.launch.one_rank_differences import (
    DIFFERENCES,
    differing_corpora,
    differing_torch,
    faults_of,
    said_to_all,
)


def test_each_difference_of_one_rank_is_named_before_anything_is_allocated() -> None:
    """Training with them would go on to its end with wrong numbers, or abort in the communication library."""
    statuses = said_to_all()
    assert faults_of(statuses) == {}
    lr = [difference.flags for difference in DIFFERENCES].index("--lr 2e-2")
    assert statuses[0][lr][1].splitlines()[0] == (
        "pretrain_gpt.py: error: optimizer.lr must be the same on all ranks, got 0.01 on rank 0 and 0.02 on rank 1"
    )
    assert statuses[1][lr][1] == "", "it is said once"


def test_corpora_are_compared_by_what_they_hold() -> None:
    (status, words), other = differing_corpora()
    assert (status, other) == (2, (2, ""))
    assert "data.data_path must be the same on all ranks, got 1.0 (.idx of " in words
    assert "checkpoint" not in words and len(words.splitlines()) == 2


def test_an_index_is_compared_as_a_whole(tmp_path: Path) -> None:
    """Corpora of the same size whose documents have other lengths, where no sample of 4 KiB is taken."""
    for name in "ab":
        (tmp_path / f"{name}.bin").write_bytes(bytes(10))
        (tmp_path / f"{name}.idx").write_bytes(bytes(200_000))
    assert corpus_fingerprint(f"{tmp_path}/a") == corpus_fingerprint(f"{tmp_path}/b")
    with open(tmp_path / "b.idx", "r+b") as file:
        file.seek(5000)
        file.write(b"x")
    assert corpus_fingerprint(f"{tmp_path}/a") != corpus_fingerprint(f"{tmp_path}/b")
    for suffix in ("idx", "bin"):
        os.mkfifo(tmp_path / f"c.{suffix}")
    assert corpus_fingerprint(f"{tmp_path}/c") == "(no .idx, no .bin)", "a named pipe is not waited for"


def test_what_cannot_be_read_is_left_to_who_reads_it() -> None:
    """A name that is too long, or a missing permission, must not end the run with a traceback."""
    assert path_fingerprint(f"/tmp/{300 * 'x'}") == "a file that cannot be read (File name too long)"
    unreadable = "/proc/self/mem"  # the user who runs the tests may be able to read all other files
    assert path_fingerprint(unreadable) == "a file that cannot be read (Input/output error)"


def test_versions_of_torch_are_compared() -> None:
    assert "version of torch must be the same" in differing_torch()[0][1]


def _fields(config: Any, prefix: str = "") -> set[str]:
    names = set()
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        names |= _fields(value, f"{name}.") if dataclasses.is_dataclass(value) else {name}
    return names


@pytest.fixture(scope="module")
def settings() -> Settings:
    return parse_settings(f"{TINY} {SHARDED}".split(), world_size=2)


def test_every_setting_is_compared_but_a_short_list(settings: Settings) -> None:
    fields = {name for name in _fields(settings) if not name.endswith("init_method")}
    assert set(MAY_DIFFER) <= fields, "the list has no settings that are gone"
    assert fields - set(MAY_DIFFER) <= set(values_to_compare(settings))


def test_what_is_compared_is_the_same_text_in_any_process(settings: Settings) -> None:
    """No addresses of objects, whose text differs between processes."""
    assert not [text for text in values_to_compare(settings).values() if " at 0x" in text]
