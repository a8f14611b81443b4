"""``progress.txt`` is for people: whatever has become of it, a run starts, and what can be read of it counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from megatron.training.telemetry.progress_log import FILE_NAME, ProgressLog


def _start(folder: Path, consumed_samples: int = 0) -> ProgressLog:
    return ProgressLog(
        folder, num_ranks=2, flops_per_sample=10**12, tokens_per_sample=8, consumed_samples=consumed_samples
    )


def _two_jobs(folder: Path) -> bytes:
    first = _start(folder)
    first.saved(1, 8, is_async=False)
    first.saved(2, 16, is_async=True)
    first.async_saved(2)
    _start(folder, 16)
    return (folder / FILE_NAME).read_bytes()


def test_a_file_that_is_cut_at_any_byte_is_read_and_goes_on_in_a_line_of_its_own(tmp_path: Path) -> None:
    whole = _two_jobs(tmp_path)
    for length in range(len(whole) + 1):
        (tmp_path / FILE_NAME).write_bytes(whole[:length])
        _start(tmp_path).saved(3, 24, is_async=False)
        lines = (tmp_path / FILE_NAME).read_text().splitlines()
        assert [line.split("\t")[3] for line in lines[-2:]] == ["Starting job", "Saved checkpoint"]


_DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "no text": lambda content: b"\xff\x00\xfe" * 50,
    "no number": lambda content: content.replace(b"operations: ", b"operations; ", 1),
    "no time": lambda content: content.replace(b"20", b"2x", 1),
    "zeros of a crash": lambda content: content + b"\0" * 4096,
}


@pytest.mark.parametrize("damage", _DAMAGES)
def test_damaged_lines_are_passed_over_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    content = _two_jobs(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(_DAMAGES[damage](content))
    capsys.readouterr()
    _start(tmp_path).saved(3, 24, is_async=False)
    text = capsys.readouterr().out
    assert text.count("WARNING") == 1 and f"{tmp_path / FILE_NAME} has 1 lines that are not of its format" in text


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/full")])
def test_what_is_no_file_is_reported_once_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], object]
) -> None:
    """A named pipe, a folder, a device: opening the first would wait for somebody who reads it."""
    make(tmp_path / FILE_NAME)
    before = (tmp_path / FILE_NAME).lstat()
    log = _start(tmp_path)
    log.saved(1, 8, is_async=False)
    text = capsys.readouterr().out
    assert text.count("WARNING") == 1 and "must be a regular file, got" in text
    assert (tmp_path / FILE_NAME).lstat().st_mode == before.st_mode


def test_the_throughput_counts_from_the_first_job_of_this_size(tmp_path: Path) -> None:
    _two_jobs(tmp_path)
    log = _start(tmp_path, 16)
    first = (tmp_path / FILE_NAME).read_text().split("\t", 1)[0]
    assert log._first_start == datetime.strptime(first, "%Y-%m-%d %H:%M:%S") and log._flops_at_first_start == 0.0
    other = ProgressLog(tmp_path, num_ranks=4, flops_per_sample=10**12, tokens_per_sample=8, consumed_samples=16)
    assert other._flops_at_first_start == 16e12
