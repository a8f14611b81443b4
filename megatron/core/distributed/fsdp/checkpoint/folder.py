"""A checkpoint's folder, complete or absent whenever a process is killed.

A save writes to ``<path>.tmp-<token>``, next to the final name. DCP's ``.metadata`` is written last, when all data is on
disk. Then an older checkpoint at ``path`` is renamed to ``<path>.old-<token>``, the new one to ``path``, and the older
one is deleted. Between the two renames there is nothing at ``path``; a reader then takes the folder next to it.

A checkpoint that is to be deleted is renamed to ``.<name>.deleted-<token>`` first, under which nothing loads it.

What killed saves and deletions left is deleted by the next save, if a file that the save wrote in it, ``.saved-by-megatron-fsdp``, has the
token of its name; and of such a folder only the files that a save writes. Whatever else is there stays.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from megatron.core.distributed.fsdp.checkpoint.description import DESCRIPTION
from megatron.core.regular_file import read_regular

MARKER = ".metadata"
DATA_SUFFIX = ".distcp"
OWNER = ".saved-by-megatron-fsdp"
# The last one is Megatron-LM's, in whose format a save can write.
_OWN_NAMES = (MARKER, f"{MARKER}.tmp", DESCRIPTION, OWNER, f"{OWNER}.tmp", "metadata.json")
_BESIDE = re.compile(r"(?P<name>.+)\.(?P<kind>tmp|old|deleted)-(?P<token>[0-9a-f]{12})")


@dataclass
class FolderInProgress:
    """A folder that is being written, locked for as long as the process that writes it lives.

    Args:
        path: the final name.
        beside: the name while it is written.
        lock: descriptor that holds the lock; -1 when it is released.
    """

    path: Path
    beside: Path
    lock: int

    def publish(self) -> None:
        """Rename the folder to its final name, in place of what is there, and synchronise that to disk.

        Its files, with the marker last, must be written and synchronised already. Ranks: one.
        """
        sync_folder(self.beside)
        if not is_complete(self.beside):
            raise RuntimeError(f"{self.beside} must hold {MARKER} before it can become {self.path}")
        token = _token_of(self.beside)
        old = self.path.with_name(f"{self.path.name}.old-{token}")
        if self.path.exists():
            _own(self.path, token)
            os.rename(self.path, old)
        os.rename(self.beside, self.path)
        sync_folder(self.path.parent)
        delete_folder(old)
        self._unlock()

    def discard(self) -> None:
        """Delete the folder, unless it is published."""
        delete_folder(self.beside)
        self._unlock()

    def _unlock(self) -> None:
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1


def begin_folder(path: Path) -> FolderInProgress:
    """Make an empty folder next to ``path``, and delete what killed saves left in the parent folder.

    Raises:
        FileExistsError: something that is not a checkpoint is at ``path`` and must not be deleted.

    Ranks: one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _recover(path)
    check_replaceable(path)
    _clean(path)
    token = secrets.token_hex(6)
    beside = path.with_name(f"{path.name}.tmp-{token}")
    beside.mkdir()
    _own(beside, token)
    lock = os.open(beside, os.O_RDONLY | os.O_DIRECTORY)
    _try_lock(lock)
    return FolderInProgress(path, beside, lock)


def begin_deletion(path: Path) -> Path:
    """Give a checkpoint a name under which nothing loads it, and the next save deletes it; return that name.

    Raises:
        FileExistsError: it is a link, no checkpoint, or holds what no save wrote.
        OSError: it could not be renamed.

    Ranks: one; does not block for the deletion itself, ``delete_folder``.
    """
    check_replaceable(path)
    if foreign := sorted(entry.name for entry in path.iterdir() if not _is_ours(entry)):
        raise FileExistsError(f"{path} must hold what a save wrote and nothing else, got {foreign[:5]} in it")
    token = _token_of_deletion(path.name, secrets.token_hex(3))
    doomed = path.with_name(f".{path.name}.deleted-{token}")
    _own(path, token)
    os.rename(path, doomed)
    return doomed


def delete_folder(folder: Path) -> None:
    """Remove what a save wrote in the folder, and the folder if nothing else is in it. Errors leave the rest for later. Ranks: one."""
    with contextlib.suppress(OSError):
        # First what makes it complete, last what makes it ours: if this is killed, the next save goes on.
        entries = sorted(filter(_is_ours, folder.iterdir()), key=lambda e: (e.name != MARKER, e.name == OWNER))
        for entry in entries:
            entry.unlink()
        folder.rmdir()


def delete_leftovers(parent: Path) -> None:
    """Delete what deletions that were killed left in a folder. Ranks: one."""
    for entry in sorted(parent.iterdir()):
        match = _BESIDE.fullmatch(entry.name)
        if match is not None and match["kind"] == "deleted" and (_is_owned(entry) or _is_emptied(entry, match)):
            delete_folder(entry)


