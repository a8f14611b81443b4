"""The corpus of the quickstart is the same on every call, and its parts are disjoint."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from examples.stdlib_corpus import CorpusError, is_held_out, list_modules, main, write_corpus


def make_library(folder: Path, *, modules: int = 60) -> Path:
    """A folder like a standard library, with what must be left out."""
    for number in range(modules):
        path = folder / ("pkg" if number % 2 else "") / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"value = {number}\n")
    for name in ("site-packages/numpy.py", "test/test_os.py", "pkg/tests/test_x.py", "encodings/cp437.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("left_out = True\n")
    (folder / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (folder / "empty.py").write_text("")
    return folder


def documents(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_module_is_in_one_part_and_packages_and_tests_are_in_none(tmp_path: Path) -> None:
    library = make_library(tmp_path / "library")
    sizes = write_corpus(library, tmp_path / "corpus", min_nbytes=1)
    train, valid = (documents(tmp_path / "corpus" / f"{part}.jsonl") for part in ("train", "valid"))
    assert all(not is_held_out(document["path"]) for document in train)
    assert all(is_held_out(document["path"]) for document in valid) and valid
    names = [document["path"] for document in train + valid]
    assert sorted(names) == sorted(f"{'pkg/' if n % 2 else ''}module_{n}.py" for n in range(60))
    assert names[: len(train)] == sorted(names[: len(train)])
    assert sizes == {part: sum(len(d["text"]) for d in found) for part, found in (("train", train), ("valid", valid))}


def test_files_beside_it_do_not_move_a_module_to_the_other_part(tmp_path: Path) -> None:
    """A library of another version trains and validates on the same modules."""
    library = make_library(tmp_path / "library")
    write_corpus(library, tmp_path / "one", min_nbytes=1)
    (library / "aaa_new.py").write_text("new = True\n")
    write_corpus(library, tmp_path / "two", min_nbytes=1)
    one, two = ({d["path"] for d in documents(tmp_path / name / "valid.jsonl")} for name in ("one", "two"))
    assert one == two - {"aaa_new.py"}


def test_a_library_with_parts_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"at least 1,000,000 bytes of Python sources, got \d"):
        write_corpus(make_library(tmp_path / "library"), tmp_path / "corpus", min_nbytes=1_000_000)
    assert not (tmp_path / "corpus" / "train.jsonl").exists()


def test_this_python_has_enough_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output-folder", str(tmp_path)]) == 0
    assert "held out for validation" in capsys.readouterr().out
    modules = list_modules(Path(sysconfig.get_paths()["stdlib"]))
    held_out = len(documents(tmp_path / "valid.jsonl"))
    assert 0.02 < held_out / len(modules) < 0.1
