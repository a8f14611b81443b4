"""Which names of ``megatron.*`` public code imports, and which of them exist here, counted by use.

``python -m tests.support.upstream_names`` prints the names that are missing, most used first. With ``--table FILE``, a list of
{module, name, files_that_import_it}, it first writes the table anew. Inference, vision, retrieval and post-training are not
counted: the library does not serve them.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import json
from pathlib import Path

TABLE = Path(__file__).parent / "fixtures" / "upstream_names.json"
WHOLE_MODULE = "*module*"
_NOT_COUNTED = ("inference", "vision", "retrieval", "retro", "post_training", "multimodal")


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
    if module == "megatron.core.extensions.transformer_engine" and not importlib.util.find_spec("transformer_engine"):
        return name in _names_in_source(module)
    if _imports(module):
        return name == WHOLE_MODULE or hasattr(importlib.import_module(module), name) or _imports(f"{module}.{name}")
    return False


def _imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return module == "megatron.core.extensions.transformer_engine"
    return True


def _names_in_source(module: str) -> set[str]:
    """Return what a module that needs another package defines or imports."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    names = {WHOLE_MODULE}
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", type=Path, help="a list of names with counts, from which to write the table")
    source = parser.parse_args().table
    if source is not None:
        write_table(source)
    table = read_table()
    for count, module, name in missing(table):
        print(count, module, name)
    print(f"{share(table):.1%} of {sum(sum(names.values()) for names in table.values())} imports have their name here")


if __name__ == "__main__":
    main()
