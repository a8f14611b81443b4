"""Count the engine's code lines, without blank lines, comments and docstrings.

``python -m tests.support.code_lines`` prints a table by folder; other roots may be named.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ENGINE = Path(__file__).resolve().parents[2] / "megatron/core/distributed/fsdp"
# What users of any module need for a step; the other folders are features around it.
CORE = ("config", "layout", "dtensor", "comm", "mesh", "buffers", "runtime", "api")

_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_WITH_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Lines:
    """Numbers of files, and of lines by kind."""

    files: int = 0
    code: int = 0
    comments: int = 0
    docstrings: int = 0

    def __add__(self, other: Lines) -> Lines:
        return Lines(
            self.files + other.files,
            self.code + other.code,
            self.comments + other.comments,
            self.docstrings + other.docstrings,
        )


def count(source: str) -> Lines:
    """Count the lines of a file. A line with code and a comment counts as both."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _WITH_DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code: set[int] = set()
    comments: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in _LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    return Lines(1, len(code - docstrings), len(comments), len(docstrings))


def count_files(paths: Iterable[Path]) -> Lines:
    """Return the sum over files."""
    return sum((count(path.read_text(encoding="utf-8")) for path in paths), Lines())


def by_folder(root: Path = ENGINE) -> dict[str, Lines]:
    """Return the lines of each folder directly below ``root``, subfolders included; "." has the files of the root."""
    folders = {path.name: count_files(path.rglob("*.py")) for path in sorted(root.iterdir()) if path.is_dir()}
    return {".": count_files(root.glob("*.py")), **{name: lines for name, lines in folders.items() if lines.files}}


def main(roots: list[Path]) -> None:
    """Print a table for each root: the core's folders, their sum, the others, the sum of all."""
    for root in roots:
        folders = by_folder(root)
        core = {name: folders[name] for name in CORE if name in folders}
        others = {name: lines for name, lines in folders.items() if name not in core}
        rows = [
            *core.items(),
            ("core", sum(core.values(), Lines())),
            *others.items(),
            ("all", sum(folders.values(), Lines())),
        ]
        print(f"{root}\n{'folder':22}{'files':>7}{'code':>8}{'comments':>10}{'docstrings':>12}")
        for name, lines in rows:
            print(f"{name:22}{lines.files:7}{lines.code:8}{lines.comments:10}{lines.docstrings:12}")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or [ENGINE])
