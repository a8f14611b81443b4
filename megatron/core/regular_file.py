"""Read files that somebody else may have made: regular files alone, without waiting, and JSON that is not nested too deeply.

Opening a FIFO blocks until somebody writes into it, a device may have no end, and JSON may be nested so deeply that the code
which reads it, or only what prints or copies it later, raises a RecursionError.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MOST_NBYTES = 1 << 30
_MOST_NESTED = 100
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file, or a symbolic link to one, to read bytes. Never blocks.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: something else is there, such as a folder, a named pipe, or a link that leads nowhere.
        OSError: it cannot be read.
    """
    _check_kind(path, os.stat(path) if os.path.exists(path) else os.lstat(path))  # opening a device may act on it
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_kind(path, os.fstat(descriptor))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def is_regular(path: str | os.PathLike[str]) -> bool:
    """Return whether a regular file, or a symbolic link to one, is there; False where nothing is. Never blocks.

    Raises:
        ValueError: something else is there; it must not be taken for a file that was never written.
        OSError: the folder cannot be read.
    """
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    _check_kind(path, os.stat(path) if os.path.exists(path) else status)
    return True


def read_regular(path: str | os.PathLike[str], most_nbytes: int = MOST_NBYTES) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        ValueError: the file is larger than ``most_nbytes``; also as ``open_regular``.
        FileNotFoundError, OSError: as ``open_regular``.
    """
    with open_regular(path) as file, naming(path):
        # Not ``read(most_nbytes + 1)``, which allocates that many bytes even for a small file.
        content = file.read() if os.fstat(file.fileno()).st_size <= most_nbytes else None
    if content is None or len(content) > most_nbytes:
        raise ValueError(
            f"{os.fspath(path)} must have at most {most_nbytes:,} bytes, got more; it is no such file, move it away"
        )
    return content


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file in errors of the system that name none, as reads from a failing disk raise."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = os.fspath(path)
        raise


def append_regular(path: str | os.PathLike[str], text: str) -> None:
    """Append to a regular file, which is made if it is not there. Never blocks.

    Raises:
        ValueError, OSError: as ``open_regular``; also where it cannot be written.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    if os.path.exists(path):
        _check_kind(path, os.stat(path))
    with open(os.open(path, flags, 0o644), "a", encoding="utf-8") as file:
        _check_kind(path, os.fstat(file.fileno()))
        file.write(text)


def parse_json(text: str | bytes, most_nested: int = _MOST_NESTED) -> Any:
    """Return the value of a JSON text, in UTF-8.

    Raises:
        ValueError: the text is no JSON, or has more than ``most_nested`` lists and objects inside of each other.
    """
    try:
        value = json.loads(text.decode() if isinstance(text, bytes) else text)
    except RecursionError as error:
        raise ValueError(f"{error}; lists and objects may be in at most {most_nested} others") from None
    level = _containers([value])
    for _ in range(most_nested):
        level = [inner for outer in level for inner in _containers(outer)]
    if level:
        raise ValueError(f"lists and objects must be in at most {most_nested} others, got more")
    return value


def read_json(path: str | os.PathLike[str], most_nbytes: int = MOST_NBYTES) -> Any:
    """Return the value of a JSON file.

    Raises:
        ValueError: it is no regular file, too large, or no JSON; names the file.
        FileNotFoundError, OSError: as ``open_regular``.
    """
    content = read_regular(path, most_nbytes)
    try:
        return parse_json(content)
    except ValueError as error:
        raise ValueError(f"{Path(path)} must be JSON, got: {str(error)[:200]}") from error


def _containers(outer: dict[str, Any] | list[Any]) -> list[dict[str, Any] | list[Any]]:
    return [one for one in (outer.values() if isinstance(outer, dict) else outer) if isinstance(one, dict | list)]


def _check_kind(path: str | os.PathLike[str], status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
    leads = f" to {os.readlink(path)}, where nothing is" if stat.S_ISLNK(status.st_mode) else ""
    raise ValueError(f"{os.fspath(path)} must be a regular file, got {kind}{leads}; move it away, or name another file")
