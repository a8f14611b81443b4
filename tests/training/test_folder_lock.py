"""One run at a time saves in a folder; the lock of a run that is over keeps nobody out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.training import folder_lock
from megatron.training.folder_lock import LOCK, FolderLock, Owner, read_owner
from tests.core.test_regular_file import KINDS


def _owner() -> Owner:
    return replace(folder_lock._this_process(), since="yesterday")


def _write(folder: Path, owner: Owner, *, age_s: float = 0.0) -> Path:
    path = folder / LOCK
    path.write_text(json.dumps(asdict(owner)))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def _elsewhere() -> Owner:
    return replace(_owner(), host="elsewhere", machine="another")


def test_a_lock_keeps_others_out_until_its_release(tmp_path: Path) -> None:
    lock = FolderLock.acquire(tmp_path)
    with pytest.raises(
        FileExistsError, match=rf"in use by process {os.getpid()} on host \S+ \(since .*\); end that run, or"
    ):
        FolderLock.acquire(tmp_path)
    lock.check()
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    FolderLock.acquire(tmp_path).release()


def test_one_of_many_gets_it(tmp_path: Path) -> None:
    def acquire(_: int) -> FolderLock | None:
        try:
            return FolderLock.acquire(tmp_path)
        except FileExistsError:
            return None

    with ThreadPoolExecutor(8) as pool:
        got = [lock for lock in pool.map(acquire, range(8)) if lock]
    assert len(got) == 1
    got[0].check()
    got[0].release()


@pytest.mark.parametrize("end", ["ended", "a zombie", "another of its number"])
def test_a_process_that_has_ended_keeps_nobody_out(tmp_path: Path, end: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = replace(_owner(), pid=process.pid, process_start=folder_lock._start_of(process.pid) or "")
    _write(tmp_path, owner)
    with pytest.raises(FileExistsError, match=f"process {process.pid} "):
        FolderLock.acquire(tmp_path)
    if end == "another of its number":
        _write(tmp_path, replace(owner, process_start="7"))
    else:
        process.kill()
        if end == "a zombie":
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        else:
            process.wait()
    said: list[str] = []
    lock = FolderLock.acquire(tmp_path, say=said.append)
    assert len(said) == 1 and "is taken over, since that process has ended" in said[0]
    lock.release()
    process.kill()
    process.communicate()


def test_an_earlier_start_of_the_job_keeps_nobody_out(tmp_path: Path) -> None:
    """It may have been on another host."""
    owner = _elsewhere()
    _write(tmp_path, owner)
    said: list[str] = []
    FolderLock.acquire(tmp_path, earlier=owner.token, say=said.append).release()
    assert "since it belongs to an earlier start of this job" in said[0]


def test_a_process_elsewhere_that_gives_signs_of_life_keeps_others_out(tmp_path: Path) -> None:
    path, said, refused = _write(tmp_path, _elsewhere(), age_s=4.0), list[str](), threading.Event()

    def beat() -> None:
        while not said and not refused.wait(0.01):
            pass
        while not refused.wait(0.2):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(FileExistsError, match=r"in use by process .* on host elsewhere"):
        FolderLock.acquire(tmp_path, say=said.append)
    refused.set()
    thread.join()
    assert len(said) == 1 and re.search(r"whose last sign of life is \d+ s old: waiting", said[0])
    assert [entry.name for entry in tmp_path.iterdir()] == [LOCK]


@pytest.mark.parametrize("age_s", [100.0, -100.0])
def test_a_process_elsewhere_without_signs_of_life_is_taken_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float
) -> None:
    """Also where its clock is ahead."""
    monkeypatch.setattr(folder_lock, "LOST_S", 1.0 if age_s < 0 else folder_lock.LOST_S)
    _write(tmp_path, _elsewhere(), age_s=age_s)
    said: list[str] = []
    FolderLock.acquire(tmp_path, say=said.append).release()
    assert "it has given no sign of life for" in said[-1] and "cannot be asked from here" in said[-1]


def test_a_file_that_names_no_owner_is_judged_by_its_age(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("{")
    os.utime(tmp_path / LOCK, (0, 0))
    FolderLock.acquire(tmp_path).release()
    assert read_owner(tmp_path / LOCK) is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_not_taken_for_a_lock(tmp_path: Path, kind: str) -> None:
    """A named pipe would be waited for, and a link to nothing is in the way of a lock that is not there."""
    KINDS[kind](tmp_path / LOCK)
    with pytest.raises(FileExistsError, match=f"{LOCK} must be a regular file, got {kind}.*; move it away"):
        FolderLock.acquire(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [LOCK]


@pytest.mark.parametrize("change", [{"pid": 10**30}, {"pid": "Infinity"}, {"since": json.loads("[" * 300 + "]" * 300)}])
def test_a_lock_of_damaged_values_is_judged_by_its_age(tmp_path: Path, change: dict[str, Any]) -> None:
    text = json.dumps({**asdict(_owner()), **change}).replace('"Infinity"', "Infinity")
    (tmp_path / LOCK).write_text(text)
    os.utime(tmp_path / LOCK, (0, 0))
    FolderLock.acquire(tmp_path).release()


def test_a_disk_that_is_full_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A truncated lock would look like the lock of an unknown process and remain."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:5]))
    with pytest.raises(OSError, match="No space left on device") as raised:
        FolderLock.acquire(tmp_path)
    assert not isinstance(raised.value, FileExistsError) and list(tmp_path.iterdir()) == []


def test_an_owner_gives_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.01)
    lock = FolderLock.acquire(tmp_path)
    begin, deadline = (tmp_path / LOCK).stat().st_mtime_ns, time.monotonic() + 60
    while (tmp_path / LOCK).stat().st_mtime_ns == begin:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lock.release()


def test_an_owner_that_was_taken_for_lost_is_told_before_it_saves(tmp_path: Path) -> None:
    """Its signs of life must not keep the lock of the other alive, nor its end remove it."""
    lock = FolderLock.acquire(tmp_path)
    beside = tmp_path / "beside"
    beside.write_text(json.dumps(asdict(_elsewhere())))
    os.replace(beside, tmp_path / LOCK)
    with pytest.raises(FileExistsError, match=r"in use by process .* on host elsewhere"):
        lock.check()
    lock.release()
    assert (tmp_path / LOCK).exists()


def test_a_lock_that_somebody_removed_is_missed(tmp_path: Path) -> None:
    lock = FolderLock.acquire(tmp_path)
    (tmp_path / LOCK).unlink()
    with pytest.raises(OSError, match=r"must keep its \.run-lock while a run saves there"):
        lock.check()
    lock.release()


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError("no hard links")

    monkeypatch.setattr(os, "link", link)
    lock = FolderLock.acquire(tmp_path)
    with pytest.raises(FileExistsError):
        FolderLock.acquire(tmp_path)
    lock.release()
    assert list(tmp_path.iterdir()) == []
