"""What is no regular file is refused by name, at once; JSON that is nested too deeply is a ValueError, as other damage is."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.core.regular_file import is_regular, open_regular, parse_json, read_json, read_regular


def _listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


KINDS: dict[str, Callable[[Path], object]] = {
    "a named pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a symbolic link to nowhere, where nothing is": lambda path: path.symlink_to("nowhere"),
    "a socket": _listen,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", [is_regular, open_regular, read_regular, read_json])
def test_what_is_no_regular_file_is_refused_by_name(tmp_path: Path, kind: str, read: Callable[[Path], object]) -> None:
    path = tmp_path / "file"
    KINDS[kind](path)
    with pytest.raises(ValueError, match=f"^{path} must be a regular file, got {kind}; move it away"):
        read(path)


def test_a_regular_file_is_read_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"a": [1]}')
    (tmp_path / "link").symlink_to("file")
    assert read_json(tmp_path / "link") == {"a": [1]}
    assert (
        is_regular(tmp_path / "link") and not is_regular(tmp_path / "none") and not is_regular(tmp_path / "file/none")
    )
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")
    with pytest.raises(ValueError, match=r"link must have at most 9 bytes, got more"):
        read_regular(tmp_path / "link", 9)


def test_an_error_of_the_disk_names_the_file(tmp_path: Path) -> None:
    """Python names no file in what a read raises."""
    (tmp_path / "file").symlink_to("/proc/self/mem")  # an address at which nothing is mapped
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}/file'"):
        read_regular(tmp_path / "file")


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 101 + "]" * 101, '{"a":' * 101 + "1" + "}" * 101])
def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path, text: str) -> None:
    """Also where Python reads it: what copies or prints it later recurses in more frames for each level."""
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=r"file must be JSON, got: .*lists and objects \w+ be in at most 100 others"):
        read_json(tmp_path / "file")


def test_json_is_what_python_reads() -> None:
    deep = json.loads("[" * 100 + "]" * 100)
    values: list[Any] = [deep, {"a": [{"b": None}, 1.5, "[[["]}, [], 3, "text"]
    for value in values:
        assert parse_json(json.dumps(value)) == value
    for text in ("", "{", b"\xff"):
        with pytest.raises(ValueError):
            parse_json(text)
