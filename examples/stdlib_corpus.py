"""Writes the Python standard library's own sources as JSON lines: a corpus that every machine has.

Example::

    python examples/stdlib_corpus.py --output-folder runs/corpus

writes ``train.jsonl`` and ``valid.jsonl``, a module on each line. About one module in twenty is held out for validation.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings"}
"""Installed packages; tests, which some systems leave out; tables of code points, which are near copies of each other."""

HELD_OUT_ONE_IN = 20
"""Modules for each one that is held out."""

MIN_NBYTES = 4_000_000
"""Less text than this is a standard library with parts missing, and too little to learn from."""


class CorpusError(Exception):
    """The corpus cannot be made; the message says what to do."""


def list_modules(folder: Path) -> list[Path]:
    """[n] the source files below ``folder``, without those of ``SKIPPED_FOLDERS``, in the order of their names."""
    files = (path for path in folder.rglob("*.py") if not SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts))
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def read_modules(folder: Path) -> Iterator[tuple[str, str]]:
    """(name of the file below ``folder``, text) of each module; empty files and those in other encodings are left out."""
    for path in list_modules(folder):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield path.relative_to(folder).as_posix(), text


def is_held_out(name: str) -> bool:
    """Whether the module is for validation: a function of its name alone, so that other files do not matter."""
    return zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0


def write_corpus(folder: Path, output_folder: Path, *, min_nbytes: int = MIN_NBYTES) -> dict[str, int]:
    """``train.jsonl`` and ``valid.jsonl`` are complete in ``output_folder``; returns the bytes of text in each.

    Raises:
        CorpusError: there is less text than ``min_nbytes``.
    """
    output_folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {"train": [], "valid": []}
    sizes = dict.fromkeys(lines, 0)
    for name, text in read_modules(folder):
        part = "valid" if is_held_out(name) else "train"
        lines[part].append(json.dumps({"path": name, "text": text}))
        sizes[part] += len(text.encode())
    if sum(sizes.values()) < min_nbytes or not all(sizes.values()):
        raise CorpusError(
            f"{folder} must hold at least {min_nbytes:,} bytes of Python sources, got {sum(sizes.values()):,}; install "
            "the whole standard library (on Debian: apt-get install python3)"
        )
    for part, content in lines.items():
        beside = output_folder / f"{part}.jsonl.new"
        beside.write_text("".join(f"{line}\n" for line in content), encoding="utf-8")
        beside.replace(output_folder / f"{part}.jsonl")
    return sizes


def main(argv: Sequence[str] | None = None) -> int:
    """Write the corpus of this Python; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-folder", type=Path, required=True, help="where train.jsonl and valid.jsonl go")
    arguments = parser.parse_args(argv)
    folder = Path(sysconfig.get_paths()["stdlib"])
    try:
        sizes = write_corpus(folder, arguments.output_folder)
    except (CorpusError, OSError) as error:
        print(f"stdlib_corpus: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: {sizes['train']:,} bytes for training, {sizes['valid']:,} held out for validation")
    return 0


if __name__ == "__main__":
    sys.exit(main())
