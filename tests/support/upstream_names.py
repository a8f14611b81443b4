"""Which names of ``megatron.*`` public code imports, and which of them exist here, counted by use.

``python -m tests.support.upstream_names`` prints the names that are missing, most used first. With ``--table FILE``, a list of
{module, name, files_that_import_it}, it first writes the table anew. Inference, vision, retrieval and post-training are not
counted: the library does not serve them.

    python -m tests.support.upstream_names --checkout FOLDER... [--missing 20]

prints for each folder, a checkout of a library around Megatron-Core, how many of its imports have their name here, and the missing
names with the number of files that import each. Of ``megatron.*`` only ``core`` and ``training`` are counted: others
(``megatron.bridge``, ``megatron.energon``) are packages of other projects.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
from collections import Counter
from pathlib import Path

TABLE = Path(__file__).parent / "fixtures" / "upstream_names.json"
WHOLE_MODULE = "*module*"
_NOT_COUNTED = ("inference", "vision", "retrieval", "retro", "post_training", "multimodal")
_NOT_COUNTED_IN_CHECKOUTS = (
    *_NOT_COUNTED,
    *("mimo", "vlm", "audio", "radio", "t5", "bert", "export", "elastification", "resharding", "text_generation"),
    "modelopt",
)
_Table = dict[str, dict[str, int]]


def read_table() -> dict[str, dict[str, int]]:
    """Return for each module its names, with the number of files that import each."""
    table: dict[str, dict[str, int]] = json.loads(TABLE.read_text())
    return table


def write_table(source: Path) -> None:
    """Write the names of a list of {module, name, files_that_import_it} that are counted, a line for each module."""
    table: dict[str, dict[str, int]] = {}
    for row in json.loads(source.read_text()):
        if not any(word in f"{row['module']}.{row['name']}".lower() for word in _NOT_COUNTED):
            table.setdefault(row["module"], {})[row["name"]] = row["files_that_import_it"]
    lines = (
        f"{json.dumps(module)}: {json.dumps(dict(sorted(names.items())))}" for module, names in sorted(table.items())
    )
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read_checkout(folder: Path) -> _Table:
    """Return the names of ``megatron`` that files below ``folder`` import, with the number of files that import each."""
    files = [path for path in sorted(folder.rglob("*.py")) if "megatron" in path.read_text(errors="ignore")]
    uses = Counter(use for path in files for use in _imports_of(path))
    table: _Table = {}
    for (module, name), count in sorted(uses.items()):
        words = f"{module}.{name}".lower()
        if not any(word in words for word in _NOT_COUNTED_IN_CHECKOUTS):
            table.setdefault(module, {})[name] = count
    return table


def _imports_of(path: Path) -> set[tuple[str, str]]:
    try:
        tree = ast.parse(path.read_text(errors="ignore"))
    except SyntaxError:
        return set()  # a template, or Python 2
    found: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_counted(node.module or ""):
            found |= {(str(node.module), alias.name) for alias in node.names if alias.name != "*"}
        elif isinstance(node, ast.Import):
            found |= {(one.name, WHOLE_MODULE) for one in node.names if _is_counted(one.name)}
    return found


def _is_counted(module: str) -> bool:
    return module.split(".")[0] == "megatron" and module.split(".")[1:2] in (["core"], ["training"])


def missing(table: dict[str, dict[str, int]]) -> list[tuple[int, str, str]]:
    """Return (count, module, name) of what does not exist here, most used first."""
    rows = [
        (n, module, name) for module, names in table.items() for name, n in names.items() if not _exists(module, name)
    ]
    return sorted(rows, key=lambda row: (-row[0], row[1:]))


def share(table: dict[str, dict[str, int]]) -> float:
    """Return the part of all imports whose name exists here."""
    uses = sum(sum(names.values()) for names in table.values())
    return 1 - sum(row[0] for row in missing(table)) / uses


def _exists(module: str, name: str) -> bool:
    if _imports(module):
        return name == WHOLE_MODULE or hasattr(importlib.import_module(module), name) or _imports(f"{module}.{name}")
    return False


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, help="a list of names with counts, from which to write the table")
    parser.add_argument("--checkout", type=Path, nargs="+", help="folders whose imports are counted")
    parser.add_argument("--missing", type=int, default=20, help="how many missing names are printed of each checkout")
    options = parser.parse_args()
    for folder in options.checkout or ():
        table = read_checkout(folder)
        rows, uses = missing(table), sum(sum(names.values()) for names in table.values())
        print(
            f"{folder}: {uses - sum(row[0] for row in rows)} of {uses} imports have their name here ({share(table):.1%})"
        )
        for count, module, name in rows[: options.missing]:
            print(f"  {count} {module} {name}")
    if options.checkout:
        return
    if options.table is not None:
        write_table(options.table)
    table = read_table()
    for count, module, name in missing(table):
        print(count, module, name)
    print(f"{share(table):.1%} of {sum(sum(names.values()) for names in table.values())} imports have their name here")


if __name__ == "__main__":
    main()