def find_folder(path: Path) -> Path:
    """Return the folder of the complete checkpoint at ``path``, which a kill may have left next to it.

    Raises:
        FileNotFoundError: there is none, or it is incomplete.
    """
    if not path.exists():
        beside = _survivor(path)
        if beside is None:
            raise FileNotFoundError(f"a checkpoint must be at {path}, got nothing there; check the path")
        return beside
    if not is_complete(path):
        found = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else "a file"
        raise FileNotFoundError(
            f"{path} must be a complete checkpoint, got no {MARKER} in it (it holds {found or 'nothing'}): its save "
            "did not finish, or it has another format; load another one"
        )
    return path


def is_complete(folder: Path) -> bool:
    """Return whether the folder has the marker, which is written last."""
    return (folder / MARKER).is_file()


def sync_folder(folder: Path) -> None:
    """Synchronise the names in the folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _survivor(path: Path) -> Path | None:
    """Return what a kill between the two renames left of ``path``: the new checkpoint, else the old one."""
    for old in sorted(path.parent.glob(f"{_escaped(path.name)}.old-*")):
        new = old.with_name(old.name.replace(".old-", ".tmp-"))
        for folder in (new, old):
            if _BESIDE.fullmatch(folder.name) and is_complete(folder):
                return folder
    return None


def _recover(path: Path) -> None:
    if not path.exists():
        beside = _survivor(path)
        if beside is not None:
            os.rename(beside, path)
            sync_folder(path.parent)


def check_replaceable(path: Path) -> None:
    """Raise a FileExistsError if something that is not a checkpoint is at ``path``, which a save would replace."""
    if not path.exists():
        return
    if path.is_symlink() or not path.is_dir():
        kind = "symbolic link" if path.is_symlink() else "file"
        raise FileExistsError(f"a checkpoint cannot replace the {kind} {path}; choose another path")
    entries = list(path.iterdir())
    foreign = [entry.name for entry in entries if not _is_ours(entry)]
    if foreign and (not is_complete(path) or any(entry.is_dir() for entry in entries)):
        raise FileExistsError(
            f"{path} must be a checkpoint, an empty folder or not there, since it is replaced as a whole, got a folder "
            f"with {sorted(foreign)[:5]} and {max(len(foreign) - 5, 0)} others; choose another path"
        )


def _clean(path: Path) -> None:
    """Delete what killed saves left in the parent folder of ``path``, but not what a running save is writing."""
    delete_leftovers(path.parent)
    for entry in sorted(path.parent.iterdir()):
        match = _BESIDE.fullmatch(entry.name)
        if match is None or match["kind"] == "deleted" or not _is_owned(entry):
            continue
        final = path.with_name(match["name"])
        if not final.exists() and _survivor(final) is not None:
            continue  # the only copy of another checkpoint, whose own next save will rename it back
        if match["kind"] == "tmp":
            _remove_unless_locked(entry, is_own=match["name"] == path.name)
        else:
            delete_folder(entry)


def _token_of(folder: Path) -> str:
    return folder.name.rpartition("-")[2]


def _own(folder: Path, token: str) -> None:
    """Write into a folder that it is ours to remove under the name with this token."""
    beside = folder / f"{OWNER}.tmp"
    beside.unlink(missing_ok=True)
    with open(
        beside, "x"
    ) as file:  # new, since the name could be a named pipe, or a link to what is not ours to change
        file.write(token)
    os.replace(beside, folder / OWNER)


def _is_owned(folder: Path) -> bool:
    """Return whether a save wrote into the folder that it may be removed under its present name."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        return read_regular(folder / OWNER) == _token_of(folder).encode()
    except (OSError, ValueError):
        return False


def _token_of_deletion(name: str, drawn: str) -> str:
    """Return a token that says by itself that a deletion wrote it: the file that says so is the last to go."""
    return drawn + hashlib.sha256(f"{name} {drawn}".encode()).hexdigest()[: len(drawn)]


def _is_emptied(folder: Path, match: re.Match[str]) -> bool:
    """Return whether a deletion was killed before its very last step, which removes the empty folder."""
    token, name = match["token"], match["name"].removeprefix(".")
    is_ours = token == _token_of_deletion(name, token[: len(token) // 2])
    return is_ours and folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())


def _is_ours(entry: Path) -> bool:
    is_folder = entry.is_dir() and not entry.is_symlink()
    return not is_folder and (entry.name in _OWN_NAMES or entry.suffix == DATA_SUFFIX)


def _remove_unless_locked(folder: Path, *, is_own: bool) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return
    try:
        locked = _try_lock(descriptor)
        # Without locks there is no telling whether the writer is alive: then delete only what a save to this path left.
        if locked or (locked is None and is_own):
            delete_folder(folder)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool | None:
    """Return True if the lock was acquired, False if another save has it, None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)
