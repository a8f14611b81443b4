"""A corpus that every machine has: the sources of the Python standard library, as JSON lines.

Example::

    python examples/stdlib_corpus.py --output-folder runs/corpus

writes ``train.jsonl`` and ``valid.jsonl``, one module on each line. About one module in twenty is held out for validation.
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
"""Installed packages, tests (which some systems leave out), and tables of code points (near copies of each other)."""

HELD_OUT_ONE_IN = 20
"""One in this many modules is held out."""

MIN_NBYTES = 4_000_000
"""Minimum bytes of text; with less, parts of the standard library are missing, and it is too little to train on."""


class CorpusError(Exception):
    """An error in making the corpus; the message says what to do."""


def list_modules(folder: Path) -> list[Path]:
    """List the source files below ``folder``, sorted by name, without those in ``SKIPPED_FOLDERS``."""
    files = (path for path in folder.rglob("*.py") if not SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts))
    return sorted(files, key=lambda path: path.relative_to(folder).as_posix())


def read_modules(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (name of the file below ``folder``, text) of each module, without empty files and those that are not UTF-8."""
    for path in list_modules(folder):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield path.relative_to(folder).as_posix(), text


def is_held_out(name: str) -> bool:
    """Return whether the module is for validation, by its name alone, so that other files do not matter."""
    return zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0


def write_corpus(folder: Path, output_folder: Path, *, min_nbytes: int = MIN_NBYTES) -> dict[str, int]:
    """Write ``train.jsonl`` and ``valid.jsonl`` to ``output_folder``; return the bytes of text in each.

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
    """Write the corpus of this Python; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-folder", type=Path, required=True, help="folder of train.jsonl and valid.jsonl")
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
