"""Folders of checkpoints are complete or absent, whenever a process is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.core.distributed.fsdp.checkpoint import folder as checkpoint_folder
from megatron.core.distributed.fsdp.checkpoint.folder import MARKER, OWNER, begin_folder, find_folder


class KilledError(BaseException):
    """In place of SIGKILL: nothing catches it."""


def write(path: Path, content: str) -> None:
    folder = begin_folder(path)
    fill(folder.beside, content)
    folder.publish()


def fill(folder: Path, content: str) -> None:
    (folder / "__0_0.distcp").write_text(content)
    (folder / MARKER).write_text("")


def content(path: Path) -> str:
    return (find_folder(path) / "__0_0.distcp").read_text()


def test_a_published_folder_replaces_the_one_before_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "latest"
    for text in ("first", "second"):
        write(path, text)
        assert content(path) == text
        assert [entry.name for entry in path.parent.iterdir()] == ["latest"]


@pytest.mark.parametrize("existing", [False, True])
def test_a_kill_at_any_call_of_a_save_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: bool
) -> None:
    """Kill at each call that changes the disk in turn; the next save then cleans up."""
    calls = 0
    kill_at = -1

    def killable(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == kill_at:
                raise KilledError
            return function(*args, **kwargs)

        return call

    for module, name in ((os, "rename"), (shutil, "rmtree"), (os, "fsync"), (Path, "mkdir")):
        monkeypatch.setattr(module, name, killable(getattr(module, name)))
    try_lock, locks = checkpoint_folder._try_lock, []
    monkeypatch.setattr(checkpoint_folder, "_try_lock", lambda fd: locks.append(os.dup(fd)) or try_lock(fd))
    found = set()
    for attempt in range(1, 40):
        path = tmp_path / f"{attempt}" / "ck[1]*"
        kill_at = -1
        if existing:
            write(path, "old")
        calls, kill_at = 0, attempt
        try:
            write(path, "new")
        except KilledError:
            pass
        else:
            break
        kill_at = -1
        for lock in locks:  # the system does this for a killed process
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)
        locks.clear()
        if existing or path.exists():
            found.add(content(path))
        write(path, "next")
        assert content(path) == "next"
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    else:
        raise AssertionError("the save never came to its end")
    assert attempt > 4
    assert found == ({"old", "new"} if existing else {"new"})


@pytest.mark.parametrize("next_step", ["start", "save"])
def test_a_kill_at_any_call_of_a_deletion_leaves_a_checkpoint_or_nothing_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, next_step: str
) -> None:
    """The next start of a run, or the next save, deletes the rest."""
    left = -1

    def killable(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                raise KilledError
            return function(*args, **kwargs)

        return call

    for module, name in ((os, "rename"), (os, "replace"), (Path, "unlink"), (Path, "rmdir")):
        monkeypatch.setattr(module, name, killable(getattr(module, name)))
    kept = set()
    for attempt in range(1, 40):
        folder, left = tmp_path / f"{attempt}", -1
        path = folder / "iter_0000002"
        write(path, "old")
        left = attempt
        try:
            checkpoint_folder.delete_folder(checkpoint_folder.begin_deletion(path))
        except KilledError:
            left = -1
        if left > 0:
            break
        kept.add(path.exists())
        assert not path.exists() or content(path) == "old"
        if next_step == "start":
            checkpoint_folder.delete_leftovers(folder)
        else:
            write(folder / "iter_0000004", "new")
        assert {entry.name for entry in folder.iterdir()} <= {"iter_0000002" if path.exists() else "", "iter_0000004"}
        assert not path.exists() or content(path) == "old"
    else:
        raise AssertionError("the deletion never came to its end")
    assert kept == {True, False} and list(folder.iterdir()) == []


def test_what_no_save_wrote_is_not_deleted(tmp_path: Path) -> None:
    write(tmp_path / "annotated", "old")
    (tmp_path / "annotated" / "notes.txt").touch()
    (tmp_path / "link").symlink_to("annotated")
    (tmp_path / "work" / "thesis").mkdir(parents=True)
    for name in ("annotated", "link", "work"):
        with pytest.raises(FileExistsError, match=name):
            checkpoint_folder.begin_deletion(tmp_path / name)
    marked = ".iter_0000002.deleted-0123456789ab"
    (tmp_path / marked).mkdir()
    (tmp_path / marked / "__0_0.distcp").touch()
    (tmp_path / f"{marked[:-1]}c").symlink_to("annotated")
    (tmp_path / f"{marked[:-1]}d").mkdir()
    names = {entry.name for entry in tmp_path.iterdir()}
    checkpoint_folder.delete_leftovers(tmp_path)
    write(tmp_path / "other", "new")
    assert {entry.name for entry in tmp_path.iterdir()} == names | {"other"}
    assert (tmp_path / marked / "__0_0.distcp").exists() and content(tmp_path / "annotated") == "old"


def test_leftovers_of_other_paths_in_the_folder_are_cleaned_unless_somebody_writes_them(tmp_path: Path) -> None:
    dead = begin_folder(tmp_path / "iter_10")
    fill(dead.beside, "half")
    os.close(dead.lock)  # as the system does for a killed process
    living = begin_folder(tmp_path / "iter_20")
    same_path = begin_folder(tmp_path / "iter_30")
    (tmp_path / "iter_10.tmp-notes").mkdir()
    write(tmp_path / "iter_30", "new")
    names = {entry.name for entry in tmp_path.iterdir()}
    assert names == {"iter_10.tmp-notes", "iter_30", living.beside.name, same_path.beside.name}
    fill(living.beside, "slow")
    living.publish()
    assert content(tmp_path / "iter_20") == "slow"


def test_all_that_is_left_of_another_checkpoint_is_not_cleaned(tmp_path: Path) -> None:
    """A kill between the two renames leaves a checkpoint beside its name; saves to other paths must not delete it."""
    write(tmp_path / "a", "only")
    os.rename(tmp_path / "a", tmp_path / "a.old-0123456789ab")
    write(tmp_path / "b", "other")
    assert content(tmp_path / "a") == "only"


def test_without_file_locks_only_leftovers_of_the_same_path_are_cleaned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    own, other = begin_folder(tmp_path / "a"), begin_folder(tmp_path / "b")
    write(tmp_path / "a", "new")
    assert not own.beside.exists()
    assert other.beside.exists()


def test_discarding_after_publishing_keeps_what_was_published(tmp_path: Path) -> None:
    folder = begin_folder(tmp_path / "a")
    fill(folder.beside, "new")
    folder.publish()
    folder.discard()
    assert content(tmp_path / "a") == "new"


def test_a_folder_without_the_marker_is_never_published(tmp_path: Path) -> None:
    folder = begin_folder(tmp_path / "a")
    with pytest.raises(RuntimeError, match=r"must hold \.metadata"):
        folder.publish()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "got nothing there"),
        (lambda path: path.mkdir(), r"no \.metadata in it \(it holds nothing\)"),
        (
            lambda path: (path.mkdir(), (path / "__0_0.distcp").touch()),
            r"holds \['__0_0.distcp'\]\).*its save did not finish",
        ),
        (lambda path: path.touch(), "it holds a file"),
    ],
)
def test_what_is_no_complete_checkpoint_is_refused_with_what_is_missing(
    tmp_path: Path, make: Any, message: str
) -> None:
    make(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match=message):
        find_folder(tmp_path / "a")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("../thesis")])
def test_the_name_of_the_owner_may_be_anything(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """A named pipe is not waited for, and what a link leads to is not changed."""
    (tmp_path / "thesis").write_text("written")
    write(tmp_path / "a", "old")
    stranger = tmp_path / "b.old-0123456789ab"
    stranger.mkdir()
    for folder in (tmp_path / "a", stranger):
        (folder / OWNER).unlink(missing_ok=True)
        make(folder / OWNER)
    write(tmp_path / "a", "new")
    assert content(tmp_path / "a") == "new" and stranger.exists() and (tmp_path / "thesis").read_text() == "written"


@pytest.mark.parametrize("marker", [False, True])
def test_a_folder_with_other_things_in_it_is_not_replaced(tmp_path: Path, marker: bool) -> None:
    """A wrong path must not delete a user's files."""
    work = tmp_path / "work"
    (work / "thesis").mkdir(parents=True)
    if marker:
        (work / MARKER).touch()
    for name in (OWNER, MARKER, "__0_0.distcp"):
        (tmp_path / name / name / "thesis").mkdir(parents=True)
        with pytest.raises(FileExistsError, match=name):
            begin_folder(tmp_path / name)
        shutil.rmtree(tmp_path / name)
    with pytest.raises(FileExistsError, match="thesis"):
        begin_folder(work)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError, match="cannot replace the file"):
        begin_folder(tmp_path / "file")
    assert (work / "thesis").exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "work"]
